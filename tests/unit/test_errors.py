"""Exit codes: one table for everybody, and errors that carry them."""

import subprocess
import sys

import pytest

from phalanx import errors
from phalanx.errors import ExitCode, PhalanxError

TABLE = {"DONE": 0, "USAGE": 64, "DATA": 65, "UNFINISHED": 75, "UNFIT_NODE": 77, "RECIPE": 78, "GAVE_UP": 93}


def test_the_table_of_exit_codes_never_changes() -> None:
    assert {code.name: int(code) for code in ExitCode} == TABLE


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("UsageError", ExitCode.USAGE),
        ("DataError", ExitCode.DATA),
        ("RecipeError", ExitCode.RECIPE),
        ("UnfitNodeError", ExitCode.UNFIT_NODE),
        ("GaveUpError", ExitCode.GAVE_UP),
    ],
)
def test_an_error_carries_its_code_and_its_text(name: str, code: ExitCode) -> None:
    error = getattr(errors, name)("what, where, what would be right")
    assert isinstance(error, PhalanxError)
    assert error.code is code
    assert str(error) == "what, where, what would be right"


def test_the_table_is_at_hand_without_torch() -> None:
    program = "import sys, phalanx.errors; sys.exit(int('torch' in sys.modules or 'numpy' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
