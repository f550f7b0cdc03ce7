"""Jobs as values: what no engine could take is refused before anything is rendered."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.engine import ENGINES, open_engine
from phalanx.jobs.spec import Job, State, state_of


def job(**more: Any) -> Job:
    return Job(**{"name": "a-job", "command": ("true",), "folder": Path("/work"), **more})


@pytest.mark.parametrize("name", ["", "-x", "a b", "a;rm", "$(x)", "a/b", "a\nb", "x" * 64, "ä"])
def test_a_name_with_shell_characters_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="job name"):
        job(name=name)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"command": ()}, "no command"),
        ({"command": ("a\0b",)}, "no command"),
        ({"folder": Path("here")}, "must be absolute"),
        ({"nodes": 0}, "nodes = 0"),
        ({"devices": -1}, "devices = -1"),
        ({"cores": 0}, "cores = 0"),
        ({"limit": 0.0}, "time limit"),
        ({"limit": float("nan")}, "time limit"),
        ({"warning": -1.0}, "warning"),
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
    [(0, State.DONE), (75, State.UNFINISHED), (77, State.UNFINISHED), (93, State.FAILED), (1, State.FAILED)],
)
def test_exit_codes_as_states(code: int, state: State) -> None:
    assert state_of(code) is state
    assert state.over
    assert ExitCode.UNFINISHED == 75


def test_an_engine_that_does_not_exist_is_told_with_those_that_do() -> None:
    with pytest.raises(UsageError, match=f"expected one of {', '.join(ENGINES)}"):
        open_engine("slrum")
