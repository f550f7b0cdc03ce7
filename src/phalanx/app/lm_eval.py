"""Evaluate a model on the tasks of EleutherAI's lm-eval, in an environment of its own: it needs other versions of
packages, and fetches data sets.

An agent imports this module, so torch is imported only by what reads a checkpoint.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import DataError, UsageError
from phalanx.process_lifetime import die_with_parent
from phalanx.run import Run
from phalanx.safe_files import read_json

if TYPE_CHECKING:
    from phalanx.app.evaluate import CheckpointSelection, ReportWarning

LM_EVAL_VARIABLE = "PHALANX_LM_EVAL"
INSTALL_COMMANDS = "python -m venv ~/.lm-eval && ~/.lm-eval/bin/pip install 'lm-eval[hf]==0.4.13'"


@dataclass(frozen=True)
class TaskScore:
    """A metric of a task, and its standard error; None where lm-eval has none."""

    task: str
    metric: str
    value: float
    standard_error: float | None


def find_lm_eval(python: str | None) -> list[str]:
    """Return the command that runs lm-eval: by this Python, by that of PHALANX_LM_EVAL, or as it is on the PATH. Raises
    UsageError if there is none."""
    named = python or os.environ.get(LM_EVAL_VARIABLE)
    command = [named, "-m", "lm_eval"] if named else ["lm_eval"]
    if shutil.which(command[0]) is None:
        raise UsageError(
            f"{command[0]}: no such program; `--tasks` needs lm-eval in an environment of its own: {INSTALL_COMMANDS}, "
            f"then --lm-eval ~/.lm-eval/bin/python, or {LM_EVAL_VARIABLE} with it"
        )
    return command


@functools.cache
def check_task_names(command: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Raise UsageError for tasks that lm-eval does not know, or if it does not start. Uses no network. Versions before
    0.4.10 cannot check names: they end with 2."""
    words = [*command, "validate", "--tasks", ",".join(names)]
    completed = subprocess.run(words, capture_output=True, text=True, env=_make_environment(), check=False)
    if completed.returncode in (0, 2):
        return
    reason = (completed.stderr + completed.stdout).strip().rpartition("\n")[2]
    hint = f"install it by: {INSTALL_COMMANDS}"
    if "not found" in reason:
        hint = f"list those that it knows by: {' '.join(command)} ls tasks"
    raise UsageError(f"{' '.join(command)}: {reason}; {hint}")


def _make_environment() -> dict[str, str]:
    """Return the environment of lm-eval, without our own packages and the job's token: tasks may run code."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PHALANX_TOKEN")}


def evaluate_tasks(
    location: str,
    selection: "CheckpointSelection",
    tasks: str,
    command: Sequence[str],
    device: str | None,
    max_samples: int | None,
    warn: "ReportWarning",
) -> list[TaskScore]:
    """Return the scores of a run's checkpoint, or of a Hugging Face directory, on `tasks`, names with commas between.

    A checkpoint is exported to a temporary directory. A model with a chat template gets the tasks as messages. What
    lm-eval prints goes to standard error. The many arguments are those of the command.

    Raises:
        UsageError: the run has no such checkpoint, its model is none of transformers, or lm-eval fails.
    """
    from phalanx.data.chat_template import find_chat_template

    with tempfile.TemporaryDirectory(prefix="phalanx-lm-eval-") as temporary:
        directory = _find_directory(location, selection, Path(temporary) / "model", warn)
        output = Path(temporary) / "results"
        arguments = ["--model", "hf", "--model_args", json.dumps({"pretrained": str(directory.absolute())})]
        arguments += ["--tasks", tasks, "--output_path", str(output)]
        arguments += [] if device in (None, "auto") else ["--device", str(device)]
        arguments += [] if max_samples is None else ["--limit", str(max_samples)]
        arguments += [] if find_chat_template(directory) is None else ["--apply_chat_template"]
        code = subprocess.run(
            [*command, *arguments],
            stdout=sys.stderr,
            env=_make_environment(),
            preexec_fn=partial(die_with_parent, os.getpid()),
            check=False,
        ).returncode
        files = sorted(output.rglob("results_*.json"))
        if code or not files:
            raise UsageError(f"{' '.join(command)} ended with exit code {code} and no results; it says why above")
        return list(read_scores(read_json(files[-1])))


def read_scores(written: Mapping[str, Any]) -> Iterator[TaskScore]:
    """Yield the scores in the results that lm-eval writes. Raises DataError if there are none in them."""
    results = written.get("results")
    if not isinstance(results, dict):
        raise DataError(f"lm-eval's results: found the keys {', '.join(written) or 'none'}, expected `results`")
    for task, values in results.items():
        for key, value in values.items():
            metric, _, filter_name = key.partition(",")
            if isinstance(value, float | int) and filter_name and not metric.endswith("_stderr"):
                error = values.get(f"{metric}_stderr,{filter_name}")
                shown = metric if filter_name == "none" else f"{metric} ({filter_name})"
                yield TaskScore(task, shown, float(value), float(error) if isinstance(error, float | int) else None)


def _find_directory(location: str, selection: "CheckpointSelection", export: Path, warn: "ReportWarning") -> Path:
    """Return the Hugging Face directory at a location, or that to which a run's checkpoint is exported."""
    from phalanx.app.generate import find_huggingface_model
    from phalanx.train.checkpoint.export import export_huggingface
    from phalanx.train.checkpoint.format import read_manifest
    from phalanx.train.inference import choose_checkpoint

    if (directory := find_huggingface_model(location)) is not None:
        return directory
    run = Run.open_existing(location)
    checkpoint, notes = choose_checkpoint(run, selection.step, selection.best)
    if "huggingface" not in read_manifest(checkpoint).meta.get("model", {}):
        raise UsageError(f"{run.location}: lm-eval needs a model of transformers (model.build: hf:PATH)")
    for note in notes:
        warn(note)
    export_huggingface(checkpoint, export)
    return export
