"""What `phalanx serve` needs at its start."""

import subprocess
import sys

import pytest

from phalanx.cli import serve as serve_command
from phalanx.errors import UsageError


def test_the_server_starts_without_what_only_later_pages_need() -> None:
    code = (
        "import sys, phalanx.serve.server; "
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
