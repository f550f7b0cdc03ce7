"""Power off through Slurm, by a stand-in for scontrol. The real Slurm: tests/cluster/test_slurm_power_off_nodes.py."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from phalanx.errors import UsageError
from phalanx.jobs.backends.nodes import PowerOffBackend
from phalanx.jobs.backends.slurm.backend import SlurmBackend
from phalanx.jobs.backends.slurm.node_changes import FINISH_TIMEOUT_S, finish_power_off
from settable_clock import SettableClock

CONFIG = """\
Configuration data as of 2026-11-28T14:02:01
ResumeProgram           = /etc/slurm/resume
SuspendProgram          = /etc/slurm/suspend
SuspendRate             = 60 nodes/min
SuspendTime             = 604800 sec
SuspendTimeout          = 30 sec

Slurmctld(primary) at controller is UP
"""


@dataclass
class FakeSlurm:
    """Nodes with states as `scontrol show node` prints them. `begins`: whether SuspendProgram is started at once, which
    undoes a drain."""

    config: str = CONFIG
    right_error: str = "slurm_update error: Invalid node name specified"
    begins: bool = True
    states: dict[str, str] = field(default_factory=lambda: {"n1": "MIXED", "n2": "IDLE", "n3": "IDLE"})
    updates: list[str] = field(default_factory=list)

    def __call__(self, argv: Sequence[str]) -> tuple[int, str, str]:
        if tuple(argv[:3]) == ("scontrol", "show", "config"):
            return 0, self.config, ""
        if argv[0] == "sinfo":
            return 0, "\n".join([*self.states, *self.states]), ""  # in two partitions
        if tuple(argv[:3]) == ("scontrol", "show", "node"):
            names = argv[-1].split(",")
            lines = [f"NodeName={name} Arch=x86_64  State={self.states[name]} ThreadsPerCore=1" for name in names]
            return 0, "\n".join(lines) + "\n", ""
        return self.update(*(each.partition("=")[2] for each in argv[2:4]))

    def update(self, nodes: str, state: str) -> tuple[int, str, str]:
        if nodes.startswith("phalanx-"):
            return 1, "", self.right_error
        self.updates.append(f"{nodes} {state}")
        if "lost" in nodes:
            return 1, "", "slurm_update error: Invalid node name specified"
        for node in nodes.split(","):
            pending = "DOWN+POWERING_DOWN" if self.begins else "DOWN+DRAIN+POWER_DOWN"
            self.states[node] = pending if state == "POWER_DOWN_FORCE" else f"{self.states[node]}+{state}"
        return 0, "", ""


def test_a_node_is_set_down_then_powered_off_and_drained_again(tmp_path: Path) -> None:
    fake = FakeSlurm()
    slurm: PowerOffBackend = SlurmBackend(fake, tmp_path)
    assert isinstance(slurm, PowerOffBackend)
    assert slurm.check_power_off(["n1", "n2"]) == []
    assert fake.updates == []
    assert slurm.power_off_nodes(["n1", "n2"], "leak") == {}
    assert slurm.finish_power_off(["n1", "n2"], "leak") == {}
    assert fake.updates == ["n1,n2 DOWN", "n1,n2 POWER_DOWN_FORCE", "n1,n2 DRAIN"]


def test_a_node_is_not_drained_before_the_power_off_has_begun() -> None:
    fake, clock = FakeSlurm(begins=False), SettableClock()
    SlurmBackend(fake).power_off_nodes(["n1", "n2"], "leak")

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now >= 2.0:
            fake.states["n2"] = "DOWN+POWERED_DOWN"

    late = f"Slurm has not begun to power it off within {FINISH_TIMEOUT_S:.0f} s"
    assert finish_power_off(fake, ["n1", "n2"], "leak", sleep, clock) == {"n1": late}
    assert fake.updates[2:] == ["n2 DRAIN"]


def test_a_node_that_slurm_does_not_have_keeps_no_other_one_on(tmp_path: Path) -> None:
    fake = FakeSlurm()
    slurm = SlurmBackend(fake, tmp_path)
    assert slurm.check_power_off(["n1", "lost"]) == ["lost: slurm has no such node"]
    assert slurm.power_off_nodes(["lost", "n1"], "leak") == {"lost": "slurm_update error: Invalid node name specified"}
    assert fake.states["n1"] == "DOWN+POWERING_DOWN"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("/etc/slurm/suspend", "(null)", "SuspendProgram of slurm.conf is not set, so Slurm powers no node off"),
        ("/etc/slurm/resume", "(null)", "ResumeProgram of slurm.conf is not set, so Slurm powers no node off"),
        ("604800 sec", "INFINITE", "SuspendTime of slurm.conf is not set, so Slurm powers no node off"),
        ("60 nodes/min", "2 nodes/min", "SuspendRate of slurm.conf lets 2 nodes a minute be powered off, of 3"),
    ],
)
def test_settings_that_keep_nodes_on_are_named(tmp_path: Path, old: str, new: str, problem: str) -> None:
    slurm = SlurmBackend(FakeSlurm(CONFIG.replace(old, new)), tmp_path)
    assert slurm.check_power_off(["n1", "n2", "n3"]) == [problem]


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        ("slurm_update error: Invalid user id", "Slurm refuses it to your user; it takes root, SlurmUser, or"),
        ("Invalid input: State=POWER_DOWN_FORCE\nRequest aborted", "Invalid input: State=POWER_DOWN_FORCE"),  # 20.11
    ],
)
def test_a_missing_right_or_an_old_slurm_is_named(tmp_path: Path, error: str, problem: str) -> None:
    (found,) = SlurmBackend(FakeSlurm(right_error=error), tmp_path).check_power_off(["n1"])
    assert found.startswith(problem)


def test_a_slurm_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    silent = SlurmBackend(lambda argv: (1, "", "scontrol: error: Unable to contact slurm controller"), tmp_path)
    with pytest.raises(UsageError, match="slurm: Unable to contact slurm controller"):
        silent.check_power_off(["n1"])
