"""`evaluation.tasks` while a run trains, with a stand-in for lm-eval that a test holds up."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.errors import ExitCode
from phalanx.run import Event
from phalanx.run.cache import cache_root
from phalanx.run.event_types import RunEnded, RunWarning, StepDone, TasksEvaluated
from phalanx.train.checkpoint.format import list_checkpoints
from train_harness import TrainHarness, Values, plan_fault, send_signal_at_step, wait_until

tiny: Any = pytest.importorskip("tiny_huggingface")
transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("without_args_of_ours")

LM_EVAL = f"""#!{sys.executable}
import json, os, pathlib, sys, time
here = pathlib.Path(__file__).parent
if "validate" in sys.argv:
    sys.exit()
given = dict(zip(sys.argv[3::2], sys.argv[4::2]))
directory = pathlib.Path(json.loads(given["--model_args"])["pretrained"])
assert list(directory.glob("*.safetensors"))
(here / "started").write_text(json.dumps([os.nice(0), given["--limit"], given["--device"]]))
while not (here / "release").exists():
    time.sleep(0.05)
out = pathlib.Path(given["--output_path"])
out.mkdir(parents=True)
results = {{"results": {{"gsm8k": {{"acc,none": 0.25, "acc_stderr,none": 0.01}}}}}}
(out / "results_1.json").write_text(json.dumps(results))
"""


@pytest.fixture
def lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a stand-in that waits for the file `release`."""
    python = tmp_path / "python"
    python.write_text(LM_EVAL)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PHALANX_LM_EVAL", str(python))
    return tmp_path


def make_changes(lab: TrainHarness) -> Values:
    folder = lab.folder / "hf-of-tasks"
    if not folder.is_dir():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(tiny.make_config("llama", vocab_size=256))
        model.save_pretrained(folder)
        (folder / "tokenizer_config.json").write_text("{}")
    return {
        "model": {"build": f"hf:{folder.name}"},
        "checkpoint": {"every": 4, "keep": 1},
        "evaluation": {"every": None},
    }


def with_tasks(changes: Values) -> Values:
    return {**changes, "evaluation": {"every": None, "tasks": ["gsm8k"]}}


def list_left_files() -> set[str]:
    return {path.name for path in cache_root().glob("tasks/*")}


def test_no_step_waits_for_tasks_and_their_scores_are_reported(
    lab: TrainHarness, lm_eval: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stand-in holds up the evaluation of step 4 until training has ended."""
    files, changes, kept = list_left_files(), make_changes(lab), []

    def show(event: Event) -> None:
        if isinstance(event, RunEnded):
            kept.extend(path.name for path in list_checkpoints(ended_run.checkpoints))
            (lm_eval / "release").touch()

    until_started = plan_fault(5, "slow", delay=3.0, until=str(lm_eval / "started"))
    ended_run = lab.new_run()
    ended = lab.train(with_tasks(changes), 2, ended_run, faults=[until_started], show=show)
    assert ended.digest == lab.train(changes, 2).digest
    order = [event for event in ended.events if isinstance(event, StepDone | TasksEvaluated | RunEnded)]
    assert [type(event) for event in order[-3:]] == [RunEnded, TasksEvaluated, TasksEvaluated]
    scores = ended.events_of_kind(TasksEvaluated)
    assert [event.step for event in scores] == [4, 12]
    assert scores[0].metrics == {"gsm8k/acc": 0.25}
    assert json.loads((lm_eval / "started").read_text()) == [19, "6", "cpu"]
    assert "step-000000004" in kept
    assert [path.name for path in list_checkpoints(ended_run.checkpoints)] == ["step-000000012"]
    assert not ended.run.evaluating.exists()
    assert list_left_files() == files
    report = lab.call_command(capsys, "report", ended.run.path).stdout
    assert "tasks, step 12" in report
    assert "gsm8k/acc 0.2500 ± 0.010" in report
    lab.call_command(capsys, "report", ended.run.path, "--html", lm_eval / "report.html")
    assert "Tasks: acc" in (lm_eval / "report.html").read_text()
    as_json = json.loads(lab.call_command(capsys, "report", ended.run.path, "--json").stdout)
    assert [event["step"] for event in as_json["loss"]["tasks"]] == [4, 12]


def test_a_stop_request_ends_an_evaluation_and_names_it(lab: TrainHarness, lm_eval: Path) -> None:
    files = list_left_files()
    stop = send_signal_at_step(6)

    def show(event: Event) -> None:
        if isinstance(event, StepDone) and (lm_eval / "started").exists():
            stop(event)

    ended = lab.train(
        {**with_tasks(make_changes(lab)), "steps": 1000},
        faults=[plan_fault(5, "slow", delay=0.5)],
        show=show,
    )
    assert ended.code == ExitCode.UNFINISHED
    texts = [event.text for event in ended.events_of_kind(RunWarning)]
    assert any("were not evaluated: the run has ended; run: phalanx evaluate" in text for text in texts)
    wait_until(lambda: not lab.processes(), what="no process to be left")
    assert list_left_files() == files
