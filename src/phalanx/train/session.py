"""Session: a user's own training loop, which provides model, optimizer and batches; Phalanx does everything else.

    with phalanx.session("recipe.yaml") as session:
        model, optimizer = session.prepare(build, lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4))
        for batch in session.micro_batches(dataset):
            loss_sum, terms = ...
            session.backward(loss_sum, terms)
            session.step()                  # both in one: session.backward_and_step(loss_sum, terms)

The recipe's parallelism, precision, batch, steps, schedule, checkpoints and recovery apply as with the trainer. Model,
data, loss, optimizer with its learning rate, and evaluation are those of the loop. `phalanx.session` (app/session.py)
prepares the run and ends it.

The data are a map-style dataset: samples in the run's order, collated, and moved to a device. Each sample must depend
on its index only; `fingerprint_dataset` detects most violations.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import default_collate

from phalanx.data.order import ShuffleOrder
from phalanx.errors import UsageError
from phalanx.pytree import map_tensors
from phalanx.recipe import ResolvedRecipe
from phalanx.run.directory import write_json
from phalanx.train.builder import make_accumulator, make_held_slices, make_parallel_config
from phalanx.train.callbacks import RunContext, UserCallbacks, load_callbacks
from phalanx.train.checkpoint.durable import clean_checkpoint_dir
from phalanx.train.distributed.failures import explain_out_of_memory
from phalanx.train.distributed.fsdp import reshard_parameters
from phalanx.train.distributed.mesh import build_mesh
from phalanx.train.distributed.module_state import check_model_can_be_saved
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.distributed.parallelize import parallelize
from phalanx.train.model_builder import check_same_initial_values
from phalanx.train.ops.random_draws import MicroBatchSeeds, derive_seed, seed_everything
from phalanx.train.optim.user import UserOptimizer
from phalanx.train.precision import GradScaler, autocast_context
from phalanx.train.resume import make_result, report_start, resume_training
from phalanx.train.train_context import TrainContext, WorkerProcess
from phalanx.train.trainer import Trainer

OTHER_DATA_HINT = (
    "give the data that it was trained on, or another run directory. Where a dataset gives other samples each time, "
    "name it by session.micro_batches(dataset, fingerprint=...)"
)


FINGERPRINT_SAMPLES = 8
"""Number of samples that a fingerprint includes."""

CollateFn = Callable[[list[Any]], Any]


class CollatedMicroBatch:
    """A collated batch of any type."""

    def __init__(self, value: Any):
        self.value = value
        self.nbytes = max(1, _count_bytes(value))


class StepSamples:
    """Samples of a step; a slice of it is a `CollatedMicroBatch`. The feed slices in its own thread, so collating
    happens there."""

    def __init__(self, samples: list[Any], collate: CollateFn):
        self._samples, self._collate = samples, collate

    def __getitem__(self, sample_range: slice) -> CollatedMicroBatch:
        return CollatedMicroBatch(self._collate(self._samples[sample_range]))


class MapDatasetSource:
    """The interface that a feed needs, for a map-style dataset (`len` and `[i]`): `read_training` returns samples in
    the order of the run."""

    has_images = False

    def __init__(self, dataset: Any, fingerprint: str, seed: int, collate: CollateFn = default_collate):
        self._dataset, self._collate = dataset, collate
        self._order = ShuffleOrder(len(dataset), 0, fingerprint, seed)

    def read_training(self, consumed: int, count: int) -> dict[str, Any]:
        """Return samples consumed .. consumed + count - 1 of the run."""
        indices = self._order.training_samples(np.arange(consumed, consumed + count))
        return {"": StepSamples([self._dataset[int(index)] for index in indices], self._collate)}


def batch_to_device(batch: Mapping[str, CollatedMicroBatch], device: torch.device) -> Any:
    """Return a feed's micro-batch as its collate function made it, with tensors on the device."""
    return map_tensors(batch[""].value, lambda tensor: tensor.to(device, non_blocking=True))


def check_map_dataset(dataset: Any) -> None:
    """Raise UsageError unless this is a map-style dataset with at least one sample."""
    if not (hasattr(type(dataset), "__len__") and hasattr(type(dataset), "__getitem__")):
        raise UsageError(
            f"session.micro_batches: found a {type(dataset).__name__}, expected a map-style dataset (len(dataset) and "
            "dataset[i]); order, batches and workers are Phalanx's"
        )
    if not len(dataset):
        raise UsageError("session.micro_batches: the dataset is empty")


def fingerprint_dataset(dataset: Any) -> str:
    """Return a fingerprint of a dataset: of its class, its length and some samples, evenly spaced."""
    size = len(dataset)
    digest = xxhash.xxh3_64(f"{type(dataset).__qualname__}/{size}".encode())
    for index in sorted({i * (size - 1) // (FINGERPRINT_SAMPLES - 1) for i in range(FINGERPRINT_SAMPLES)}):
        _update_digest(digest, dataset[index])
    return digest.hexdigest()


def _update_digest(digest: xxhash.xxh3_64, value: Any) -> None:
    """Add a sample's structure and content to a digest; for other objects, only their class."""
    digest.update(f"/{type(value).__name__}".encode())
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        digest.update(f"{value.dtype}{list(value.shape)}".encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif hasattr(value, "tobytes"):  # arrays, and images of PIL
        digest.update(f"{getattr(value, 'dtype', '')}{getattr(value, 'shape', '')}".encode())
        digest.update(value.tobytes())
    elif isinstance(value, Mapping):
        for name, part in value.items():
            digest.update(str(name).encode())
            _update_digest(digest, part)
    elif isinstance(value, list | tuple):
        for part in value:
            _update_digest(digest, part)
    elif isinstance(value, bytes):
        digest.update(value)
    elif isinstance(value, str | int | float):
        digest.update(str(value).encode())


def _count_bytes(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_count_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_count_bytes, value))
    return int(getattr(value, "nbytes", 0))


@dataclass(frozen=True)
class PreparedModel:
    """The result of `prepare`. `plan_facts` describe it for the run's plan."""

    model: nn.Module
    parallel_model: ParallelModel
    optimizer: UserOptimizer
    scaler: GradScaler
    plan_facts: dict[str, Any]


class Session:
    """The object that `phalanx.session` returns. `rank`, `world_size` and `device` are those of this worker."""

    def __init__(self, process: WorkerProcess, recipe: ResolvedRecipe, force: bool):
        run, dist_env = process.run, process.dist_env
        self.rank, self.world_size, self.device = dist_env.rank, dist_env.world_size, dist_env.device
        self._process, self._run, self._dist_env = process, run, dist_env
        self._recipe, self._force = recipe, force
        if dist_env.is_rank_zero:
            clean_checkpoint_dir(run.checkpoints)
        self._mesh = build_mesh(recipe.parallelism, dist_env, recipe)
        self._prepared: PreparedModel | None = None
        self._trainer: Trainer | None = None
        self._finished = False
        self._stepped = False

    def prepare(
        self,
        build: Callable[[], nn.Module],
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        tp_plan: dict[str, str] | None = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Parallelize the model that `build()` returns, in the recipe's precision, then call `make_optimizer(model)`;
        return both. Initial weights depend on the recipe's seed. `tp_plan` is the tensor-parallel plan, as
        model.tp_plan in the recipe. Raises RecipeError if the model does not support the parallelism, UsageError unless
        the optimizer trains exactly this model."""
        recipe, dist_env = self._recipe, self._dist_env
        seed_everything(derive_seed(recipe.seed, "init"), torch.device("cpu"))
        model = build()
        if not isinstance(model, nn.Module):
            raise UsageError(f"session.prepare: build() returned {type(model).__name__}, expected an nn.Module")
        check_model_can_be_saved(model)
        check_same_initial_values(dist_env, model)
        model.to(dist_env.device).train()
        size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        parallel_model, _ = parallelize(model, model, self._mesh, make_parallel_config(recipe, tp_plan=tp_plan))
        apply_autocast(model, recipe.precision, dist_env.device)
        optimizer = make_optimizer(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"session.prepare: make_optimizer(model) returned {type(optimizer).__name__}, expected an optimizer"
            )
        user_optimizer = UserOptimizer(
            model, optimizer, is_sharded=not self._mesh.is_pure_ddp, is_sliced=bool(parallel_model.dim_shards)
        )
        scaler = GradScaler.for_precision(recipe.precision, recipe.batch.global_size)
        kind = type(optimizer).__name__
        plan_facts = {
            "model": type(model).__name__,
            "parameters": size,
            "optimizer": f"{kind}, lr {user_optimizer.base_lr:g}",
        }
        self._prepared = PreparedModel(model, parallel_model, user_optimizer, scaler, plan_facts)
        return model, optimizer

    def micro_batches(
        self, dataset: Any, fingerprint: str | None = None, tokens: int = 1, collate: CollateFn = default_collate
    ) -> Iterator[Any]:
        """Yield this worker's micro-batches of a map-style dataset (`len` and `[i]`), collated, on the device, in the
        run's order, from the current step of the run to its last, over as many epochs as needed.

        `fingerprint` identifies the data, so that a run does not resume with other data; the default is computed from
        the dataset's class, length and a few samples. `tokens` is the number of tokens per sample, for rates. A sample
        must depend on its index only, otherwise a resumed run differs. Raises DataError if the run was trained on other
        data.
        """
        if self._prepared is None:
            raise UsageError("session.micro_batches: call session.prepare(build, make_optimizer) first")
        if self._trainer is not None:
            if not self._finished:
                raise UsageError(
                    "session.micro_batches: take the batches of a run once, in one loop up to its last step"
                )
            return iter(())  # a loop over epochs calls this again; the first call returned all batches
        check_map_dataset(dataset)
        fingerprint = fingerprint or fingerprint_dataset(dataset)
        prepared, dist_env = self._prepared, self._dist_env
        source = MapDatasetSource(dataset, fingerprint, self._recipe.seed, collate)
        context = self._make_context(prepared, source, tokens)
        self._write_plan(prepared, dataset, tokens)
        train_state = resume_training(context, fingerprint, self._force, OTHER_DATA_HINT)
        self._process.heartbeat.record("restoring")
        if dist_env.is_rank_zero:
            report_start(context, len(dataset), train_state)
        meta = {"fingerprint": fingerprint, "recipe": context.recipe.model_dump(mode="json")}
        self._trainer = Trainer(context, train_state, meta)
        return self._iterate(self._trainer)

    def _iterate(self, trainer: Trainer) -> Iterator[Any]:
        for batch in trainer.micro_batches():
            yield batch
            if self._stepped:
                self._reshard()
        self._finished = True
        self._process.heartbeat.record("ending")  # from here on the loop may take as long as it likes

    def _reshard(self) -> None:
        """Free parameters that an evaluation in the loop has gathered, since no backward did."""
        assert self._prepared is not None
        reshard_parameters(self._prepared.model.modules())
        self._stepped = False

    def _make_context(self, prepared: PreparedModel, data: MapDatasetSource, tokens: int) -> TrainContext:
        dist_env, parallel_model = self._dist_env, prepared.parallel_model
        optimizer, scaler = prepared.optimizer, prepared.scaler
        # The schedule scales the learning rate that the loop gave its optimizer, and events report the result.
        optim = self._recipe.optimizer.model_copy(update={"lr": optimizer.base_lr})
        recipe = self._recipe.model_copy(update={"optimizer": optim})
        seeds = MicroBatchSeeds(recipe.seed, dist_env.device)
        seeds.slices = make_held_slices(parallel_model.mesh, recipe.batch.micro_size, None, None)
        view = RunContext(self._run.path, dist_env.rank, dist_env.world_size, prepared.model)
        return TrainContext(
            **vars(self._process),
            recipe=recipe,
            data=data,
            model=prepared.model,
            loss_module=None,
            parallel_model=parallel_model,
            optimizer=optimizer,
            scaler=scaler,
            accumulator=make_accumulator(recipe, dist_env, parallel_model, optimizer, scaler, seeds),
            callbacks=UserCallbacks(load_callbacks(recipe.callbacks, self._process.folder), view),
            count_units=lambda first_sample, count: count * tokens,
            validation_data=None,
            prepare_batch=lambda batch: batch_to_device(batch, dist_env.device),
        )

    def _write_plan(self, prepared: PreparedModel, dataset: Any, tokens: int) -> None:
        """Add to plan.json what only the loop knows. Raises UsageError if the run started with another optimizer."""
        plan = self._run.read_json_or_empty(self._run.plan)
        now = prepared.plan_facts["optimizer"].partition(",")[0]
        if "session" in plan and (before := plan["session"]["optimizer"].partition(",")[0]) != now:
            raise UsageError(
                f"{self._run.path}: was trained with {before}, and the loop now makes {now}, which cannot resume with "
                "that state; make the same, or give another run directory"
            )
        if self._dist_env.is_rank_zero:
            data = f"{type(dataset).__name__}, {len(dataset)} samples"
            plan |= {
                "session": {**prepared.plan_facts, "data": data},
                "trainable_parameters": prepared.plan_facts["parameters"],
                "unit": "tokens" if tokens > 1 else "samples",
                "units_per_sample": tokens,
            }
            write_json(self._run.plan, plan)

    def backward(self, loss_sum: Tensor, num_terms: Tensor | int) -> None:
        """Run backward of a micro-batch from the sum (0-d) of its losses over `num_terms` terms, not their mean. Raises
        UsageError if there is no such sum, or no batch that waits for it."""
        trainer = self._require_trainer()
        if not isinstance(loss_sum, Tensor) or loss_sum.dim() or not loss_sum.requires_grad:
            found = f"shape {list(loss_sum.shape)}" if isinstance(loss_sum, Tensor) else type(loss_sum).__name__
            found = "one without a gradient" if isinstance(loss_sum, Tensor) and not loss_sum.dim() else found
            raise UsageError(
                "session.backward: expected the sum of the losses as a 0-d tensor that depends on the model, "
                f"found {found}"
            )
        trainer.backward(loss_sum, num_terms)

    def backward_and_step(self, loss_sum: Tensor, num_terms: Tensor | int) -> bool:
        """Call `backward`, then `step`."""
        self.backward(loss_sum, num_terms)
        return self.step()

    def step(self) -> bool:
        """Call after each backward. When the micro-batches of a step are done, update and return True, else False."""
        self._stepped = self._require_trainer().step()
        return self._stepped

    def send_heartbeat(self) -> None:
        """Send a heartbeat during long work between two steps, such as after each batch of an evaluation: a worker
        without heartbeat for `fault_tolerance.hang_timeout_s` seconds counts as hanging. It takes about 1
        microsecond."""
        self._process.heartbeat.record("evaluation")

    def explain_out_of_memory(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that turns an allocation failure into an error that names a smaller micro-batch size."""
        return explain_out_of_memory(self._recipe.batch.micro_size)

    def _require_trainer(self) -> Trainer:
        if self._trainer is None:
            raise UsageError("a training loop must take its batches from session.micro_batches(dataset)")
        return self._trainer

    def release_process_group(self) -> None:
        """Release everything that uses the process group, before it is left. The model stays usable in the loop."""
        if self._trainer is not None:
            self._trainer.context.accumulator.reducer.close()
        self._trainer = self._prepared = None
        del self._mesh

    def finish(self) -> str:
        """Save the final state and report the result; return `done` or `interrupted`."""
        trainer = self._require_trainer()
        self._reshard()
        status = trainer.finish()
        if self._dist_env.is_rank_zero:
            self._process.reporter.report_result(make_result(trainer.context, trainer.train_state, status))
        return status


def apply_autocast(model: nn.Module, precision: str, device: torch.device) -> None:
    """Make the model's forward run in autocast if `precision` needs it, and return its floating-point results in fp32,
    so that the loss is computed in fp32."""
    if precision in ("fp32", "tf32"):
        return
    forward = model.forward

    def autocast_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with autocast_context(precision, device):
            return map_tensors(
                forward(*args, **kwargs), lambda part: part.float() if part.is_floating_point() else part
            )

    vars(model)["forward"] = MethodType(autocast_forward, model)
