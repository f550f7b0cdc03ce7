"""What the doctor says of GPUs, with a library that is made up, and of the kernel's messages about them."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cluster.device_links import GpuLinks
from phalanx.cluster.health import CheckContext, HealthVerdict, run_preflight
from phalanx.cluster.health.checks import gpus, kernel_log
from phalanx.cluster.health.checks.gpus import GpuState, check_gpus_present
from phalanx.cluster.health.checks.kernel_log import KernelMessage, XidAction, find_xid
from phalanx.cluster.health.finding import HealthFinding


class NVMLError(Exception):
    """What the library raises."""

    value = 0


class NoLibrary(NVMLError):
    """What its Python package raises without it."""

    value = 12


@dataclass
class Library:
    """NVML with two GPUs that are well, but for what is given by the function's name."""

    changed: dict[str, Any] = field(default_factory=dict)
    lost: int | None = None
    silent: NVMLError | None = None
    NVMLError: Any = NVMLError
    NVML_CLOCK_SM: int = 1

    def nvmlInit(self) -> None:
        if self.silent is not None:
            raise self.silent

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == self.lost:
            raise NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:0{handle}:00.0")

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100 80GB HBM3"

    def __getattr__(self, name: str) -> Any:
        whole = {
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=1, total=100),
            "nvmlDeviceGetTemperatureThreshold": 90,
            "nvmlDeviceGetTemperature": 40,
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
            "nvmlDeviceGetComputeRunningProcesses": [],
            "nvmlDeviceGetCurrentClocksThrottleReasons": 1,
            **self.changed,
        }

        def function(*arguments: Any) -> Any:
            if name not in whole:
                raise NVMLError("Not Supported")
            return whole[name]

        return function


def site(root: Path, count: int | None = 2, expected: int | None = None) -> CheckContext:
    """A machine with a driver that has `count` GPUs; None: without a driver."""
    if count is not None:
        (root / "dev").mkdir()
        (root / "dev/nvidiactl").touch()
        for index in range(count):
            (root / f"proc/driver/nvidia/gpus/0000:0{index}:00.0").mkdir(parents=True)
    return CheckContext(root, root, root, root, expected_devices=expected)


def found(root: Path, nvml: Any, expected: int | None = 2) -> dict[str, HealthFinding]:
    return {each.check: each for each in gpus.check_gpus(site(root, expected=expected), nvml)}


def test_gpus_that_are_well_are_fine(tmp_path: Path) -> None:
    assert {each.verdict for each in found(tmp_path, Library()).values()} == {HealthVerdict.PASS}


@pytest.mark.parametrize(
    ("nvml", "expected"), [(Library(), 8), (Library(lost=1), 2), (Library(silent=NVMLError("Driver Not Loaded")), 2)]
)
def test_fewer_gpus_than_expected_lost_ones_and_a_driver_that_does_not_answer_are_bad(
    tmp_path: Path, nvml: Library, expected: int
) -> None:
    said = found(tmp_path, nvml, expected)
    assert said["gpus/count"].verdict is HealthVerdict.FAIL
    assert nvml.lost is None or "does not answer (GPU is lost)" in said["gpus/gpu1"].reason


@pytest.mark.parametrize("nvml", [None, Library(silent=NoLibrary())])
def test_without_the_library_gpus_are_counted_and_the_rest_is_unknown(tmp_path: Path, nvml: Any) -> None:
    said = found(tmp_path, nvml)
    assert said["gpus/count"].verdict is HealthVerdict.PASS
    assert said["gpus/state"].verdict is HealthVerdict.UNKNOWN


def test_a_driver_that_shows_no_gpu_is_no_machine_without_one(tmp_path: Path) -> None:
    count, *_ = gpus.check_gpus(site(tmp_path, 0), None)
    assert count.verdict is HealthVerdict.UNKNOWN


def test_amds_gpus_are_counted_and_nvidias_library_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    for node, number in enumerate((0, 50149, 13421)):
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{number}\n")
    (tmp_path / "proc").mkdir()
    count, state = gpus.check_gpus(site(tmp_path, None, 2), Library())
    assert count.verdict is HealthVerdict.PASS
    assert state.verdict is HealthVerdict.UNKNOWN


def test_a_machine_without_gpus_is_fine_unless_some_are_expected(tmp_path: Path) -> None:
    assert [each.verdict for each in gpus.check_gpus(site(tmp_path, None), None)] == [HealthVerdict.PASS]
    assert [each.verdict for each in gpus.check_gpus(site(tmp_path, None, 8), None)] == [HealthVerdict.FAIL]


@pytest.mark.parametrize(
    ("function", "value", "verdict", "words"),
    [
        (
            "nvmlDeviceGetMemoryInfo",
            SimpleNamespace(used=20, total=100),
            HealthVerdict.WARN,
            "20% of its memory is held",
        ),
        ("nvmlDeviceGetMemoryInfo", SimpleNamespace(used=60, total=100), HealthVerdict.FAIL, "60%"),
        ("nvmlDeviceGetTemperature", 87, HealthVerdict.WARN, "3 degrees below"),
        ("nvmlDeviceGetTemperature", 91, HealthVerdict.FAIL, "see cooling"),
        ("nvmlDeviceGetRemappedRows", (0, 0, 1, 0), HealthVerdict.WARN, "next reset"),
        ("nvmlDeviceGetRemappedRows", (0, 0, 0, 1), HealthVerdict.FAIL, "replace the board"),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", 0x40, HealthVerdict.FAIL, "too hot"),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", 0x20, HealthVerdict.WARN, "too hot"),
        ("nvmlDeviceGetTotalEccErrors", 3, HealthVerdict.FAIL, "3 memory errors that could not be corrected"),
    ],
)
def test_what_is_wrong_with_a_gpu_is_told(
    tmp_path: Path, function: str, value: Any, verdict: HealthVerdict, words: str
) -> None:
    said = found(tmp_path, Library({function: value}))["gpus/gpu0"]
    assert said.verdict is verdict
    assert words in said.reason


def test_who_holds_a_gpus_memory_is_named() -> None:
    (said,) = gpus.evaluate_gpus([GpuState(0, used_memory_share=0.9, process_ids=(4711,))])
    assert "by process 4711" in said.reason


def test_a_power_limit_is_no_fault() -> None:
    assert gpus.find_gpu_problems(GpuState(0, throttle_bits=0x4 | 0x1)) == []


def test_missing_nvlinks_are_told() -> None:
    whole = GpuLinks("0000:00:00.0", nvlinks=18)
    (said,) = gpus.evaluate_gpu_links((whole, replace(whole, pci_address="0000:01:00.0", nvlinks=17)))
    assert said.verdict is HealthVerdict.WARN
    assert said.reason == "GPU 0000:01:00.0: 17 of 18 NVLinks are up"


XID79 = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("age", "text", "verdict"),
    [
        (60.0, XID79, HealthVerdict.FAIL),
        (90000.0, XID79, HealthVerdict.WARN),
        (60.0, XID79.replace("79", "31"), HealthVerdict.PASS),
        (60.0, XID79.replace("79", "63"), HealthVerdict.WARN),
        (60.0, "blk_update_request: I/O error, dev sda, sector 1", HealthVerdict.WARN),
        (60.0, "[Firmware Bug]: TSC doesn't count with P0 frequency!", HealthVerdict.PASS),
    ],
)
def test_the_kernels_messages_are_judged(age: float, text: str, verdict: HealthVerdict) -> None:
    (said,) = kernel_log.evaluate_kernel_log([KernelMessage(age, text)])
    assert said.verdict is verdict


def test_the_kernels_messages_are_read_with_their_age(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc").mkdir()
    (tmp_path / "dev/kmsg").write_text(f"3,100,5000000,-;{XID79}\n SUBSYSTEM=pci\n")
    (tmp_path / "proc/uptime").write_text("65.00 100.0\n")
    assert kernel_log.read_kernel_messages(CheckContext(tmp_path, tmp_path, tmp_path, tmp_path)) == [
        KernelMessage(60.0, XID79)
    ]


def test_messages_that_may_not_be_read_are_unknown(tmp_path: Path) -> None:
    (said,) = kernel_log.check_kernel_log(CheckContext(tmp_path, tmp_path, tmp_path, tmp_path))
    assert said.verdict is HealthVerdict.UNKNOWN


def looked(root: Path, expected: int) -> list[HealthVerdict]:
    space: Any = lambda path: SimpleNamespace(  # noqa: E731
        f_bavail=2**40, f_blocks=2**41, f_frsize=1, f_files=0, f_favail=0, f_flag=0
    )
    said = run_preflight(root / "run", expected, root, statvfs=space)
    return [each.verdict for each in said if each.check == "gpus/count"]


def test_an_agent_sees_that_a_gpu_is_gone(tmp_path: Path) -> None:
    site(tmp_path, 7)
    assert looked(tmp_path, 7) == [HealthVerdict.PASS]
    assert looked(tmp_path, 8) == [HealthVerdict.FAIL]


def test_an_agent_sees_that_a_gpu_fell_off_the_bus(tmp_path: Path) -> None:
    site(tmp_path, 2)
    for index, config in enumerate((b"\xde\x10", b"\xff\xff")):
        folder = tmp_path / f"sys/bus/pci/devices/0000:0{index}:00.0"
        folder.mkdir(parents=True)
        (folder / "config").write_bytes(config)
    assert looked(tmp_path, 2) == [HealthVerdict.PASS, HealthVerdict.FAIL]


def test_gpus_whose_driver_hides_its_folder_are_not_missing(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()  # gVisor and WSL2 have no /proc/driver/nvidia
    here = CheckContext(tmp_path, tmp_path, tmp_path, tmp_path, expected_devices=1)
    [said] = check_gpus_present(here)
    assert said.verdict is HealthVerdict.UNKNOWN
    (tmp_path / "proc/driver/nvidia/gpus").mkdir(parents=True)
    [said] = check_gpus_present(here)
    assert said.verdict is HealthVerdict.FAIL


@pytest.mark.parametrize(
    ("number", "action", "is_unfit"),
    [
        (13, XidAction.APPLICATION, False),
        (31, XidAction.APPLICATION, False),
        (45, XidAction.NONE, False),
        (63, XidAction.NONE, False),
        (94, XidAction.APPLICATION, False),
        (48, XidAction.RESET, True),
        (95, XidAction.RESET, True),
        (119, XidAction.RESET, True),
        (79, XidAction.DRAIN, True),
    ],
)
def test_each_number_has_what_the_catalog_asks_for(number: int, action: XidAction, is_unfit: bool) -> None:
    entry = find_xid(number)
    assert entry is not None
    assert (entry.action, entry.makes_unfit) == (action, is_unfit)


def test_memory_that_gets_worse_is_watched() -> None:
    watched = {number for number in range(1000) if (entry := find_xid(number)) is not None and entry.is_watched}
    assert watched == {63, 92, 94, 121, 157}


def test_an_unused_number_has_no_entry() -> None:
    assert find_xid(1) is None
