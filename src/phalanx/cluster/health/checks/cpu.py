"""Check `cpu`: cores that are online and allowed, the limit of their clock, and other programs that use them."""

import os
import time
from collections.abc import Callable, Sequence

from phalanx.cluster.calibration.background_load import count_busy_cores
from phalanx.cluster.discovery import read_cgroup_cores
from phalanx.cluster.health.context import CheckContext, read_small_file
from phalanx.cluster.health.finding import FindingValue, HealthFinding, HealthVerdict, worst_verdict
from phalanx.cluster.health.thresholds import evaluate_threshold


def measure_cpu(
    context: CheckContext, affinity: Sequence[int] | None = None, sleep: Callable[[float], None] = time.sleep
) -> dict[str, FindingValue]:
    """Measure the CPU: its cores, limits and load."""
    folder = context.root / "sys/devices/system/cpu"
    allowed = sorted(os.sched_getaffinity(0) if affinity is None else affinity)
    return {
        "present": len(parse_cpu_list(read_small_file(folder / "present"))) or None,
        "online": len(parse_cpu_list(read_small_file(folder / "online"))) or None,
        "allowed": len(allowed),
        "quota_cores": read_cgroup_cores(context.root),
        "smt": read_small_file(folder / "smt/control") or None,
        "clock_limit_share": clock_limit_share(context, allowed),
        "busy_cores": count_busy_cores(context.root, sleep),
    }


def evaluate_cpu(figures: dict[str, FindingValue]) -> list[HealthFinding]:
    """Return one finding with all problems of the CPU."""
    present, online, allowed, quota = (
        _as_number(figures[name]) for name in ("present", "online", "allowed", "quota_cores")
    )
    limit, busy = _as_number(figures["clock_limit_share"]), _as_number(figures["busy_cores"])
    problems, verdicts = [], [HealthVerdict.PASS]
    # with hyper-threading switched off, the second thread of each core is present and not online
    if present and online and online < present and figures["smt"] not in ("off", "forceoff"):
        problems.append(f"{present - online:g} of {present:g} cores are switched off")
        verdicts.append(HealthVerdict.WARN)
    if allowed == 1 and online is not None and online > 1:
        problems.append(
            f"this process may use one of {online:g} cores (srun: repeat --cpus-per-task, which it forgets)"
        )
        verdicts.append(HealthVerdict.WARN)
    if quota is not None and allowed is not None and quota < allowed:
        problems.append(f"the control group grants the time of {quota:g} cores where {allowed:g} are allowed")
        verdicts.append(HealthVerdict.WARN)
    if limit is not None and (verdict := evaluate_threshold("clock under load", limit)) is not HealthVerdict.PASS:
        problems.append(f"the clock is limited to {limit:.0%} of its maximum (scaling_max_freq)")
        verdicts.append(verdict)
    if busy is not None and (verdict := evaluate_threshold("busy cores", busy)) is not HealthVerdict.PASS:
        problems.append(f"other programs keep {busy:.1f} cores busy")
        verdicts.append(verdict)
    summary = f"{_format_number(allowed)} cores allowed of {_format_number(online)} online"
    return [HealthFinding("cpu", worst_verdict(verdicts), "; ".join(problems) if problems else summary, figures)]


def check_cpu(context: CheckContext) -> list[HealthFinding]:
    return evaluate_cpu(measure_cpu(context))


def parse_cpu_list(text: str) -> list[int]:
    """The kernel's lists of CPUs: "0-3,8" -> 0, 1, 2, 3, 8."""
    found: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def clock_limit_share(context: CheckContext, cpus: Sequence[int]) -> float | None:
    """Return the lowest clock limit of any core over its maximum clock; usually None in virtual machines."""
    shares = []
    for cpu in cpus:
        folder = context.root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        limit, max_khz = read_small_file(folder / "scaling_max_freq"), read_small_file(folder / "cpuinfo_max_freq")
        if limit.isdigit() and max_khz.isdigit() and int(max_khz) > 0:
            shares.append(int(limit) / int(max_khz))
    return min(shares, default=None)


def _as_number(value: FindingValue) -> float | None:
    return value if isinstance(value, int | float) else None


def _format_number(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"
