"""Discovery, on machines that are made of text files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cluster import discovery
from phalanx.cluster.discovery import (
    LIST_GPUS_SCRIPT,
    Cpu,
    DetectedGpu,
    Machine,
    check_workers,
    detect_gpus,
    discover_machine,
    parse_cpuinfo,
    read_cgroup_cores,
    read_cgroup_memory,
)
from phalanx.cluster.system_files import is_memory_backed
from phalanx.errors import RecipeError, UnfitNodeError, UsageError

EPYC = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC 9654 96-Core Processor
cpu MHz\t\t: 2400.000
flags\t\t: fpu sse2 avx fma avx2 avx512f avx512_bf16

processor\t: 1
model name\t: another
"""
XEON = """vendor_id : GenuineIntel
cpu family : 6
model name : Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz
cpu MHz : 800.1
flags : avx avx2 fma avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_tile
"""
GRAVITON = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd sve bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


def machine(root: Path, files: dict[str, str]) -> Path:
    """A file system with a CPU of 4 logical cores on 2 physical ones, 16 GiB, and `files` besides."""
    siblings = {
        f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 2},{n % 2 + 2}" for n in range(4)
    }
    whole = {"proc/cpuinfo": EPYC, "proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\n"}
    for name, text in {**whole, **siblings, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def look(  # type: ignore[no-untyped-def]
    root: Path,
    gpus: list[DetectedGpu] | None = None,
    affinity: tuple[int, ...] = (0, 1, 2, 3),
    device: str = "auto",
):
    return discover_machine(root, affinity, lambda: gpus or [], device)


def test_an_amd_cpu_is_read_from_its_first_processor() -> None:
    assert parse_cpuinfo(EPYC) == Cpu(
        "AMD EPYC 9654 96-Core Processor", "AuthenticAMD", 25, 17, 2.4, ("avx", "avx2", "fma", "avx512f", "avx512_bf16")
    )


@pytest.mark.parametrize(("highest", "ghz"), [(None, 2.0), (3.8, 3.8)])
def test_the_kernels_highest_clock_counts_before_the_nominal_and_the_present_one(
    highest: float | None, ghz: float
) -> None:
    assert parse_cpuinfo(XEON, ghz=highest).ghz == ghz


def test_an_arm_cpu_has_features_and_no_clock() -> None:
    cpu = parse_cpuinfo(GRAVITON)
    assert (cpu.name, cpu.ghz, cpu.flags) == ("ARM 0x41/0xd40", None, ("asimd", "sve", "bf16"))


def test_a_cpu_trains_on_itself_and_cores_are_physical_and_threads_logical(tmp_path: Path) -> None:
    found = look(machine(tmp_path, {}))
    assert (found.physical_cores, found.logical_cores, found.memory_bytes) == (2, 4, 16 * 2**30)
    assert (found.device, found.device_name, found.device_count) == ("cpu", "AMD EPYC 9654 96-Core Processor", 1)
    assert found.device_memory_bytes == found.memory_bytes


def test_affinity_limits_cores(tmp_path: Path) -> None:
    found = look(machine(tmp_path, {}), affinity=(0, 2))
    assert (found.physical_cores, found.logical_cores) == (1, 2)


def test_gpus_are_counted_and_named(tmp_path: Path) -> None:
    found = look(machine(tmp_path, {}), [DetectedGpu("NVIDIA H200", 140), DetectedGpu("NVIDIA H200", 141)])
    assert (found.device, found.device_name, found.device_count, found.device_memory_bytes) == (
        "cuda",
        "NVIDIA H200",
        2,
        140,
    )


def test_different_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnfitNodeError, match="CUDA_VISIBLE_DEVICES"):
        look(machine(tmp_path, {}), [DetectedGpu("NVIDIA H200", 1), DetectedGpu("NVIDIA T4", 1)])


def test_the_highest_clock_comes_from_the_frequency_driver(tmp_path: Path) -> None:
    root = machine(tmp_path, {"sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3700000"})
    assert look(root).cpu.ghz == 3.7


def test_a_version_2_group_limits_cores_and_memory(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slurm/job",
        "sys/fs/cgroup/slurm/job/cpu.max": "max 100000",
        "sys/fs/cgroup/slurm/cpu.max": "150000 100000",
        "sys/fs/cgroup/slurm/job/memory.max": str(2**30),
        "sys/fs/cgroup/slurm/memory.max": "max",
    }
    root = machine(tmp_path, files)
    assert read_cgroup_cores(root) == 1.5
    found = look(root)
    assert (found.physical_cores, found.logical_cores, found.memory_bytes) == (1, 1, 2**30)


def test_a_version_1_group_limits_cores_and_memory(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/x\n1:cpu:/docker/x\n0::/",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",  # the container's own group, seen as the root of the mount
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(3 * 2**30),
    }
    root = machine(tmp_path, files)
    assert (read_cgroup_cores(root), read_cgroup_memory(root)) == (3.0, 3 * 2**30)


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n1:cpu:/",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    root = machine(tmp_path, files)
    assert read_cgroup_cores(root) is None
    assert look(root).memory_bytes == 16 * 2**30


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert read_cgroup_cores(machine(tmp_path, {})) is None
    assert read_cgroup_memory(tmp_path) is None


def test_this_very_machine_can_be_looked_at() -> None:
    found = discover_machine(find_accelerators=list)
    assert 1 <= found.physical_cores <= found.logical_cores
    assert found.memory_bytes > 2**28


def test_without_a_driver_torch_is_not_asked(tmp_path: Path) -> None:
    assert detect_gpus(tmp_path, python="/nowhere/python") == []


def fake_python(folder: Path, script: str) -> str:
    (folder / "dev").mkdir()
    (folder / "dev/nvidiactl").touch()
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\n{script}")
    python.chmod(0o755)
    return str(python)


def test_gpus_are_listed_by_another_process(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "print('a notice')\nprint('[[\"NVIDIA B200\", 180, [10, 0], \"57a6\"]]')")
    assert detect_gpus(tmp_path, python) == [DetectedGpu("NVIDIA B200", 180, (10, 0), "57a6")]


def test_a_driver_that_torch_cannot_use_is_an_error_in_one_line(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "raise SystemExit('x\\nNo CUDA runtime')")
    with pytest.raises(UnfitNodeError, match="cannot list the GPUs: No CUDA runtime"):
        detect_gpus(tmp_path, python)


def test_a_driver_that_hangs_is_an_error(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "import signal; signal.pause()")
    with pytest.raises(UnfitNodeError, match="does not answer"):
        detect_gpus(tmp_path, python, timeout=0.3)


def test_torch_itself_lists_its_gpus_in_that_form() -> None:
    done = subprocess.run([sys.executable, "-c", LIST_GPUS_SCRIPT], capture_output=True, text=True, check=True)
    assert isinstance(json.loads(done.stdout), list)


H200, MI300X = DetectedGpu("NVIDIA H200", 141, (9, 0)), DetectedGpu("AMD MI300X", 192, rocm=True)


@pytest.mark.parametrize(
    ("gpu", "device", "found"),
    [
        (H200, "cpu", ("cpu", 0, False)),
        (H200, "cuda", ("cuda", 1, False)),
        (MI300X, "cuda", ("cuda", 1, True)),
        (H200, "auto", ("cuda", 1, False)),
    ],
)
def test_what_trains_is_what_the_recipe_asks_for(
    gpu: DetectedGpu, device: str, found: tuple[str, int, bool], tmp_path: Path
) -> None:
    machine_ = look(machine(tmp_path, {}), [gpu], device=device)
    assert (machine_.device, machine_.num_gpus, machine_.rocm) == found


def test_for_the_cpu_no_gpu_is_asked(tmp_path: Path) -> None:
    def ask() -> list[DetectedGpu]:
        raise AssertionError

    assert discover_machine(machine(tmp_path, {}), (0, 1), ask, "cpu").device == "cpu"


@pytest.mark.parametrize("visible", [None, ""])
def test_a_device_that_is_not_here_is_refused_with_the_variable_that_may_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    hidden = "" if visible is None else r" \(CUDA_VISIBLE_DEVICES= may hide it\)"
    message = (
        rf"torch \S+ does not find an NVIDIA or AMD GPU here{hidden}; cpu or auto would be valid; `phalanx doctor`"
    )
    with pytest.raises(RecipeError, match=f"^device: found cuda, but {message}"):
        look(machine(tmp_path, {}), [], device="cuda")


def machine_of(cores: int, gpus: int = 0) -> Machine:
    device = ("cuda", "a GPU", gpus) if gpus else ("cpu", "a CPU", 1)
    return Machine("host", *device, cores, 2 * cores, 2**36, 2**36, Cpu("a CPU"))


@pytest.mark.parametrize(
    ("machine", "workers", "nodes", "said"),
    [
        (
            machine_of(2),
            65,
            1,
            "65 workers on a node with 2 cores: expected at most 64; use --nproc-per-node 2, or a layout",
        ),
        (machine_of(64), 1025, 1, "1,025 workers on a node with 64 cores: expected at most 1,024"),
        (machine_of(2), 129, 2, "65 workers on a node with 2 cores"),
        (machine_of(64, gpus=8), 17, 2, "9 workers on a node with 8 GPUs: each worker takes one"),
    ],
)
def test_more_workers_than_a_node_can_have_are_refused(machine: Machine, workers: int, nodes: int, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_workers(machine, workers, nodes)
    assert str(caught.value).startswith(said)


def test_a_workers_gpus_are_the_first_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "detect_gpus", lambda: [DetectedGpu("X", 1, None, uuid) for uuid in ("b", "a")])
    assert [discovery.find_local_gpu_ids(count) for count in (1, None)] == [["GPU-b"], ["GPU-b", "GPU-a"]]


def test_no_gpus_are_known_with_a_broken_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[DetectedGpu]:
        raise UnfitNodeError("a GPU does not answer")

    monkeypatch.setattr(discovery, "detect_gpus", broken)
    assert discovery.find_local_gpu_ids(1) == []


MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
30 27 0:40 / /scratch rw - tmpfs tmpfs rw
31 27 0:41 / /scratch/my\\040data rw - lustre 10.0.0.1@o2ib:/fs rw
32 27 0:42 / /old rw - tmpfs tmpfs rw
33 27 253:0 / /old rw - xfs /dev/mapper/vg-data rw
"""


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        ("/home/me", False),
        ("/scratch/runs", True),
        ("/scratchy", False),  # another directory
        ("/scratch/my data/x", False),  # the deepest mount
        ("/old", False),  # the last mount hides the one before
    ],
)
def test_the_mount_of_a_directory_decides(tmp_path: Path, directory: str, expected: bool) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS)
    assert is_memory_backed(Path(directory), tmp_path) is expected


def test_without_a_mount_table_nothing_is_known(tmp_path: Path) -> None:
    assert not is_memory_backed(Path("/home"), tmp_path)
