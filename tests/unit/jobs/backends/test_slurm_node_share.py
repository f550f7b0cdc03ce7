"""Cores and memory of a job on Slurm that does not say what it needs."""

from pathlib import Path

import pytest

from phalanx.jobs.backends.slurm.programs import NodeSize, add_node_share, parse_node_sizes
from phalanx.jobs.spec import Job

H100 = "192 2063838 gpu:h100:8(S:0-1)\n"
SMALL = "4 15000 gpu:1\n"


def job(gpus: int = 0, **fields: object) -> Job:
    return Job("a", ("true",), Path("/"), gpus_per_node=gpus, **fields)  # type: ignore[arg-type]


def test_sizes_are_read_and_other_lines_left_out() -> None:
    text = H100 + SMALL + "64+ 1 (null)\nslurm 23.11.4\n96 500000 gpu:a100:4,gpu:mig:2,shard:8\n"
    sizes = [NodeSize(192, 2063838, 8), NodeSize(4, 15000, 1), NodeSize(64, 1, 0), NodeSize(96, 500000, 6)]
    assert parse_node_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "fields", "cpus", "mib"),
    [
        (H100, {"gpus": 8}, 192, 2063838),
        (H100, {"gpus": 2}, 48, 515959),
        (H100 + SMALL, {"gpus": 1}, 4, 15000),
        (H100 + SMALL, {"gpus": 4}, 96, 1031919),
        (H100, {}, 4, None),
        (H100, {"workers_per_node": 4}, 16, None),
        ("1 1 (null)\n", {"workers_per_node": 4}, 1, None),
        ("64 1 gpu:4\n", {"gpus": 4}, 64, None),
        (H100, {"backend_options": {"exclusive": "yes"}}, 192, None),
        ("", {"gpus": 8}, 32, None),
        (H100, {"gpus": 8, "cpus_per_node": 7, "memory_bytes": 2**30}, 7, 1024),
    ],
)
def test_a_job_has_the_share_of_a_node_that_its_gpus_are(
    text: str, fields: dict[str, object], cpus: int, mib: int | None
) -> None:
    shared = add_node_share(job(**fields), parse_node_sizes(text))  # type: ignore[arg-type]
    assert (shared.cpus_per_node, shared.memory_bytes) == (cpus, None if mib is None else mib * 2**20)
