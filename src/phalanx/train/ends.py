"""How a worker's part in a run begins and ends, whichever loop trains between: the stepper, going on from a checkpoint,
the start that is told, the result."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from phalanx.errors import DataError, RecipeError
from phalanx.recipe import Recipe
from phalanx.recipe.changes import differences, is_mathematics
from phalanx.recipe.exchanges import bucket_bytes, candidates, first_steps, is_chosen_while_training
from phalanx.run import read_events
from phalanx.run.directory import RESULT_FORMAT
from phalanx.run.event_types import AttemptStarted, InMemoryRestored, RunWarning
from phalanx.train.cast_once import CastLinear
from phalanx.train.checkpoint import Loaded, checkpoint_name, digest, digest_checkpoint, list_checkpoints
from phalanx.train.exchange import GradientExchange
from phalanx.train.exchange.ways import WAYS
from phalanx.train.gradients import DividedGradients, Gradients, LocalGradients, ShardedReplicas
from phalanx.train.local_step import make_local_stepper
from phalanx.train.model import Seeds, has_batch_norm
from phalanx.train.nodes import exchanged, nodes_of
from phalanx.train.optimizers import NormOf, Optimizer, norms, squared_norms
from phalanx.train.parallel.collectives import summed
from phalanx.train.parallel.divided import Divided
from phalanx.train.parallel.mesh import Mesh
from phalanx.train.parallel.shard import as_reduced
from phalanx.train.parts import Parts, reject
from phalanx.train.place import Place
from phalanx.train.precision import LossScale
from phalanx.train.recall import find_copies, go_on_from, recall
from phalanx.train.residuals import Residuals
from phalanx.train.restoring import restore
from phalanx.train.state import Progress, state_tensors
from phalanx.train.step import Stepper, slots_for

SAME_FILES = "restore the files that the recipe's data.source matched"


def make_stepper(
    recipe: Recipe, place: Place, divided: Divided, optimizer: Optimizer, scale: LossScale, seeds: Seeds
) -> Stepper:
    """The stepper, with gradients summed in the way that the layout asks for."""
    if recipe.local_sgd is not None:
        return make_local_stepper(recipe, place, divided, optimizer, scale, seeds)
    micro, mesh = recipe.batch.micro_size, divided.mesh
    assert isinstance(micro, int)
    micro_batches = recipe.batch.global_size // micro
    replicas, strategy = recipe.determinism == "elastic", candidates(recipe, place.device.type)[0]
    holds_back = WAYS[strategy].holds_back and not replicas
    chosen = is_chosen_while_training(recipe)  # may hold back at times
    parameters = list(divided.trainable().values())
    if mesh.rounds:
        parameters = as_reduced(divided.modules, parameters)
    layers = [part for module in divided.modules for part in module.modules() if isinstance(part, CastLinear)]
    gradients: Gradients = LocalGradients(parameters, layers)
    # A pipeline runs many backwards at once, so its gradients are summed after the last.
    several = mesh.replicate is not None or (replicas and micro_batches > 1) or holds_back
    if mesh.pipeline is None and (mesh.rounds or (mesh.fsdp is None and several)):
        gradients = GradientExchange(
            parameters,
            rank=mesh.at["replicate"],
            world=mesh.layout.replicate,
            micro_batches=micro_batches // mesh.turns,
            replicas=replicas,
            capacity=bucket_bytes(recipe.grad_sync),
            group=mesh.replicate,
            slots=slots_for(micro_batches) if mesh.only_replicates else 0,
            strategy=strategy,
            nodes=_nodes(mesh, place) if strategy == "hierarchical" else None,
            low_rank=recipe.grad_sync.powersgd_rank,
            start=first_steps(recipe),
        )
        divided.residuals = Residuals.of(divided, gradients.residuals(), gradients.bases()) if holds_back else None
    between = isinstance(gradients, GradientExchange) or mesh.only_replicates
    if chosen and between and isinstance(gradients, GradientExchange | LocalGradients):
        divided.residuals = Residuals.held_by(divided, gradients)
    if mesh.rounds:
        assert mesh.fsdp is not None
        gradients = ShardedReplicas(gradients, mesh.fsdp.get_group())
    elif not mesh.only_replicates:
        own, inner = mesh.own(micro_batches), gradients if isinstance(gradients, GradientExchange) else None
        gradients = DividedGradients(divided, inner, last=own[-1] if mesh.pipeline is None and len(own) > 1 else None)
    # One micro-batch adds up nothing, and where the number of workers must not matter all sum alike.
    adds = isinstance(gradients, LocalGradients) and micro_batches > 1 and not replicas
    for layer in layers:
        layer.add_up(adds)
    return Stepper(
        optimizer,
        scale,
        gradients,
        place=place,
        mesh=mesh,
        micro_batches=micro_batches,
        clip=recipe.optimizer.max_grad_norm,
        seeds=seeds,
        modules=divided.modules,
        own_gradients=recipe.compile == "cuda-graphs",
        elastic=replicas,
    )


def _nodes(mesh: Mesh, place: Place) -> list[int] | None:
    """The node of each replica with which this worker adds up gradients."""
    if mesh.replicate is None:
        return None
    nodes = nodes_of(place)
    return [nodes.of[rank] for rank in dist.get_process_group_ranks(mesh.replicate)]


def norms_of(divided: Divided) -> NormOf:
    """Norms of whole parameters, also of those that tensor or expert parallel cuts: one more sum over their group."""
    groups = {"tensor": divided.mesh.tensor, "expert": divided.mesh.expert}
    names = {parameter: name for name, parameter in divided.parameters().items()}

    def norm_of(parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        squares = squared_norms(parameters, tensors)
        for axis, group in groups.items():
            cut = [any(c.axis == axis for c in divided.cuts.get(names[p], ())) for p in parameters]  # type: ignore[index]
            if group is not None and any(cut):
                chosen = torch.tensor(cut, device=squares.device)
                squares = torch.where(chosen, summed(squares.where(chosen, 0.0), group), squares)
        return list(squares.sqrt_().unbind())

    return norm_of if divided.cuts else norms


def resume(parts: Parts, fingerprint: str, force: bool, cure: str = SAME_FILES, empty: bool = False) -> Progress:
    """Go on from the newest hot copy of the run, or from its newest good checkpoint, if it has one, as it must if the
    model is `empty`. DataError, with the `cure`, when it was trained on data of another fingerprint."""
    # If one has some, and another does not see them, they are not all at the beginning.
    had = any(exchanged(parts.place, empty or bool(list_checkpoints(parts.run.checkpoints))))
    loaded = _resume_hot(parts)
    kept = None if loaded is None else loaded.path
    if loaded is None:
        held = (parts.divided, parts.optimizer, parts.scale)
        loaded = restore(parts.run, parts.place, *held, lambda *bad: reject(parts, *bad), in_place=empty)
    if loaded is None:
        if had:
            raise DataError(
                f"{parts.run.checkpoints}: no checkpoint here is good; `phalanx checkpoint verify` tells why"
            )
        go_on_from(parts.run, parts.place, 0, None)
        return Progress()
    meta = loaded.manifest.meta
    if meta.get("fingerprint") != fingerprint:
        fingerprints = f"(fingerprint {meta.get('fingerprint')}, now {fingerprint})"
        if not force:
            raise DataError(f"{loaded.path}: was trained on other data {fingerprints}; {cure}")
        if parts.place.leads:
            parts.reporter.event(RunWarning(text=f"forced: the run goes on with other data {fingerprints}"))
    check_recipe(parts, loaded.path, meta, force)
    progress = Progress.from_meta(meta)
    if kept is None:  # older checkpoints do not say that they are one
        progress.saved = progress.step
    go_on_from(parts.run, parts.place, progress.step, kept)
    return progress


def check_recipe(parts: Parts, path: Path, meta: Mapping[str, Any], force: bool) -> None:
    """RecipeError where what decides the mathematics is not what the checkpoint at `path` was trained with: it stands
    there under a checksum, and in resolved.yaml it does not."""
    if "recipe" not in meta:
        return
    try:
        trained = Recipe.model_validate(meta["recipe"])
    except ValidationError as error:
        raise DataError(f"{path}: its recipe is not one that this Phalanx knows ({error.errors()[0]['msg']})") from None
    found = [each for each in differences(trained, parts.recipe) if is_mathematics(each.key, trained)]
    if not found:
        return
    if not force:
        listed = "; ".join(map(str, found))
        raise RecipeError(
            f"{parts.run.resolved}: is not what {path} was trained with: {listed}; put the old values back there, or "
            "give --force to go on with the new ones"
        )
    if parts.place.leads:
        told = {event.text for event in read_events(parts.run.events) if isinstance(event, RunWarning)}
        for text in (f"forced: {each}" for each in found):
            if text not in told:  # where the recipes were compared as they were given
                parts.reporter.event(RunWarning(text=text))


def _resume_hot(parts: Parts) -> Loaded | None:
    """Go on from the newest hot copy that is whole and newer than every checkpoint; None when there is none."""
    begun = time.perf_counter()

    def on_reject(*bad: Any) -> None:
        reject(parts, *bad)

    found = find_copies(parts.run, parts.place, on_reject)
    if found is None:
        return None
    recalled = recall(parts.run, found, parts.place, parts.divided, parts.optimizer, parts.scale, on_reject)
    if recalled is None:
        return None
    meta = recalled.loaded.manifest.meta
    if parts.place.leads:
        parts.reporter.event(
            InMemoryRestored(
                step=meta["step"],
                checkpoint_step=meta["saved"],
                fetched_bytes=recalled.fetched,
                duration_s=time.perf_counter() - begun,
            )
        )
    return recalled.loaded


def tell_start(parts: Parts, samples: int, progress: Progress, grown: bool = False) -> None:
    """Report that training begins on so many training samples, and what is doubtful about it. `grown`: no work was
    lost before, it only goes on with more workers."""
    recipe, place = parts.recipe, parts.place
    parts.reporter.event(
        AttemptStarted(
            world_size=place.world,
            attempt=place.attempt,
            start_step=progress.step,
            total_steps=recipe.steps,
            device=str(place.device),
            num_micro_batches=parts.stepper.micro_batches,
            scaled_up=grown,
        )
    )
    if has_batch_norm(parts.model):
        text = (
            "the model has BatchNorm: results depend on the micro-batch, and running statistics are the first "
            "worker's; GroupNorm has none"
        )
        parts.reporter.event(RunWarning(text=text))
    if samples < recipe.batch.global_size:
        text = f"the data have only {samples} training samples, less than batch.global_size"
        parts.reporter.event(RunWarning(text=text))


def result_of(parts: Parts, progress: Progress, status: str) -> dict[str, Any]:
    """result.json, but for the seconds: how training ended, with the digest of the state that was saved last."""
    result: dict[str, Any] = {"format": RESULT_FORMAT, "status": status, "steps": progress.step}
    result |= {"final_loss": progress.last_loss, "units": progress.units, "restarts": parts.place.attempt}
    return {**result, "digest": _digest(parts, progress)}


def _digest(parts: Parts, progress: Progress) -> str:
    """The digest of the state with which the run ends. Where no worker holds it all, it is read from the checkpoint."""
    if not parts.divided.alike:
        return digest_checkpoint(parts.run.checkpoints / checkpoint_name(progress.step))
    return digest(state_tensors(parts.model, parts.optimizer, parts.scale).items(), progress.samples)
