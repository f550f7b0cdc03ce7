"""A worker that runs the user's own script, in which `phalanx.session` takes over."""

import os
import runpy
import sys
from pathlib import Path
from typing import Any


def run_script_worker(payload: dict[str, Any]) -> None:
    """Run the script as `python SCRIPT ARGUMENTS` would, as one worker of the run."""
    script = payload["script"]
    os.environ["PHALANX_RUN_DIR"] = payload["run"]
    if payload["force"]:
        os.environ["PHALANX_FORCE"] = "1"
    sys.argv = [script, *payload["arguments"]]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
