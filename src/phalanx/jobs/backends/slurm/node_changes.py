"""Drain and undrain nodes through `scontrol update`."""

from collections.abc import Sequence

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


class SlurmNodes:
    """The nodes of a Slurm: NodeBackend's part of its backend."""

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

    def _change_node(self, node: str, command: Sequence[str]) -> None:
        if (refusal := _change(self._run_program, command)) is not None:
            raise UsageError(f"{node}: {refusal}")


def _change(run_program: RunProgram, command: Sequence[str]) -> str | None:
    """Why Slurm refused it; None if it did it."""
    code, _, err = run_program(command)
    return (explain_refusal(err) or clean_error(err)) if code else None


def _read(run_program: RunProgram, command: Sequence[str]) -> str:
    code, out, err = run_program(command)
    if code:
        raise UsageError(f"slurm: {clean_error(err)}")
    return out
