"""Nodes as `sinfo` prints them, and the jobs on them as `squeue` does. Pure: text in, `BackendNode` out."""

import re
from collections.abc import Mapping, Sequence

from phalanx.jobs.backends.nodes import BackendNode, NodeService
from phalanx.jobs.backends.slurm.status import expand_hostlist

NODE_COLUMNS = {
    "name": ("nodelist", 256),
    "host": ("nodehost", 256),
    "state": ("statelong", 64),
    "gres": ("gres", 512),
    "user": ("user", 64),
    "reason": ("reason", 1024),
}
"""Columns of `sinfo --Format`: name and width, at which sinfo truncates. The reason comes last: it may hold any
character, and sinfo counts bytes."""
NODE_FORMAT = ",".join(f"{name}:{width}" for name, width in NODE_COLUMNS.values())
SINFO_COMMAND = ("sinfo", "--noheader", "--Node", "--all", f"--Format={NODE_FORMAT}")
SQUEUE_COMMAND = ("squeue", "--noheader", "--all", "--array", "--states=running,completing", "--format=%i %N")
DRAINED_STATES = ("drain", "fail")
"""Beginnings of states in which an administrator keeps new jobs away; `drained*` is one that does not answer, too."""
OPEN_STATES = ("idle", "mixed", "alloc", "comp", "plan", "resv", "reserved", "maint")
PERMISSION_TEXTS = ("Invalid user id", "Access/permission denied")
"""Answers of `scontrol update` to a user that may not change nodes."""
UNKNOWN_TEXTS = ("", "none", "Unknown", "(null)")


def parse_nodes(nodes_text: str, jobs_text: str) -> list[BackendNode]:
    """Return the nodes of both outputs. A node of several partitions is printed once for each of them."""
    jobs = _parse_jobs(jobs_text)
    found: dict[str, BackendNode] = {}
    for line in nodes_text.splitlines():
        row = _split_columns(line)
        if row["name"] and row["name"] not in found:
            found[row["name"]] = BackendNode(
                name=row["name"],
                state=row["state"],
                service=_parse_service(row["state"]),
                jobs=tuple(jobs.get(row["name"], ())),
                reason=_format_reason(row),
                num_gpus=count_gpus(row["gres"]),
                host_names=(row["host"],) if row["host"] not in ("", row["name"]) else (),
            )
    return list(found.values())


def count_gpus(gres: str) -> int:
    """Return the GPUs of a node's generic resources: `gpu:h100:8(S:0-1),nic:4` has 8."""
    kinds = (part.split(":") for part in re.sub(r"\([^)]*\)", "", gres).split(","))
    return sum(int(kind[-1]) if kind[-1].isdecimal() else 1 for kind in kinds if kind[0] == "gpu")


def _split_columns(line: str) -> dict[str, str]:
    row, start = {}, 0
    for name, (_, width) in NODE_COLUMNS.items():
        row[name] = line[start : start + width].strip()
        start += width
    return row


def _parse_service(state: str) -> NodeService:
    if state.startswith(DRAINED_STATES):
        return NodeService.DRAINED
    is_answering = not state.endswith("*")
    return NodeService.OPEN if is_answering and state.startswith(OPEN_STATES) else NodeService.DOWN


def _format_reason(row: Mapping[str, str]) -> str | None:
    if row["reason"] in UNKNOWN_TEXTS:
        return None
    user = re.sub(r"\(.*", "", row["user"])  # "ada(1000)"
    return row["reason"] if user in UNKNOWN_TEXTS else f"{row['reason']} ({user})"


def _parse_jobs(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        id, _, nodes = line.strip().partition(" ")
        for node in expand_hostlist(nodes):
            found.setdefault(node, []).append(id)
    return found


def make_drain_command(node: str, reason: str) -> Sequence[str]:
    """Return the command that drains a node. Slurm records the user of its own."""
    return ("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")


def make_undrain_command(node: str) -> Sequence[str]:
    """Return the command that undrains a node."""
    return ("scontrol", "update", f"NodeName={node}", "State=RESUME")


def explain_refusal(error: str) -> str | None:
    """Return what is needed, if Slurm refused a change of a node for want of it: Slurm's level of an operator is not
    enough."""
    if not any(text in error for text in PERMISSION_TEXTS):
        return None
    return (
        "Slurm refuses it to your user; it takes root, SlurmUser, or a user with `sacctmgr modify user NAME set "
        "adminlevel=admin`"
    )
