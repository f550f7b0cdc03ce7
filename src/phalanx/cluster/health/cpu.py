"""Check `cpu`: cores that are on and allowed, their clock's limit, and who else uses them."""

import os
import time
from collections.abc import Callable, Sequence

from phalanx.cluster.discover import cgroup_cores
from phalanx.cluster.health.finding import Figure, Finding, Verdict, worst
from phalanx.cluster.health.site import Site, read
from phalanx.cluster.health.thresholds import judge
from phalanx.cluster.probe.quiet import busy_cores


def look(
    site: Site, affinity: Sequence[int] | None = None, sleep: Callable[[float], None] = time.sleep
) -> dict[str, Figure]:
    """What there is of the CPU."""
    folder = site.root / "sys/devices/system/cpu"
    allowed = sorted(os.sched_getaffinity(0) if affinity is None else affinity)
    return {
        "present": len(numbers(read(folder / "present"))) or None,
        "online": len(numbers(read(folder / "online"))) or None,
        "allowed": len(allowed),
        "quota": cgroup_cores(site.root),
        "smt": read(folder / "smt/control") or None,
        "clock_limit": clock_limit(site, allowed),
        "busy": busy_cores(site.root, sleep),
    }


def evaluate(figures: dict[str, Figure]) -> list[Finding]:
    """What is wrong with it."""
    present, online, allowed, quota = (_number(figures[name]) for name in ("present", "online", "allowed", "quota"))
    limit, busy = _number(figures["clock_limit"]), _number(figures["busy"])
    wrong, verdicts = [], [Verdict.OK]
    # with hyper-threading switched off, the second thread of each core is present and not online
    if present and online and online < present and figures["smt"] not in ("off", "forceoff"):
        wrong.append(f"{present - online:g} of {present:g} cores are switched off")
        verdicts.append(Verdict.WARN)
    if allowed == 1 and online is not None and online > 1:
        wrong.append(f"this process may use one of {online:g} cores (srun: repeat --cpus-per-task, which it forgets)")
        verdicts.append(Verdict.WARN)
    if quota is not None and allowed is not None and quota < allowed:
        wrong.append(f"the control group grants the time of {quota:g} cores where {allowed:g} are allowed")
        verdicts.append(Verdict.WARN)
    if limit is not None and (verdict := judge("clock under load", limit)) is not Verdict.OK:
        wrong.append(f"the clock is limited to {limit:.0%} of its highest (scaling_max_freq)")
        verdicts.append(verdict)
    if busy is not None and (verdict := judge("busy cores", busy)) is not Verdict.OK:
        wrong.append(f"other programs keep {busy:.1f} cores busy")
        verdicts.append(verdict)
    fine = f"{_told(allowed)} cores allowed of {_told(online)} online"
    return [Finding("cpu", worst(verdicts), "; ".join(wrong) if wrong else fine, figures)]


def check(site: Site) -> list[Finding]:
    return evaluate(look(site))


def numbers(text: str) -> list[int]:
    """The kernel's lists of CPUs: "0-3,8" -> 0, 1, 2, 3, 8."""
    found: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def clock_limit(site: Site, cpus: Sequence[int]) -> float | None:
    """The lowest clock that any core is limited to, over its highest; None in virtual machines, as a rule."""
    shares = []
    for cpu in cpus:
        folder = site.root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        limit, most = read(folder / "scaling_max_freq"), read(folder / "cpuinfo_max_freq")
        if limit.isdigit() and most.isdigit() and int(most) > 0:
            shares.append(int(limit) / int(most))
    return min(shares, default=None)


def _number(value: Figure) -> float | None:
    return value if isinstance(value, int | float) else None


def _told(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"
