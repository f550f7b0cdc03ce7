"""Jobs as values: what no engine could take is refused before anything is rendered."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.spec import Job, JobState, state_from_exit_code


def job(**more: Any) -> Job:
    return Job(**{"name": "a-job", "command": ("true",), "working_dir": Path("/work"), **more})


@pytest.mark.parametrize("name", ["", "-x", "a b", "a;rm", "$(x)", "a/b", "a\nb", "x" * 64, "ä"])
def test_a_name_with_shell_characters_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="job name"):
        job(name=name)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"command": ()}, "no command"),
        ({"command": ("a\0b",)}, "no command"),
        ({"working_dir": Path("here")}, "must be absolute"),
        ({"num_nodes": 0}, "num_nodes = 0"),
        ({"gpus_per_node": -1}, "gpus_per_node = -1"),
        ({"cpus_per_node": 0}, "cpus_per_node = 0"),
        ({"time_limit_s": 0.0}, "time limit"),
        ({"time_limit_s": float("nan")}, "time limit"),
        ({"warning_s": -1.0}, "warning"),
        ({"environment": {"A B": "1"}}, "'A B' is no name"),
        ({"secrets": ("x=y",)}, "'x=y' is no name"),
        ({"environment": {"K": "1"}, "secrets": ("K",)}, "K is given as a value and as a secret"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        job(**more)


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (0, JobState.DONE),
        (75, JobState.INTERRUPTED),
        (77, JobState.INTERRUPTED),
        (93, JobState.FAILED),
        (1, JobState.FAILED),
    ],
)
def test_exit_codes_as_states(code: int, state: JobState) -> None:
    assert state_from_exit_code(code) is state
    assert state.is_final
    assert ExitCode.UNFINISHED == 75
