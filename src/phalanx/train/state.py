"""The state of a run as logical tensors, and the few numbers beside them: what a checkpoint holds.

Tensors: parameters and persistent buffers by their names in the model, `optimizer/<parameter>/<state>`,
`extra/<module>` what a module says in `get_extra_state`, `settings/groups` what an optimizer keeps in its groups,
`scaler/<name>`, `exchange/residual/<parameter>`, `exchange/basis/<parameter>`, and what workers have for themselves
that train apart (`apart.py`).
Numbers: the step, and the samples consumed, from which the order of data follows.
"""

import json
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from phalanx.errors import DataError
from phalanx.run.event_types import NonFiniteStep, StepDone
from phalanx.run.events import from_fields
from phalanx.run.fields import to_fields
from phalanx.train.checkpoint import Manifest, Saver, load_blocks
from phalanx.train.checkpoint.format import EXTRA
from phalanx.train.exchange.choice import Choice
from phalanx.train.noise import NoiseScale
from phalanx.train.optimizers import PREFIX, SETTINGS, Optimizer, entry_shape
from phalanx.train.parallel.divided import Divided, Held, local
from phalanx.train.precision import LossScale
from phalanx.train.savable import extra_state, load_extra_state, persistent_buffers


@dataclass
class Progress:
    """How far a run is. Skipped steps count as steps; after a rollback samples run ahead of step x global batch.

    `guards` counts skipped steps, `best` is the lowest held-out loss that was saved, `saved` the step of the newest
    checkpoint, 0 before there was one. `missed` is the step of the checkpoint that a guard would go back to, where that
    was lost together with a worker who wrote it, else 0; one that is saved instead is of another step. `exchange` tells
    by which strategy gradients are summed.
    """

    step: int = 0
    samples: int = 0
    units: int = 0  # tokens or samples trained on
    guards: int = 0
    skipped_in_a_row: int = 0
    last_loss: float | None = None
    best: float | None = None
    saved: int = 0
    missed: int = 0
    noise: NoiseScale = field(default_factory=NoiseScale)
    exchange: Choice = field(default_factory=Choice)

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> "Progress":
        """As a checkpoint's meta has it (`asdict`). DataError where that is not what a run can be at."""
        values = {each.name: meta[each.name] for each in fields(cls) if each.name in meta}
        try:
            found = TypeAdapter(cls).validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise DataError(f"a checkpoint's meta.{key}: {first['msg']}, found {first['input']!r}") from None
        if min(found.step, found.samples, found.units) < 0:
            raise DataError(f"a checkpoint of step {found.step} after {found.samples} samples and {found.units} units")
        return found


@dataclass(frozen=True)
class Last:
    """The last step that was done, for who was torn out of it: by what its summed gradients were scaled, and with which
    learning rate they changed the weights (None: it was skipped); and the events of it."""

    change: tuple[float, float] | None
    told: tuple[StepDone | NonFiniteStep, ...]


@dataclass(frozen=True)
class Unfinished:
    """A worker's part in a checkpoint that is being written, to be taken along into another world (`saving.Saving`)."""

    saver: Saver
    step: int
    best: float | None
    stall: float
    reason: str


@dataclass(frozen=True)
class Standing:
    """How far a worker is that holds the state in memory. `settled` is the last step after which everything that was
    due was done, `scored` the last that was evaluated if that was due, `improved` whether it had the best score so far,
    `back_for` why the guard goes back from here, "" if it does not. `last` is None where it has done none in its
    present world. `summed`: it holds the gradients of the step after, summed over all workers. `unfinished` is its own.
    """

    progress: Progress
    settled: int
    last: Last | None = None
    summed: bool = False
    scored: int = 0
    improved: bool = False
    back_for: str = ""
    unfinished: Unfinished | None = None

    def words(self) -> dict[str, Any]:
        """As JSON values, for others: without what is this worker's own."""
        words = asdict(replace(self, summed=False, unfinished=None))
        if self.last is not None:
            words["last"]["told"] = [to_fields(event) for event in self.last.told]
        return words

    @classmethod
    def from_words(cls, words: Mapping[str, Any]) -> "Standing":
        """What `words` made."""
        last = words["last"]
        if last is not None:
            change = None if last["change"] is None else (last["change"][0], last["change"][1])
            events = map(from_fields, last["told"])
            last = Last(change, tuple(event for event in events if isinstance(event, StepDone | NonFiniteStep)))
        return cls(**{**words, "progress": Progress.from_meta(words["progress"]), "last": last})


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, tied ones once; the live tensors."""
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **persistent_buffers(model)}
    return {name: tensor.detach() for name, tensor in tensors.items()}


def state_tensors(model: nn.Module, optimizer: Optimizer, scale: LossScale) -> dict[str, Tensor]:
    """Everything that the next step depends on."""
    return {**model_tensors(model), **extra_state(model), **optimizer.state(), **optimizer.settings(), **scale.state()}


def held_state(divided: Divided, optimizer: Optimizer, scale: LossScale) -> dict[str, Held]:
    """Everything that the next step depends on, as far as this worker holds it and no other pipeline stage saves it."""
    parameters = divided.parameters()
    held = {name: divided.held(name, p) for name, p in parameters.items() if divided.counts(name)}
    for name, buffer in divided.buffers().items():
        held[name] = divided.whole(buffer.detach())
    for key, value in optimizer.state().items():
        name, _, entry = key.removeprefix(PREFIX).rpartition("/")
        if divided.counts(name):
            parameter = parameters[name]
            shape = entry_shape(entry, parameter.shape)
            if value.dim() and not divided.is_cut(name, parameter):  # an optimizer of a loop's own has its own shapes
                shape = value.shape
            held[key] = divided.held(name, parameter, value, shape) if value.dim() else divided.whole(value)
    for module in divided.modules:
        extra = extra_state(module).items()
        held |= {name: divided.whole(value) for name, value in extra if name not in divided.foreign}
    held |= {name: divided.whole(value) for name, value in optimizer.settings().items()}
    if divided.residuals is not None:
        held |= divided.residuals.held()
    if divided.mesh.at["pipeline"] == 0:  # equal in all stages
        held |= {name: divided.whole(value) for name, value in scale.state().items()}
    return held if divided.apart is None else divided.apart.held(held)


Blocks = list[tuple[str, tuple[int, ...], Tensor]]
"""Blocks of logical tensors to be read: name, offset, and the tensor to fill."""


@dataclass(frozen=True)
class Wanted:
    """A worker's part of the state. `blocks` are of tensors in use, which must not change before all workers have read
    theirs; `fresh` of new ones. `states` are those of the optimizer and the scale among these."""

    blocks: Blocks
    fresh: Blocks
    states: dict[str, Tensor]
    settle: Callable[[], None] = lambda: None
    """To be called when all is read: the first that may change anything in use."""
    turns: list[Blocks] = field(default_factory=list)
    """What is read one after the other into the same memory, which is new."""
    add: Callable[[], None] = lambda: None
    """To be called after each of these."""

    @property
    def everything(self) -> Blocks:
        """All that is read."""
        return [*self.blocks, *self.fresh, *(block for turn in self.turns for block in turn)]


def load_held(
    divided: Divided,
    optimizer: Optimizer,
    scale: LossScale,
    path: Path,
    manifest: Manifest,
    threads: int = 2,
    in_place: bool = False,
) -> Callable[[], None]:
    """Read this worker's part of the state from a checkpoint that was written under any layout, and return what takes
    it over: nothing in use changes before that is called, unless weights are read `in_place`. CorruptError names a bad
    file, DataError what does not fit."""
    wanted = wanted_of(divided, path, manifest)
    return load_wanted(wanted, divided, optimizer, scale, path, manifest, threads, in_place)


def wanted_of(divided: Divided, path: Path, manifest: Manifest) -> Wanted:
    """What `load_held` reads. DataError when the model does not fit the checkpoint."""
    parameters = divided.parameters()
    wanted: Blocks = []
    fresh: Blocks = []

    def want(name: str, held: Held, into: Blocks = wanted) -> None:
        record = manifest.tensors.get(name)
        if record is not None and record.shape != held.holding.shape:
            shapes = f"has shape {list(record.shape)}, the model's has {list(held.holding.shape)}"
            raise DataError(f"{path}: {name} {shapes}")
        for block in held.holding.blocks:
            into.append((name, block.offset, block.of(held.tensor)))

    for name, parameter in parameters.items():
        if name not in manifest.tensors:
            raise DataError(f"{path}: has no tensor {name!r}, which the model needs")
        want(name, divided.held(name, parameter))
    for name, buffer in divided.buffer_copies():
        want(name, divided.whole(buffer.detach()))
    if divided.mesh.layout.pipeline == 1:  # else the rest of the model is in other stages
        check_nothing_left(manifest.tensors, {*parameters, *dict(divided.buffer_copies())}, str(path))
    states: dict[str, Tensor] = {}
    for key, record in manifest.tensors.items():
        name, _, entry = key.removeprefix(PREFIX).rpartition("/")
        if key.startswith(("scaler/", EXTRA, SETTINGS)):
            states[key] = torch.empty(record.shape, dtype=record.torch_dtype)
            fresh.append((key, (0,) * len(record.shape), states[key]))
        elif key.startswith(PREFIX) and name in parameters:
            parameter = parameters[name]
            here, whole = (entry_shape(entry, each.shape) for each in (local(parameter), parameter))
            if not record.shape or not divided.is_cut(name, parameter):
                here = whole = torch.Size(record.shape)
            states[key] = torch.zeros(here, dtype=record.torch_dtype)
            if record.shape:
                want(key, divided.held(name, parameter, states[key], whole), fresh)
            else:
                fresh.append((key, (), states[key]))
    found = Wanted(wanted, fresh, states)
    if divided.residuals is not None:
        read, settle = divided.residuals.wanted(manifest)
        found = Wanted(wanted, fresh + read, states, settle)
    return found if divided.apart is None else divided.apart.wanted(found, manifest)


def check_nothing_left(saved: Iterable[str], known: Container[str], where: str) -> None:
    """DataError naming a saved weight or buffer that the model does not have: it would be lost silently."""
    left = next((name for name in saved if "/" not in name and name not in known), None)
    if left is not None:
        raise DataError(f"{where}: holds {left!r}, which the model does not have: was its code changed since?")


def load_wanted(
    wanted: Wanted,
    divided: Divided,
    optimizer: Optimizer,
    scale: LossScale,
    path: Path,
    manifest: Manifest,
    threads: int = 2,
    in_place: bool = False,
) -> Callable[[], None]:
    """Read it into memory of its own, but for weights that are read `in_place`, and return what takes it over.
    CorruptError names a bad file."""
    staged = wanted.blocks
    if not in_place:
        staged = [(name, offset, torch.empty(live.shape, dtype=live.dtype)) for name, offset, live in wanted.blocks]
    load_blocks(path, [*staged, *wanted.fresh], threads, manifest)
    for turn in wanted.turns:
        load_blocks(path, turn, threads, manifest)
        wanted.add()

    def take_over() -> None:
        with torch.no_grad():
            for (_, _, live), (_, _, read) in zip(wanted.blocks, staged, strict=True):
                if read is not live:
                    live.copy_(read)
        wanted.settle()
        for module in divided.modules:
            load_extra_state(module, wanted.states, str(path))
        _load_rest(optimizer, scale, wanted.states, str(path))

    return take_over


def load_model(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy weights into the model. DataError naming what is missing, of another shape, or not the model's."""
    targets = model_tensors(model)
    check_nothing_left(tensors, targets, where)
    for name, target in targets.items():
        source = tensors.get(name)
        if source is None:
            raise DataError(f"{where}: has no tensor {name!r}, which the model needs")
        if source.shape != target.shape:
            raise DataError(f"{where}: {name} has shape {list(source.shape)}, the model's has {list(target.shape)}")
        if source.data_ptr() != target.data_ptr():  # else it was read in place
            target.copy_(source)
    load_extra_state(model, tensors, where)


def load_state(
    model: nn.Module, optimizer: Optimizer, scale: LossScale, tensors: Mapping[str, Tensor], where: str
) -> None:
    """Take over a whole state, read from `where`. DataError naming the tensor that does not fit."""
    with torch.no_grad():
        load_model(model, tensors, where)
    _load_rest(optimizer, scale, tensors, where)


def _load_rest(optimizer: Optimizer, scale: LossScale, tensors: Mapping[str, Tensor], where: str) -> None:
    optimizer.load({name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}, where)
    optimizer.load_settings(tensors, where)
    scale.load({name: tensor for name, tensor in tensors.items() if name.startswith("scaler/")})
