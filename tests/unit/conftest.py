"""What several rooms' tests begin with."""

from pathlib import Path

import pytest

from phalanx.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.create()
    return run
