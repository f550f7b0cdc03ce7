"""The entry point of the command line."""

import subprocess
import sys
from pathlib import Path


def test_an_interrupt_while_the_command_is_imported_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    text = "import sys; sys.path.insert(0, '.')\nfrom phalanx.__main__ import main\nprint(main())"
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("75\n", "error: interrupted\n")
