"""What the doctor says of cores, memory, disks, limits, names and versions, on machines made of text files."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cluster.device_links import Nic
from phalanx.cluster.health import CheckContext, HealthVerdict, worst_verdict
from phalanx.cluster.health.checks import host, network
from phalanx.cluster.health.finding import THRESHOLD_BY_NAME, HealthFinding, evaluate_threshold
from phalanx.cluster.system_files import OtherLoad

GIB = 2**30


def put(root: Path, **files: str) -> None:
    """Files below `root`; `__` stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def site(root: Path, **given: Any) -> CheckContext:
    return CheckContext(run_dir=root / "run", cache_dir=root / "cache", temp_dir=root / "tmp", root=root, **given)


def space(free: float, total: float = 100 * GIB, **given: Any) -> Any:
    """What statvfs says of a file system with blocks of one byte."""
    whole = {
        "f_bavail": int(free),
        "f_blocks": int(total),
        "f_frsize": 1,
        "f_files": 1000,
        "f_favail": 10**6,
        "f_flag": 0,
    }
    return lambda path: SimpleNamespace(**{**whole, **given})


def only(findings: list[HealthFinding]) -> HealthFinding:
    (one,) = findings
    return one


def test_a_check_without_end_is_no_pass_and_an_unknown_one_is_not_held_against_the_machine() -> None:
    assert HealthVerdict.ERROR.is_unfit
    assert HealthVerdict.FAIL.is_unfit
    assert not HealthVerdict.UNKNOWN.is_unfit
    assert worst_verdict([HealthVerdict.PASS, HealthVerdict.ERROR, HealthVerdict.WARN]) is HealthVerdict.ERROR


@pytest.mark.parametrize("name", THRESHOLD_BY_NAME)
def test_thresholds_get_graver_in_one_direction(name: str) -> None:
    one = THRESHOLD_BY_NAME[name]
    bounds = [bound for bound in (one.warn, one.fail) if bound is not None]
    assert bounds
    assert bounds == sorted(bounds, reverse=not one.is_upper)


def test_a_threshold_itself_is_still_right() -> None:
    assert evaluate_threshold("matmul slowdown", 0.05) is HealthVerdict.PASS
    assert evaluate_threshold("matmul slowdown", 0.0501) is HealthVerdict.WARN
    assert evaluate_threshold("matmul slowdown", 0.2001) is HealthVerdict.FAIL
    assert evaluate_threshold("memory free", 0.04) is HealthVerdict.FAIL


def machine(root: Path, **files: str) -> None:
    stat = "cpu  10 0 10 1000 0 0 0 0 0 0\ncpu0 5 0 5 500 0 0 0 0 0 0\ncpu1 5 0 5 500 0 0 0 0 0 0\nintr 1"
    whole = {
        "proc__stat": stat,
        "sys__devices__system__cpu__present": "0-3",
        "sys__devices__system__cpu__online": "0-3",
        "sys__devices__system__cpu__smt__control": "on",
    }
    put(root, **{**whole, **files})


def looked(root: Path, affinity: list[int], busy: str | None = None) -> HealthFinding:
    def sleep(seconds: float) -> None:
        if busy is not None:
            put(root, proc__stat=busy)

    return only(host.evaluate_cpu(host.measure_cpu(site(root), affinity, sleep)))


@pytest.mark.parametrize(
    ("files", "affinity", "verdict"),
    [
        ({}, [0, 1, 2, 3], HealthVerdict.PASS),
        ({"online": "0-1,3"}, [0, 1, 3], HealthVerdict.WARN),
        ({"online": "0-1", "smt__control": "off"}, [0, 1], HealthVerdict.PASS),  # threads off are no fault
    ],
)
def test_cores_that_are_switched_off_are_told(
    tmp_path: Path, files: dict[str, str], affinity: list[int], verdict: HealthVerdict
) -> None:
    machine(tmp_path, **{f"sys__devices__system__cpu__{name}": text for name, text in files.items()})
    assert looked(tmp_path, affinity).verdict is verdict


def test_one_core_of_many_is_told_as_sruns_forgetting(tmp_path: Path) -> None:
    machine(tmp_path)
    assert "--cpus-per-task" in looked(tmp_path, [2]).reason


def test_cores_that_others_keep_busy_are_told(tmp_path: Path) -> None:
    machine(tmp_path)
    busy = "cpu  60 0 10 1030 0 0 0 0 0 0\ncpu0 5 0 5 500\ncpu1 5 0 5 500"
    found = looked(tmp_path, [0, 1, 2, 3], busy)
    assert found.verdict is HealthVerdict.WARN
    assert found.values["busy_cores"] == pytest.approx(2 * 50 / 80)


def test_the_load_of_others_is_what_is_busy_without_this_process(tmp_path: Path) -> None:
    put(tmp_path, proc__stat="cpu  10 0 10 1000 0 0 0 0 0 0\ncpu0 5 0 5 500\ncpu1 5 0 5 500")
    load = OtherLoad(tmp_path, lambda: 0.0)
    assert load.count_cores() == 0.0  # no tick has passed
    load = OtherLoad(tmp_path, iter([0.0, 0.2]).__next__)
    put(tmp_path, proc__stat="cpu  60 0 10 1030 0 0 0 0 0 0\ncpu0 5 0 5 500\ncpu1 5 0 5 500")
    own_ticks = 0.2 * os.sysconf("SC_CLK_TCK")
    assert load.count_cores() == pytest.approx(2 * (50 - own_ticks) / 80)


def meminfo(available: float) -> str:
    total = 100 * 2**20
    fields = {"MemTotal": total, "MemAvailable": int(available * total)}
    return "\n".join(f"{name}: {value} kB" for name, value in fields.items())


def remembering(root: Path, shm: Any = None) -> list[HealthFinding]:
    return host.evaluate_memory(host.measure_memory(site(root), shm or space(50 * GIB)))


@pytest.mark.parametrize(
    ("share", "verdict"), [(0.9, HealthVerdict.PASS), (0.2, HealthVerdict.WARN), (0.04, HealthVerdict.FAIL)]
)
def test_memory_is_judged_by_what_is_free(tmp_path: Path, share: float, verdict: HealthVerdict) -> None:
    put(tmp_path, proc__meminfo=meminfo(share))
    assert remembering(tmp_path)[0].verdict is verdict


def test_the_control_groups_limit_counts_before_the_machines_memory(tmp_path: Path) -> None:
    put(tmp_path, proc__meminfo=meminfo(0.9), proc__self__cgroup="0::/job")
    group = {"memory.max": 10 * GIB, "memory.current": 9.8 * GIB}
    for name, value in group.items():
        path = tmp_path / "sys/fs/cgroup/job" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{int(value)}\n")
    (tmp_path / "sys/fs/cgroup/job/memory.stat").write_text("anon 1\ninactive_file 0\n")
    found = remembering(tmp_path)[0]
    assert found.verdict is HealthVerdict.FAIL
    assert "10.0 GiB free (2% of the control group's limit)" in found.reason


def test_files_in_the_page_cache_do_not_fill_a_control_group(tmp_path: Path) -> None:
    put(tmp_path, proc__self__cgroup="4:memory:/job")
    folder = tmp_path / "sys/fs/cgroup/memory/job"
    folder.mkdir(parents=True)
    (folder / "memory.usage_in_bytes").write_text("1000\n")
    (folder / "memory.stat").write_text("cache 900\ninactive_file 700\n")
    assert host.read_cgroup_used(tmp_path) == 300


def test_a_machine_that_tells_nothing_of_its_memory_is_unknown(tmp_path: Path) -> None:
    assert remembering(tmp_path)[0].verdict is HealthVerdict.UNKNOWN


@pytest.mark.parametrize(
    ("free", "verdict"), [(GIB, HealthVerdict.PASS), (2**26, HealthVerdict.WARN), (2**20, HealthVerdict.FAIL)]
)
def test_shared_memory_is_judged_by_its_room(tmp_path: Path, free: int, verdict: HealthVerdict) -> None:
    put(tmp_path, proc__meminfo=meminfo(0.9))
    assert remembering(tmp_path, space(free))[1].verdict is verdict


def test_a_missing_shared_memory_is_told(tmp_path: Path) -> None:
    def none(path: Path) -> Any:
        raise FileNotFoundError

    assert remembering(tmp_path, none)[1].verdict is HealthVerdict.WARN


def folders(root: Path) -> CheckContext:
    for name in ("cache", "tmp"):
        (root / name).mkdir()
    return site(root)


@pytest.mark.parametrize(
    ("free", "verdict"), [(20, HealthVerdict.PASS), (5, HealthVerdict.WARN), (0.5, HealthVerdict.FAIL)]
)
def test_a_runs_disk_is_judged_by_its_room(tmp_path: Path, free: float, verdict: HealthVerdict) -> None:
    found = host.check_disk_space(folders(tmp_path), space(free * GIB))
    assert [each.check for each in found] == ["disk/run", "disk/cache", "disk/temp"]
    assert found[0].verdict is verdict


@pytest.mark.parametrize(
    ("state", "verdict", "reason"),
    [
        ({"f_favail": 100}, HealthVerdict.FAIL, "only 100 free inodes"),
        ({"f_files": 0, "f_favail": 0}, HealthVerdict.PASS, ""),  # it counts no inodes
        ({"f_flag": os.ST_RDONLY}, HealthVerdict.FAIL, "read-only"),
    ],
)
def test_a_disk_that_takes_no_more_files_is_bad(
    tmp_path: Path, state: dict[str, int], verdict: HealthVerdict, reason: str
) -> None:
    found = host.check_disk_space(folders(tmp_path), space(50 * GIB, **state))
    assert {each.verdict for each in found} == {verdict}
    assert reason in found[0].reason


def test_a_disk_that_fails_is_bad_and_named(tmp_path: Path) -> None:
    def failing(path: Path) -> Any:
        raise OSError(5, "Input/output error")

    found = host.check_disk_space(folders(tmp_path), failing)
    assert {each.verdict for each in found} == {HealthVerdict.FAIL}
    assert found[0].reason == f"{tmp_path / 'run'}: Input/output error"


def test_a_run_that_does_not_exist_yet_is_checked_where_it_would_be_made(tmp_path: Path) -> None:
    assert host.nearest_existing(tmp_path / "a/b/c") == tmp_path


def limited(root: Path, files: int, locked: int) -> HealthFinding:
    import resource

    given = {resource.RLIMIT_NOFILE: (files, 2 * files), resource.RLIMIT_MEMLOCK: (locked, locked)}
    return only(host.evaluate_ulimits(host.measure_ulimits(site(root), lambda which: given[which])))


@pytest.mark.parametrize(
    ("files", "verdict"), [(1024, HealthVerdict.PASS), (512, HealthVerdict.WARN), (64, HealthVerdict.FAIL)]
)
def test_open_files_are_judged(tmp_path: Path, files: int, verdict: HealthVerdict) -> None:
    assert limited(tmp_path, files, 2**23).verdict is verdict


def test_little_lockable_memory_is_told_where_there_is_rdma(tmp_path: Path) -> None:
    port = "sys__class__infiniband__mlx5_0__ports__1__"
    put(
        tmp_path,
        **{f"{port}link_layer": "InfiniBand", f"{port}state": "4: ACTIVE", f"{port}rate": "400 Gb/sec (4X NDR)"},
    )
    found = limited(tmp_path, 4096, 2**23)
    assert found.verdict is HealthVerdict.WARN
    assert "ulimit -l" in found.reason


@pytest.mark.parametrize(
    ("addresses", "verdict", "words"),
    [
        (["10.0.0.7"], HealthVerdict.PASS, "node7 is 10.0.0.7"),
        (["127.0.1.1", "::1"], HealthVerdict.WARN, "GLOO_SOCKET_IFNAME"),  # only this machine can reach it
    ],
)
def test_the_address_of_a_name_is_judged(addresses: list[str], verdict: HealthVerdict, words: str) -> None:
    found = network.evaluate_hostname("node7", lambda name: addresses)
    assert found.verdict is verdict
    assert words in found.reason


def test_a_name_without_an_address_is_told() -> None:
    def none(name: str) -> list[str]:
        raise OSError(-2, "Name or service not known")

    found = network.evaluate_hostname("node7", none)
    assert found.verdict is HealthVerdict.WARN
    assert "Name or service not known" in found.reason


CARDS = (
    Nic("eth0", "ethernet", True),
    Nic("mlx5_0:1", "infiniband", True, 50.0),
    Nic("mlx5_1:1", "infiniband", True, 50.0),
)


@pytest.mark.parametrize(
    ("variable", "wanted", "verdict"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", HealthVerdict.PASS),
        ("GLOO_SOCKET_IFNAME", "eth", HealthVerdict.FAIL),
        ("GLOO_SOCKET_IFNAME", "eth0,lo", HealthVerdict.PASS),
        ("GLOO_SOCKET_IFNAME", "eth0,eth7", HealthVerdict.FAIL),
        ("NCCL_SOCKET_IFNAME", "eth", HealthVerdict.PASS),
        ("NCCL_SOCKET_IFNAME", "=eth", HealthVerdict.FAIL),
        ("NCCL_SOCKET_IFNAME", "^docker", HealthVerdict.PASS),
        ("NCCL_SOCKET_IFNAME", "ib", HealthVerdict.FAIL),
    ],
)
def test_interfaces_that_libraries_are_told_to_use_must_exist(
    variable: str, wanted: str, verdict: HealthVerdict
) -> None:
    assert network.evaluate_interfaces(CARDS, {variable: wanted}).verdict is verdict


def test_an_rdma_port_that_is_down_among_others_is_told() -> None:
    found = network.evaluate_interfaces((*CARDS, Nic("mlx5_2:1", "infiniband", False)), {})
    assert found.verdict is HealthVerdict.WARN
    assert "1 of 3 RDMA ports are down: mlx5_2:1" in found.reason


FIGURES = {"python": "3.12.1", "torch": "2.13.0", "phalanx": "0.1.0", "numpy": "2", "kernel": "6.1", "driver": None}


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, HealthVerdict.PASS),
        ({"torch": None}, HealthVerdict.FAIL),
        ({"torch": "2.10.0"}, HealthVerdict.WARN),
        ({"torch": "2.16.0"}, HealthVerdict.WARN),
        ({"torch": "2.13.0+cpu"}, HealthVerdict.PASS),
        ({"torch": "2.13.0+cpu", "driver": "nvidia 550.1"}, HealthVerdict.WARN),
    ],
)
def test_versions_are_judged(changed: dict[str, Any], verdict: HealthVerdict) -> None:
    assert only(host.evaluate_versions({**FIGURES, **changed})).verdict is verdict
