"""What `phalanx serve` needs and refuses at its start."""

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli import serve as serve_command
from phalanx.errors import PhalanxError, UsageError
from phalanx.serve.app import ServeOptions, serve


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"backend": "slrum"}, "--on slrum: expected one of"),
        ({"host": "203.0.113.9"}, "203.0.113.9"),
        ({"token": "short"}, "expected 16 or more"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_served(
    tmp_path: Path, options: dict[str, object], problem: str
) -> None:
    def report(address: str) -> None:
        raise AssertionError("it serves")

    with pytest.raises(PhalanxError, match=problem):
        serve(ServeOptions([tmp_path], port=0, **options), [], report)  # type: ignore[arg-type]


def test_the_server_starts_without_what_only_later_pages_need() -> None:
    code = (
        "import sys, phalanx.serve.app; "
        "print([name for name in ('numpy', 'pydantic', 'ruamel', 'prometheus_client', 'torch') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "prometheus_client"])
def test_a_missing_package_is_named_before_anything_is_served(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr(serve_command, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(
        UsageError, match=f"{package.replace('_', '-')} is not installed; pip install 'phalanx\\[serve\\]'"
    ):
        serve_command.serve()
