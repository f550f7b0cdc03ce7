"""Check `devices`: as many GPUs as must be, each answering, cool, at its clock, free, with sound memory and links.

Asked of NVIDIA's library (`nvidia-ml-py`) where it is installed. Without it they are counted in /proc and on the PCI
bus, and the rest is told to be unknown. The library may hang on a sick GPU: ask in a process that can be ended.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.cluster.discover import DEVICE_FILES
from phalanx.cluster.gpu_links import GpuLinks, gpu_links
from phalanx.cluster.health.finding import Figure, Finding, Verdict, worst
from phalanx.cluster.health.site import Site, read
from phalanx.cluster.health.thresholds import judge

BRAKES = {
    0x08: ("the hardware slows its clock down (heat, power or a fault of its board)", Verdict.BAD),
    0x40: ("the hardware slows its clock down: too hot", Verdict.BAD),
    0x80: ("the power supply slows its clock down", Verdict.BAD),
    0x20: ("the driver slows its clock down: too hot", Verdict.WARN),
}
"""What NVML's reasons for low clocks mean (nvmlClocksEventReasons); idleness and power limits are no faults."""

NVIDIA = ("dev/nvidiactl", "dev/dxg")
"""One of these exists where NVIDIA's library may have something to tell."""
NO_LIBRARY = 12
"""NVML_ERROR_LIBRARY_NOT_FOUND: the driver may be well, there is only nobody to ask."""


@dataclass(frozen=True)
class Gpu:
    """What the library says of one GPU; None for what it does not know."""

    index: int
    name: str = ""
    lost: str | None = None
    """Why it does not answer."""
    memory_share: float | None = None
    """Held by anything, over all."""
    headroom: float | None = None
    """Degrees below the temperature at which it slows down."""
    brakes: int = 0
    corrected: int | None = None
    uncorrected: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    retired: int | None = None
    pids: tuple[int, ...] = ()


def counted(root: Path) -> int:
    """GPUs that a driver has taken, without asking it: of NVIDIA by /proc, of AMD by the topology of its driver."""
    nvidia = root / "proc/driver/nvidia/gpus"
    if nvidia.is_dir():
        return len(list(nvidia.iterdir()))
    nodes = root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id")
    return sum(_amd_gpu(path) for path in nodes)  # CPUs are nodes, too, with the number 0


def countable(root: Path) -> bool:
    """Whether `counted` can see GPUs at all: containers and sandboxes may hide the folders of drivers."""
    return any((root / name).is_dir() for name in ("proc/driver/nvidia/gpus", "sys/class/kfd/kfd/topology/nodes"))


def _amd_gpu(path: Path) -> bool:
    text = read(path)
    return text.isdigit() and int(text) > 0


def driver_loaded(root: Path) -> bool:
    """Whether any driver of accelerators is."""
    return any((root / name).exists() for name in DEVICE_FILES)


def ask(nvml: Any) -> list[Gpu]:
    """Every GPU. NVMLError when the library cannot even count them."""
    return [_ask(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def _ask(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = nvml.nvmlDeviceGetName(handle)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        return Gpu(index, lost=str(error))

    def of(function: str, *arguments: Any) -> Any:
        """What a function returns; None for what this GPU, its driver or this version of the library does not have."""
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            return getattr(nvml, function)(handle, *arguments)
        return None

    hot, now = of("nvmlDeviceGetTemperatureThreshold", 1), of("nvmlDeviceGetTemperature", 0)
    # corrected errors since the driver was loaded, then those that were not corrected
    corrected, uncorrected = (of("nvmlDeviceGetTotalEccErrors", kind, 0) for kind in (0, 1))
    rows = of("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
    retired = [of("nvmlDeviceGetRetiredPages", cause) for cause in (0, 1)]
    running = of("nvmlDeviceGetComputeRunningProcesses") or []
    return Gpu(
        index,
        name.decode() if isinstance(name, bytes) else str(name),
        memory_share=memory.used / memory.total,
        headroom=float(hot - now) if hot and now is not None else None,
        brakes=int(
            of("nvmlDeviceGetCurrentClocksEventReasons") or of("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        ),
        corrected=corrected,
        uncorrected=uncorrected,
        remap_pending=bool(rows[2]) or bool(of("nvmlDeviceGetRetiredPagesPendingStatus")),
        remap_failed=bool(rows[3]),
        retired=None if None in retired else sum(len(each) for each in retired),
        pids=tuple(int(each.pid) for each in running),
    )


def judged(gpu: Gpu) -> list[tuple[Verdict, str]]:
    """All that is wrong with one of them."""
    if gpu.lost is not None:
        return [(Verdict.BAD, f"it does not answer ({gpu.lost}): reset it, or restart the machine")]
    found = [(verdict, text) for bit, (text, verdict) in BRAKES.items() if gpu.brakes & bit]
    if gpu.uncorrected:
        text = f"{gpu.uncorrected} memory errors that could not be corrected since the driver was loaded: reset it"
        found.append((Verdict.BAD, text))
    if gpu.remap_failed:
        found.append((Verdict.BAD, "bad memory could not be replaced (row remapping failed): replace the board"))
    if gpu.remap_pending:
        found.append((Verdict.WARN, "bad memory is replaced at the next reset: reset it soon"))
    measured: list[tuple[str, float | None, Callable[[float], str]]] = [
        ("corrected ECC errors", gpu.corrected, lambda value: f"{value:.3g} corrected memory errors"),
        ("retired pages", gpu.retired, lambda value: f"{value:.0f} pages of memory are retired"),
        (
            "GPU temperature margin",
            gpu.headroom,
            lambda value: f"{value:.0f} degrees below where it slows down: see cooling",
        ),
        ("GPU memory in use", gpu.memory_share, lambda value: f"{value:.0%} of its memory is held{_by(gpu.pids)}"),
    ]
    for name, value, words in measured:
        if value is not None and (verdict := judge(name, value)) is not Verdict.OK:
            found.append((verdict, words(value)))
    return found


def _by(pids: tuple[int, ...]) -> str:
    return f" by process {', '.join(str(pid) for pid in pids)}" if pids else " by a process that cannot be seen"


def evaluate(gpus: list[Gpu]) -> list[Finding]:
    """A finding for each that has something wrong, or one for all."""
    found = []
    for gpu in gpus:
        if wrong := judged(gpu):
            text = "; ".join(words for _, words in wrong)
            figures: dict[str, Figure] = {
                "index": gpu.index,
                "headroom": gpu.headroom,
                "memory_share": gpu.memory_share,
            }
            found.append(Finding(f"gpus/gpu{gpu.index}", worst(verdict for verdict, _ in wrong), text, figures))
    hottest = min((gpu.headroom for gpu in gpus if gpu.headroom is not None), default=None)
    told = "" if hottest is None else f", at least {hottest:.0f} degrees below slowing down"
    return found or [Finding("gpus/state", Verdict.OK, f"all answer, nothing slows them down{told}")]


def number(here: int, expected: int | None, why: str) -> Finding:
    """Of how many there are."""
    figures: dict[str, Figure] = {"count": here, "expected": expected}
    if expected is not None and here < expected:
        text = f"{here} GPUs where {expected} are expected ({why}): see dmesg for XID 79, and the seat of the cards"
        return Finding("gpus/count", Verdict.BAD, text, figures)
    if expected is not None and here > expected:
        return Finding("gpus/count", Verdict.WARN, f"{here} GPUs where {expected} are expected ({why})", figures)
    told = f"{here} GPUs" if here else "no GPU: a CPU trains"
    return Finding("gpus/count", Verdict.OK, told + ("" if expected is None else f", as expected ({why})"), figures)


def links(found: tuple[GpuLinks, ...]) -> list[Finding]:
    """Of PCIe lanes and NVLinks that are missing."""
    wrong = [each.narrow for each in found if each.narrow]
    most = max((each.nvlinks for each in found), default=0)
    wrong += [f"GPU {each.bus}: {each.nvlinks} of {most} NVLinks are up" for each in found if each.nvlinks < most]
    if wrong:
        return [Finding("gpus/links", Verdict.WARN, "; ".join(wrong))]
    if not found:
        return []
    told = f"{most} NVLinks each" if most else "no NVLinks"
    return [Finding("gpus/links", Verdict.OK, f"PCIe links have all their lanes; {told}", {"nvlinks": most})]


def check(site: Site, expected: int | None, why: str, nvml: Any) -> list[Finding]:
    """`expected`, and `why` so many; `nvml`: the library, or None."""
    if not driver_loaded(site.root):
        return [number(0, expected, why)]
    if not any((site.root / name).exists() for name in NVIDIA):
        return _unasked(site, expected, why, "read of NVIDIA's GPUs only")
    if nvml is None:
        cure = "read by the package nvidia-ml-py, which is missing (pip install 'phalanx[gpu]')"
        return _unasked(site, expected, why, cure)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if getattr(error, "value", None) == NO_LIBRARY:
            return _unasked(site, expected, why, "told by libnvidia-ml, which is not in this container")
        text = f"a GPU driver is loaded, but does not answer ({error}): see dmesg, or restart the machine"
        return [Finding("gpus/count", Verdict.BAD, text)]
    try:
        gpus = ask(nvml)
        found = [number(sum(gpu.lost is None for gpu in gpus), expected, why), *evaluate(gpus)]
        if all(gpu.lost is None for gpu in gpus):
            found += links(gpu_links(site.root, nvml))
        return found
    finally:
        nvml.nvmlShutdown()


def _unasked(site: Site, expected: int | None, why: str, words: str) -> list[Finding]:
    """What is known without the library."""
    text = f"not known: temperature, memory errors and clocks are {words}"
    here = counted(site.root)
    unseen = Finding("gpus/count", Verdict.UNKNOWN, "not known: a GPU driver is loaded, but nothing tells of its GPUs")
    return [
        unseen if here == 0 and not (expected and countable(site.root)) else number(here, expected, why),
        Finding("gpus/state", Verdict.UNKNOWN, text),
        *links(gpu_links(site.root)),
    ]
