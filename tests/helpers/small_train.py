"""Small models, data in memory, a clock to be set by hand and a reporter that remembers: shared by the train room's
tests. Everything is seeded and needs no file and no process."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.data import Batch, DataInfo
from phalanx.data.reader import ValidationPart
from phalanx.recipe.schema import OptimizerConfig, Parallelism
from phalanx.run import Event, Run
from phalanx.run.event_types import RunEvent
from phalanx.train.callbacks import RunContext, TrainerCallback, UserCallbacks
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.mesh import Mesh, rank_coordinates
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.grad_sync.bucketed_reducer import BucketedReducer
from phalanx.train.grad_sync.reducer import GradReducer, LocalReducer
from phalanx.train.loss import LossFn, LossModule
from phalanx.train.ops.random_draws import MicroBatchSeeds
from phalanx.train.optim.container import OptimizerContainer
from phalanx.train.precision import GradScaler
from phalanx.train.step_metrics import StepResult
from phalanx.train.step_timer import HostStepTimer, StepTimer
from phalanx.train.tasks import LanguageModeling, Task, TensorBatch
from phalanx.train.train_context import StopRequest, TrainContext
from phalanx.train.train_step import GradientAccumulator, TrainStep, divide_and_clip, to_device
from phalanx.train.trainer import Trainer
from resolved_recipes import resolved_recipe

VOCAB, SEQUENCE = 11, 6
GLOBAL, MICRO = 4, 2


class TinyLM(nn.Module):
    """Tokens [b, s] to logits [b, s, vocab]; `dropout` makes it draw random numbers."""

    def __init__(self, vocab: int = VOCAB, width: int = 8, dropout: float = 0.0):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.dropout(torch.tanh(self.hidden(x)))))


def tiny_lm(seed: int = 0, **options: Any) -> TinyLM:
    torch.manual_seed(seed)
    return TinyLM(**options)


def token_batch(count: int, seed: int = 0, ignored: float = 0.0, sequence: int = SEQUENCE, vocab: int = VOCAB) -> Batch:
    """`count` samples of random tokens; about the share `ignored` of the targets does not count."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, vocab, (count, sequence + 1))
    targets = tokens[:, 1:].copy()
    targets[random.random(targets.shape) < ignored] = -100
    return {"tokens": tokens[:, :-1].copy(), "targets": targets}


def cut(batch: Batch, micro: int) -> list[Batch]:
    """The batch in micro-batches."""
    count = len(next(iter(batch.values())))
    return [{k: v[i : i + micro] for k, v in batch.items()} for i in range(0, count, micro)]


class Samples:
    """Data in memory, as the loop and the evaluation ask for them: training samples repeat without end."""

    def __init__(self, train: Batch, held_out: Batch | None = None):
        self._train, self._validation = train, held_out or {}
        self.num_train_samples = len(next(iter(train.values())))
        self.num_validation_samples = len(next(iter(self._validation.values()))) if held_out else 0
        self.info = DataInfo("tokens", VOCAB, None, SEQUENCE, None)
        self.fingerprint = "0" * 32
        self.has_images = self.has_text_only = False
        self.asked: list[tuple[int, int]] = []

    def read_training(self, consumed: int, count: int) -> Batch:
        self.asked.append((consumed, count))
        rows = np.arange(consumed, consumed + count) % self.num_train_samples
        return {name: values[rows] for name, values in self._train.items()}

    def choose_validation_parts(self, max_samples: int) -> list[ValidationPart]:
        return [ValidationPart(0, min(max_samples, self.num_validation_samples), 1.0)]

    def read_validation(self, start: int, count: int) -> Batch:
        assert start + count <= self.num_validation_samples
        return {name: values[start : start + count] for name, values in self._validation.items()}


class Clock:
    """Tells the time that was set; `tick` lets it pass."""

    def __init__(self, now: float = 1000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds


E = TypeVar("E", bound=RunEvent)


class Remembering:
    """A reporter that keeps everything in lists."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.errors: list[tuple[str, int]] = []
        self.results: list[dict[str, Any]] = []

    def report_event(self, event: Event) -> None:
        self.events.append(event)

    def report_error(self, text: str, code: int) -> None:
        self.errors.append((text, code))

    def report_result(self, value: dict[str, Any]) -> None:
        self.results.append(value)

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """Nothing to send."""

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]


def mesh_of(rank: int = 0, **layout: int) -> Mesh:
    """The place of a rank in a layout, without the groups that it would talk to."""
    found = Parallelism(**layout)
    return Mesh(found, rank_coordinates(found, rank))


def objective_of(model: nn.Module, task: Task | None = None, precision: str = "fp32") -> LossModule:
    """The model under next-token prediction, or another task, on the CPU."""
    return LossModule(model, LossFn(task or LanguageModeling(), precision, torch.device("cpu")))


class SmallStepper(GradientAccumulator):
    """An accumulator with the loss module, the optimizer and the limit on the gradient norm."""

    objective: LossModule
    optimizer: OptimizerContainer
    clip: float | None

    def step(self, watch: StepTimer, *callbacks: TrainerCallback) -> TrainStep:
        def prepare(batch: Batch) -> TensorBatch:
            return to_device(batch, self.dist_env.device)

        return TrainStep(self, self.optimizer, self.objective, prepare, self.clip, watch, callbacks)

    def gradients(self, step: int, batches: Sequence[Batch], watch: StepTimer, *callbacks: TrainerCallback) -> Tensor:
        """All of a step but its division and update; the metrics summed over all workers."""
        train_step = self.step(watch, *callbacks)
        train_step.accumulate(step, batches)
        return train_step.reduce()

    def divided(self) -> tuple[StepResult, float]:
        """The result of the step, and the factor of its gradients."""
        totals = self.read_totals(self.append_grad_norm(self.metrics.values).tolist())
        return divide_and_clip(totals, self.scaler.scale, self.clip)


def make_stepper(
    model: nn.Module,
    micro_batches: int,
    task: Task | None = None,
    *,
    replicas: bool = False,
    precision: str = "fp32",
    clip: float | None = None,
    seed: int = 0,
    optim: OptimizerConfig | None = None,
    scale: GradScaler | None = None,
) -> SmallStepper:
    """A stepper of one process, with an exchange when `replicas` asks for the tree."""
    optimizer = OptimizerContainer(model, optim or OptimizerConfig(max_grad_norm=clip))
    parallel_model = ParallelModel(mesh_of(), (model,))
    parameters = list(parallel_model.trainable_parameters().values())
    gradients: GradReducer = LocalReducer(parameters)
    if replicas:
        gradients = BucketedReducer(
            parameters, rank=0, world_size=1, micro_batches=micro_batches, is_elastic=True, bucket_bytes=256
        )
    stepper = SmallStepper(
        resolved_recipe(batch={"global_size": micro_batches, "micro_size": 1}),
        DistEnv(),
        parallel_model,
        optimizer.parameter_names,
        gradients,
        scale or GradScaler(),
        MicroBatchSeeds(seed, torch.device("cpu")),
    )
    stepper.objective, stepper.optimizer, stepper.clip = objective_of(model, task, precision), optimizer, clip
    return stepper


def mean_gradients(stepper: SmallStepper, batches: Sequence[Batch], step: int = 1) -> tuple[float, list[Tensor]]:
    """Loss and gradients (of the mean loss) of a step that does not change the model."""
    watch = HostStepTimer()
    watch.start()
    stepper.gradients(step, batches, watch)
    outcome, factor = stepper.divided()
    gradients = [p.grad.detach() * factor for p in stepper.optimizer.parameter_names if p.grad is not None]
    return outcome.totals.loss, gradients


@dataclass(kw_only=True)
class SmallParts(TrainContext):
    """What a trainer works with."""

    accumulator: SmallStepper
    reporter: Remembering

    def events(self, kind: type[E]) -> list[E]:
        return self.reporter.of(kind)

    @property
    def objective(self) -> LossModule:
        """What computes losses."""
        assert isinstance(self.loss_module, LossModule)
        return self.loss_module


def make_parts(
    path: Path, task: LanguageModeling | None = None, callbacks: tuple[Any, ...] = (), **changes: Any
) -> SmallParts:
    """What training a tiny model for 6 steps of two micro-batches takes; `changes` go into the recipe."""
    run = Run(path)
    run.create()
    values = {"steps": 6, "batch": {"global_size": GLOBAL, "micro_size": MICRO}, "precision": "fp32", "num_threads": 1}
    values |= {"evaluation": {"every": None}, "checkpoint": {"every": None}, "parallelism": {"replicate": 1}}
    recipe = resolved_recipe(**{**values, **changes})
    model = tiny_lm()
    scale = GradScaler.for_precision(recipe.precision, GLOBAL)
    stepper = make_stepper(model, GLOBAL // MICRO, task, precision=recipe.precision, clip=1.0, scale=scale)
    data = Samples(token_batch(20), token_batch(5, seed=1))
    return SmallParts(
        run=run,
        folder=path,
        recipe=recipe,
        dist_env=DistEnv(),
        data=data,
        model=model,
        loss_module=stepper.objective,
        parallel_model=ParallelModel(mesh_of(), (model,)),
        optimizer=stepper.optimizer,
        scaler=scale,
        accumulator=stepper,
        callbacks=UserCallbacks(callbacks, RunContext(path, 0, 1, model)),
        reporter=Remembering(),
        stop_request=StopRequest(),
        count_units=lambda first_sample, count: 6 * count,
        validation_data=data,  # type: ignore[arg-type]
        prepare_batch=lambda arrays: to_device(arrays, torch.device("cpu")),
    )


def steps_of(trainer: Trainer) -> Iterator[None]:
    """Train step by step, as the trainer does; what lies between two steps is the caller's."""
    assert isinstance(trainer.context, SmallParts)
    for batch in trainer.micro_batches():
        ((_, loss, terms),) = trainer.context.objective(batch)
        trainer.backward(loss, terms)
        if trainer.step():
            yield
