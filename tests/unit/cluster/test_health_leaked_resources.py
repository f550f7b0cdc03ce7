"""What dead runs leave behind: on a /proc made of text files."""

from pathlib import Path
from tempfile import NamedTemporaryFile

from phalanx.cluster.health import CheckContext, HealthVerdict
from phalanx.cluster.health.checks import leaked_resources
from phalanx.cluster.health.finding import HealthFinding

TORCHRUN = "RANK=0\0WORLD_SIZE=2\0MASTER_ADDR=10.0.0.1\0"
NURSERY = "python\0-m\0phalanx.jobs.agent.fork_server\0005\0006\0007\00042\0"


def process(
    root: Path, pid: int, parent: int, name: str, state: str = "S", command: str = "", environ: str = ""
) -> Path:
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} ({name}) {state} {parent} {pid} 0 0\n")
    (folder / "cmdline").write_text(command)
    (folder / "environ").write_text(environ)
    (folder / "maps").write_text("")
    return folder


def found(root: Path) -> dict[str, HealthFinding]:
    (root / "dev/shm").mkdir(parents=True, exist_ok=True)
    site = CheckContext(root, root, root, root)
    return {
        each.check.partition("/")[2]: each
        for each in leaked_resources.check_leaked_resources(site, lambda seconds: None)
    }


def test_a_clean_machine_is_fine(tmp_path: Path) -> None:
    process(tmp_path, 1, 0, "systemd", command="/sbin/init")
    process(tmp_path, 50, 1, "bash", command="bash")
    assert {each.verdict for each in found(tmp_path).values()} == {HealthVerdict.PASS}


def test_workers_that_were_adopted_are_bad_and_named(tmp_path: Path) -> None:
    process(tmp_path, 1, 0, "systemd")
    process(tmp_path, 60, 1, "python", command="python\0train.py\0", environ=TORCHRUN)
    process(tmp_path, 70, 1, "python (x)", command=NURSERY)
    process(tmp_path, 71, 70, "python", command=NURSERY)
    said = found(tmp_path)["workers"]
    assert said.verdict is HealthVerdict.FAIL
    assert said.values["pids"] == "60 70 71"


def test_workers_with_an_agent_are_no_leftovers(tmp_path: Path) -> None:
    process(tmp_path, 1, 0, "systemd")
    process(tmp_path, 42, 1, "phalanx", command="phalanx\0train\0")
    process(tmp_path, 70, 42, "python", command=NURSERY)
    process(tmp_path, 71, 70, "python", command=NURSERY)
    process(tmp_path, 80, 42, "python", command="python\0train.py\0", environ=TORCHRUN)
    assert found(tmp_path)["workers"].verdict is HealthVerdict.PASS


def test_an_agent_that_is_the_first_process_of_its_container_is_one(tmp_path: Path) -> None:
    process(tmp_path, 1, 0, "torchrun", command="torchrun\0")
    process(tmp_path, 60, 1, "python", command="python\0train.py\0", environ=TORCHRUN)
    assert found(tmp_path)["workers"].verdict is HealthVerdict.PASS


def test_shared_memory_that_nobody_has_open_is_told(tmp_path: Path) -> None:
    shm = tmp_path / "dev/shm"
    shm.mkdir(parents=True)
    for name in ("torch_1_2", "mapped", "opened", "sem.lock"):
        (shm / name).write_bytes(b"x" * 4)
    folder = process(tmp_path, 50, 1, "python", command="python")
    (folder / "maps").write_text("7f00-7f01 rw-s 00000000 00:19 3    /dev/shm/mapped\n")
    (folder / "fd/3").symlink_to("/dev/shm/opened")
    said = found(tmp_path)["shm"]
    assert said.verdict is HealthVerdict.WARN
    assert said.values == {"num_files": 1, "size_bytes": 4}
    assert "torch_1_2" in said.reason


def test_shared_memory_that_this_process_has_open_is_in_use(tmp_path: Path) -> None:
    """Its list of open files names the descriptor by which the list is read, which is closed when it is looked at."""
    site = CheckContext(tmp_path, tmp_path, tmp_path)
    with NamedTemporaryFile(dir="/dev/shm") as file:
        assert Path(file.name).name not in leaked_resources.find_abandoned_shm(
            site, leaked_resources.list_processes(site)
        )


def test_a_process_that_stays_within_the_kernel_is_told(tmp_path: Path) -> None:
    process(tmp_path, 50, 1, "dd", "D", command="dd")
    said = found(tmp_path)["uninterruptible"]
    assert said.verdict is HealthVerdict.WARN
    assert "dd (50)" in said.reason


def test_a_moment_within_the_kernel_is_usual(tmp_path: Path) -> None:
    folder = process(tmp_path, 50, 1, "dd", "D", command="dd")
    (tmp_path / "dev/shm").mkdir(parents=True)

    def wakes(seconds: float) -> None:
        (folder / "stat").write_text("50 (dd) S 1 50 0 0\n")

    *_, said = leaked_resources.check_leaked_resources(CheckContext(tmp_path, tmp_path, tmp_path, tmp_path), wakes)
    assert said.verdict is HealthVerdict.PASS


def test_many_zombies_are_told(tmp_path: Path) -> None:
    for pid in range(100, 111):
        process(tmp_path, pid, 1, "python", "Z")
    assert found(tmp_path)["uninterruptible"].verdict is HealthVerdict.WARN
