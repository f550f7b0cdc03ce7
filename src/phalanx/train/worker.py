"""A worker: one process of a run, from its environment to an exit code.

The agent forks it with `work({"run": DIR, "folder": DIR})`; where torchrun or srun started `phalanx train`, that calls
`take_part`. Everything a worker trains with stands in the run's `resolved.yaml`.
"""

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.data import Data, Facts, open_data
from phalanx.errors import DataError, ExitCode, PhalanxError
from phalanx.recipe import Recipe, load_recipe
from phalanx.run import Event, Run
from phalanx.run.directory import RESULT_FORMAT
from phalanx.train.callbacks import Callbacks, RunView, load_callbacks
from phalanx.train.checkpoint import clean, digest, list_checkpoints, load_tensors
from phalanx.train.exchange import GradientExchange
from phalanx.train.loop import Loop, Parts, StopRequest, reject, restore
from phalanx.train.memory import explain_memory
from phalanx.train.model import build_model, described, has_batch_norm
from phalanx.train.optimizers import Optimizer, trainable
from phalanx.train.place import Place, from_environment, join, leave
from phalanx.train.precision import LossScale
from phalanx.train.reporter import Reporter, reporter
from phalanx.train.state import Progress, load_model, state_tensors
from phalanx.train.step import Stepper
from phalanx.train.tasks import Task, load_task


def work(payload: dict[str, Any]) -> None:
    """Train as one worker of the run and leave the process with its exit code."""
    raise SystemExit(int(take_part(payload, from_environment())))


def take_part(payload: dict[str, Any], place: Place, show: Callable[[Event], None] | None = None) -> ExitCode:
    """Train as one worker of the run. Without an agent the leading worker gives `show` every event that it writes."""
    run, folder = Run(Path(payload["run"])), Path(payload["folder"])
    stop = StopRequest()
    stop.install()
    report = reporter(run, place.leads, os.environ.get("PHALANX_EVENTS"), show)
    report.event("worker", pid=os.getpid(), rank=place.rank, node=os.uname().nodename, attempt=place.attempt)
    try:
        code = _train(run, folder, place, stop, report, force=bool(payload.get("force")))
    except PhalanxError as error:
        report.error(str(error), int(error.code))
        code = error.code
    finally:
        report.close()
    leave()
    return code


def _train(run: Run, folder: Path, place: Place, stop: StopRequest, report: Reporter, force: bool) -> ExitCode:
    recipe = load_recipe(run.resolved).recipe
    prepare_torch(recipe, place)
    join(place)
    if place.leads:
        clean(run.checkpoints)
    data = open_data(recipe.data, recipe.evaluate, recipe.seed)
    parts = assemble(run, recipe, folder, place, data, report, stop)
    progress = _resume(parts, force)
    micro = recipe.batch.micro
    assert isinstance(micro, int)
    if place.leads:
        _tell_start(parts, progress)
    meta = {"fingerprint": data.fingerprint, "recipe": recipe.model_dump(mode="json", by_alias=True)}
    meta["model"] = described(recipe.model, data.facts, folder)
    with explain_memory(micro, run.read_json(run.plan)):
        status = Loop(parts, progress, meta).run()
    if place.leads:
        tensors = state_tensors(parts.model, parts.optimizer, parts.scale)
        result: dict[str, Any] = {"format": RESULT_FORMAT, "status": status, "steps": progress.step}
        result |= {"final_loss": progress.last_loss, "tokens": progress.units, "restarts": place.attempt}
        report.result({**result, "digest": digest(tensors.items(), progress.samples)})
    return ExitCode.DONE if status == "done" else ExitCode.UNFINISHED


def prepare_torch(recipe: Recipe, place: Place) -> None:
    """Settings of this process on which speed and bits depend."""
    assert isinstance(recipe.threads, int)
    torch.set_num_threads(recipe.threads)
    if place.device.type == "cuda" and recipe.exchange.exact != "no":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def units_per_sample(facts: Facts) -> int:
    """Tokens in a sample, or 1 where samples are counted."""
    return facts.sequence if facts.kind == "tokens" and facts.sequence else 1


def assemble(
    run: Run, recipe: Recipe, folder: Path, place: Place, data: Data, report: Reporter, stop: StopRequest
) -> Parts:
    """Build everything that a loop works with, from the recipe."""
    task = load_task(recipe.task, folder)
    model = build_model(recipe.model, data.facts, folder, recipe.seed, place.device)
    if recipe.compile is True:
        model.compile()
    if recipe.init is not None and not list_checkpoints(run.checkpoints):
        _initialise(model, folder / recipe.init)
    model.train()
    optimizer = Optimizer(model, recipe.optim)
    units = units_per_sample(data.facts)
    scale = LossScale.for_precision(recipe.precision, recipe.batch.global_ * units)
    stepper = make_stepper(recipe, place, model, task, optimizer, scale)
    callbacks = Callbacks(load_callbacks(recipe.callbacks, folder), RunView(run.path, place.rank, place.world, model))
    return Parts(run, recipe, place, data, model, task, optimizer, scale, stepper, callbacks, report, stop, units)


def make_stepper(
    recipe: Recipe, place: Place, model: nn.Module, task: Task, optimizer: Optimizer, scale: LossScale
) -> Stepper:
    """The stepper, with an exchange of gradients where there is something to exchange."""
    micro = recipe.batch.micro
    assert isinstance(micro, int)
    micro_batches = recipe.batch.global_ // micro
    replicas = recipe.exchange.exact == "replicas"
    exchange = None
    if place.world > 1 or (replicas and micro_batches > 1):
        exchange = GradientExchange(
            list(trainable(model).values()),
            rank=place.rank,
            world=place.world,
            micro_batches=micro_batches,
            replicas=replicas,
            capacity=recipe.exchange.bucket * 2**20,
        )
    return Stepper(
        model,
        task,
        optimizer,
        scale,
        place=place,
        micro_batches=micro_batches,
        precision=recipe.precision,
        clip=recipe.optim.clip,
        seed=recipe.seed,
        exchange=exchange,
    )


def _initialise(model: nn.Module, where: Path) -> None:
    """Weights of another run's newest checkpoint, or of one checkpoint."""
    candidates = list_checkpoints(where / "checkpoints") or list_checkpoints(where) or [where]
    with torch.no_grad():
        load_model(model, load_tensors(candidates[0]), str(candidates[0]))


def _resume(parts: Parts, force: bool) -> Progress:
    """Go on from the newest good checkpoint of the run, if it has one."""
    had = bool(list_checkpoints(parts.run.checkpoints))
    loaded = restore(parts, lambda path, file, reason: reject(parts, path, file, reason))
    if loaded is None:
        if had:
            raise DataError(
                f"{parts.run.checkpoints}: no checkpoint here is good; `phalanx checkpoint verify` tells why"
            )
        return Progress()
    meta = loaded.manifest.meta
    if meta.get("fingerprint") != parts.data.fingerprint:
        fingerprints = f"(fingerprint {meta.get('fingerprint')}, now {parts.data.fingerprint})"
        if not force:
            raise DataError(
                f"{loaded.path}: was trained on other data {fingerprints}; "
                "restore the files that the recipe's data.source matched"
            )
        if parts.place.leads:
            parts.reporter.event("warning", text=f"forced: the run goes on with other data {fingerprints}")
    return Progress(**{field.name: meta[field.name] for field in fields(Progress)})


def _tell_start(parts: Parts, progress: Progress) -> None:
    recipe, place = parts.recipe, parts.place
    facts: dict[str, Any] = {
        "world": place.world,
        "attempt": place.attempt,
        "from_step": progress.step,
        "steps": recipe.steps,
    }
    facts |= {"device": str(place.device), "micro_batches": parts.stepper.micro_batches}
    parts.reporter.event("start", **facts)
    if has_batch_norm(parts.model):
        text = (
            "the model has BatchNorm: results depend on the micro-batch and differ between workers; GroupNorm does not"
        )
        parts.reporter.event("warning", text=text)
    if parts.data.train_samples < recipe.batch.global_:
        text = f"the data have only {parts.data.train_samples} training samples, less than batch.global"
        parts.reporter.event("warning", text=text)
