"""Change nodes through `scontrol update`: drain, undrain, and power off by Slurm's power saving (`SuspendProgram`).

State=POWER_DOWN_FORCE alone is not enough. Slurm starts SuspendProgram only when the processes of jobs have ended, up
to KillWait later; on a node that is down it does not wait for them. And it undoes a drain when it starts
SuspendProgram, so that the next job would power the node up again: it is drained after that.
"""

import re
import time
from collections.abc import Callable, Sequence

from phalanx.errors import UsageError
from phalanx.jobs.backends.nodes import BackendNode
from phalanx.jobs.backends.slurm.nodes import (
    SINFO_COMMAND,
    SQUEUE_COMMAND,
    explain_refusal,
    make_drain_command,
    make_undrain_command,
    parse_nodes,
)
from phalanx.jobs.backends.slurm.programs import RunProgram, clean_error

CONFIG_COMMAND = ("scontrol", "show", "config")
NAMES_COMMAND = ("sinfo", "--noheader", "--Node", "--all", "--format=%N")
RIGHT_COMMAND = ("scontrol", "update", "NodeName=phalanx-permission-check", "State=POWER_DOWN_FORCE")
"""Changes nothing: there is no such node. Slurm looks at the user's right before."""
NO_NODE_TEXT = "Invalid node name"
"""Its answer to a user that has the right."""
UNSET_TEXTS = ("", "(null)", "INFINITE", "-1")
OFF_FLAGS = frozenset({"POWERING_DOWN", "POWERED_DOWN"})
PENDING_OFF_FLAG = "POWER_DOWN"
POLL_INTERVAL_S = 0.5
FINISH_TIMEOUT_S = 90.0
"""SuspendRate lets a part of the nodes wait for up to a minute."""


class SlurmNodes:
    """The nodes of a Slurm: NodeBackend's and PowerOffBackend's part of its backend."""

    def __init__(self, run_program: RunProgram):
        self._run_program = run_program

    def list_nodes(self) -> list[BackendNode]:
        """Return the nodes of all partitions, with the jobs of all users on them."""
        return parse_nodes(_read(self._run_program, SINFO_COMMAND), _read(self._run_program, SQUEUE_COMMAND))

    def drain_node(self, node: str, reason: str, actor: str) -> None:
        """Drain a node. Slurm records its own user as the actor."""
        self._change_node(node, make_drain_command(node, reason))

    def undrain_node(self, node: str) -> None:
        """Resume a node."""
        self._change_node(node, make_undrain_command(node))

    def check_power_off(self, nodes: Sequence[str]) -> list[str]:
        """Return what keeps Slurm from powering off these nodes at once."""
        return list_power_off_problems(self._run_program, nodes)

    def power_off_nodes(self, nodes: Sequence[str], reason: str) -> dict[str, str]:
        """Have SuspendProgram power nodes off, within about a second, and Slurm requeue their jobs."""
        problem = _power_off(self._run_program, nodes, reason)
        if problem is None or len(nodes) == 1:
            return {} if problem is None else {nodes[0]: problem}
        # a node that Slurm refuses keeps it from the others
        problems = {node: _power_off(self._run_program, [node], reason) for node in nodes}
        return {node: each for node, each in problems.items() if each is not None}

    def finish_power_off(self, nodes: Sequence[str], reason: str) -> dict[str, str]:
        """Drain the nodes again, each when SuspendProgram has been started for it."""
        return finish_power_off(self._run_program, nodes, reason)

    def _change_node(self, node: str, command: Sequence[str]) -> None:
        if (refusal := _change(self._run_program, command)) is not None:
            raise UsageError(f"{node}: {refusal}")


def list_power_off_problems(run_program: RunProgram, nodes: Sequence[str]) -> list[str]:
    """Return what keeps Slurm from powering off these nodes at once. Raises UsageError if it cannot be asked. Changes
    nothing."""
    settings = dict(re.findall(r"^(\w+) *= *(.*?) *$", _read(run_program, CONFIG_COMMAND), re.MULTILINE))
    problems = [
        f"{name} of slurm.conf is not set, so Slurm powers no node off"
        for name in ("SuspendProgram", "ResumeProgram", "SuspendTime")
        if settings.get(name, "").split(" ")[0] in UNSET_TEXTS
    ]
    rate = int(settings.get("SuspendRate", "0").split(" ")[0])
    if 0 < rate < len(nodes):
        problems.append(f"SuspendRate of slurm.conf lets {rate} nodes a minute be powered off, of {len(nodes)}")
    refusal = _change(run_program, RIGHT_COMMAND)
    if refusal is None or NO_NODE_TEXT not in refusal:
        problems.append(refusal or "Slurm takes changes of a node that it does not have")
    known = set(_read(run_program, NAMES_COMMAND).split())
    return [*problems, *(f"{node}: slurm has no such node" for node in nodes if node not in known)]


def finish_power_off(
    run_program: RunProgram,
    nodes: Sequence[str],
    reason: str,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, str]:
    """Drain nodes again, each when SuspendProgram has been started for it; return why not, by node."""
    problems: dict[str, str] = {}
    waiting, deadline = list(nodes), clock() + FINISH_TIMEOUT_S
    while True:
        _, text, _ = run_program(("scontrol", "show", "node", "--oneliner", ",".join(waiting)))
        off = [node for node in waiting if node in _parse_off(text)]
        if off and (refusal := _change(run_program, make_drain_command(",".join(off), reason))):
            problems |= dict.fromkeys(off, f"it is off, but jobs may power it up: {refusal}")
        waiting = [node for node in waiting if node not in off]
        if not waiting or clock() >= deadline:
            late = f"Slurm has not begun to power it off within {FINISH_TIMEOUT_S:.0f} s"
            return problems | dict.fromkeys(waiting, late)
        sleep(POLL_INTERVAL_S)


def _power_off(run_program: RunProgram, nodes: Sequence[str], reason: str) -> str | None:
    update = ("scontrol", "update", f"NodeName={','.join(nodes)}")
    for state in ("DOWN", "POWER_DOWN_FORCE"):
        if (refusal := _change(run_program, (*update, f"State={state}", f"Reason={reason}"))) is not None:
            return refusal
    return None


def _parse_off(text: str) -> set[str]:
    """The nodes of `scontrol show node --oneliner` for which SuspendProgram has been started, also if again."""
    found = re.findall(r"^NodeName=(\S+) .*? State=(\S+)", text, re.MULTILINE)
    states = {name: set(state.split("+")) for name, state in found}
    return {name for name, flags in states.items() if flags & OFF_FLAGS and PENDING_OFF_FLAG not in flags}


def _change(run_program: RunProgram, command: Sequence[str]) -> str | None:
    """Why Slurm refused it; None if it did it."""
    code, _, err = run_program(command)
    return (explain_refusal(err) or clean_error(err)) if code else None


def _read(run_program: RunProgram, command: Sequence[str]) -> str:
    code, out, err = run_program(command)
    if code:
        raise UsageError(f"slurm: {clean_error(err)}")
    return out
