"""Runs of training loops of the user's own: the script of the tests and both examples, shortened to a few steps."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import session_script
from phalanx.app.supervise import supervise_script
from phalanx.app.train_arguments import TrainArguments
from phalanx.recipe.yaml_loader import parse_yaml, to_yaml
from phalanx.run import Event, Run
from phalanx.train.ops.random_draws import derive_seed, seed_everything
from phalanx.train.session import MapDatasetSource, fingerprint_dataset
from train_harness import HarnessRun, TrainHarness, Values, plan_fault, write_faults

ROOT = Path(__file__).parents[2]
EXAMPLES = ("language", "vision")
STEPS = 12
RECIPE: Values = {
    "name": "own",
    "batch": {"global_size": 12},
    "steps": STEPS,
    "optimizer": {"max_grad_norm": None, "schedule": {"warmup_steps": 0, "decay": "constant"}},
    "checkpoint": {"every": 4},
    "fault_tolerance": {"max_restarts": 5},
    "precision": "fp32",
    "callbacks": ["faults:Faults"],
    "num_threads": 1,
}
SLOW = plan_fault(1, "slow", delay=0.03, attempt=None)
"""Steps so slow that a checkpoint is written, and the agent hears of each, before the next but one is done."""
REFERENCES: dict[object, HarnessRun] = {}


def write_session_scripts(lab: TrainHarness) -> Path:
    """Write a directory with the loop of the tests, and both examples shortened to a few steps on a few threads."""
    shutil.copy(session_script.__file__, lab.folder)
    (lab.folder / "session_script.yaml").write_text(to_yaml(RECIPE, flow=False))
    for name in EXAMPLES:
        shutil.copy(ROOT / "examples" / "own-loop" / f"{name}.py", lab.folder)
        recipe = parse_yaml((ROOT / "examples" / "own-loop" / f"{name}.yaml").read_text(), "recipe.yaml")[0]
        recipe |= {"steps": STEPS, "num_threads": 1, "callbacks": ["faults:Faults"], "checkpoint": {"every": 4}}
        recipe["optimizer"]["schedule"] = {"warmup_steps": 0, "decay": "constant"}
        (lab.folder / f"{name}.yaml").write_text(to_yaml(recipe, flow=False))
    return lab.folder


def run_session(
    lab: TrainHarness,
    arguments: Sequence[str] = (),
    nproc: int = 1,
    run: Run | None = None,
    *,
    script: str = "session_script",
    faults: Sequence[Values] = (),
    show: Callable[[Event], None] = lambda event: None,
    force: bool = False,
) -> HarnessRun:
    """Run a script under our agent, as `phalanx train SCRIPT` does."""
    run = run or lab.new_run()
    write_faults(run, faults)
    with lab.environment():
        path = lab.folder / f"{script}.py"
        given = TrainArguments(path, arguments, run.path, nproc, force)
        outcome = supervise_script(given, run, nproc, lab.fork_server, show)
    return HarnessRun(run, int(outcome.code), outcome.message)


def run_session_once(lab: TrainHarness, *arguments: str, nproc: int = 1, script: str = "session_script") -> HarnessRun:
    """The same without any fault, run once."""
    key = (arguments, nproc, script)
    if key not in REFERENCES:
        REFERENCES[key] = run_session(lab, arguments, nproc, script=script)
    return REFERENCES[key]


def read_logs(ended: HarnessRun) -> str:
    """What the workers printed."""
    return "".join(path.read_text() for path in sorted(ended.run.logs.iterdir()))


def train_plain_loop(steps: int = STEPS) -> list[float]:
    """The same loop in plain PyTorch: one process, whole batches, in the run's order and from its initial weights."""
    seed_everything(derive_seed(0, "init"), torch.device("cpu"))
    model, samples = session_script.Model(), session_script.Samples()
    optimizer, data = session_script.adamw(model), MapDatasetSource(samples, fingerprint_dataset(samples), 0)
    losses = []
    for step in range(steps):
        batch = data.read_training(12 * step, 12)[""][:].value
        loss = session_script.loss_sum(model, batch) / 12
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
