"""Kinds of models that people train, each in a recipe: a run that was killed goes on to the bits of one that was not,
so does one on another number of workers unless the product refuses that by name, and what is exported is the model."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import train_harness as laboratory
from phalanx.data import open_data
from phalanx.errors import RecipeError
from phalanx.recipe import import_object, load_recipe
from phalanx.recipe.schema import Parallelism
from phalanx.run import Run
from phalanx.train.builder import build_context
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.checkpoint.format import list_checkpoints
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.module_state import find_extra_state_modules
from phalanx.train.inference import TrainedModel, load_trained_model
from phalanx.train.reporter import RunReporter
from phalanx.train.resume import make_result
from phalanx.train.tasks import load_task
from phalanx.train.train_context import WorkerProcess
from phalanx.train.train_state import TrainState
from phalanx.train.train_step import to_device
from phalanx.train.trainer import Trainer
from phalanx.train.worker import configure_torch
from process_worlds import ProcessWorlds
from train_harness import HarnessRun, TrainHarness, Values, plan_fault

BASE: Values = {
    "model": {},
    "data": {"source": {"text": "few.txt"}, "seq_len": 8},
    "evaluation": {"every": 3, "holdout_fraction": 0.02, "max_samples": 4},
    "batch": {"global_size": 12, "micro_size": 2},
    "steps": 6,
    "checkpoint": {"every": 2},
    "determinism": "elastic",
}
PICTURES: Values = {
    "data": {"source": {"text": None, "idx": {"images": "kinds.images", "labels": "kinds.labels"}}, "seq_len": 256}
}
"""The default sequence: no other goes with pictures."""


@dataclass(frozen=True)
class Kind:
    """How a recipe builds one, what else it says, and what forwards of it change: under `determinism: elastic` it is
    refused with these names."""

    build: str
    args: Values = field(default_factory=dict)
    changes: Values = field(default_factory=dict)
    moves: str | None = None


def words(name: str, moves: str | None = None) -> Kind:
    return Kind(f"model_zoo:{name}", moves=moves)


def pictures(build: str, task: str = "classification", moves: str | None = None, **args: Any) -> Kind:
    return Kind(build if ":" in build else f"model_zoo:{build}", args, {**PICTURES, "task": task}, moves)


def ours(name: str, **args: Any) -> Kind:
    return Kind(f"phalanx.models:{name}", {"layers": 1, "hidden_size": 16, "num_heads": 2, **args})


PLAIN = [
    "OwnParametrization",
    "OldWeightNorm",
    "Encoder",
    "Tied",
    "Shared",
    "Frozen",
    "Unused",
    "Fourier",
    "Scalar",
    "Strided",
    "MixedDtypes",
    "EightBit",
    "Dropping",
    "Recomputed",
    "LoadsItself",
]
"""Kinds of which no forward changes anything."""
KINDS: dict[str, Kind] = {
    "transformer": ours("transformer"),
    "transformer, untied, with grouped heads and dropout": ours(
        "transformer", tie_embeddings=False, num_kv_heads=1, activation="relu2", qk_norm=False, dropout=0.1
    ),
    "mixture of experts": ours("moe", num_experts=4, shared_expert_hidden_size=1, layers=2, dense_layers=1),
    "residual network": pictures("phalanx.models:resnet", base_channels=8, blocks=[1], in_channels=1),
    **{name: words(name) for name in PLAIN},
    "SpectralNorm": words("SpectralNorm", "body.parametrizations.weight.0._u"),
    "Average": words("Average", "mean,"),
    "Teacher": words("Teacher", "teacher.bias, teacher.weight,"),
    "ExtraState": words("ExtraState", "the model's extra state,"),
    "batch norm": pictures("batch_norm", moves="0.1.num_batches_tracked, 0.1.running_mean, 0.1.running_var,"),
    "batch norm that is frozen": pictures("FrozenNorm"),
    "variational autoencoder": pictures("Autoencoder", "model_zoo:Rebuild"),
    "siamese": pictures("Siamese", "model_zoo:Halves"),
}


@pytest.fixture(autouse=True, scope="module")
def base() -> Iterator[None]:
    """Another base recipe than the lab's, which has arguments for our transformer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laboratory, "BASE_RECIPE", {**laboratory.BASE_RECIPE, **BASE})
        yield


@pytest.fixture(scope="module")
def kinds(lab: TrainHarness) -> TrainHarness:
    """The lab, with pictures beside its recipes."""
    random = np.random.default_rng(0)
    for name, shape, most in (("images", (64, 8, 8), 256), ("labels", (64,), 4)):
        head = np.array([0x0800 | len(shape), *shape], dtype=">u4").tobytes()
        (lab.folder / f"kinds.{name}").write_bytes(head + random.integers(0, most, shape, dtype=np.uint8).tobytes())
    return lab


def train(lab: TrainHarness, kind: Kind, nproc: int, changes: Values, **more: Any) -> HarnessRun:
    return lab.train({"model": {"build": kind.build, "args": kind.args}, **kind.changes, **changes}, nproc, **more)


def undisturbed(rank: int, world: int, *, resolved: str, folder: str, out: str) -> str:
    """The digest of a resolved recipe that is trained in this world from the beginning, without an agent."""
    given = load_recipe(Path(resolved)).recipe
    recipe = given.model_copy(update={"callbacks": [], "parallelism": Parallelism(replicate=world)})
    run, place = Run(Path(out)), DistEnv(rank, world, rank)
    configure_torch(recipe, place)
    data = open_data(recipe.data, recipe.evaluation, recipe.seed)
    report = RunReporter(run, is_rank_zero=False)
    with warnings.catch_warnings(action="ignore"):  # the kinds', which a run only prints
        parts = build_context(WorkerProcess(run, Path(folder), place, report), recipe, data)
        trainer = Trainer(parts, TrainState(), {})
        digest: str = make_result(parts, trainer.train_state, trainer.fit())["digest"]
    return digest


def check_export(run: Run, out: Path) -> list[str]:
    """What the export alone builds holds what was trained and computes it; what was said of the export."""
    notes: list[str] = []
    export_huggingface(list_checkpoints(run.checkpoints)[0], out, notes=notes.append)
    with warnings.catch_warnings(action="ignore"):  # the kinds', in this process
        loaded = load_trained_model(run, None, False, torch.device("cpu"))
        config = json.loads((out / "config.json").read_text())
        fresh = import_object(config["build"], loaded.folder)(**config["args"]).eval()
        found, held = fresh.load_state_dict(load_file(out / "model.safetensors"), strict=False), fresh.state_dict()
        assert not found.unexpected_keys
        for name, value in loaded.model.state_dict().items():
            if isinstance(value, Tensor):
                assert value.dtype == held[name].dtype
                assert torch.equal(value, held[name]), name
        for name, module in find_extra_state_modules(loaded.model).items():
            fresh.get_submodule(name).set_extra_state(module.get_extra_state())
        for mine, theirs in zip(computed(loaded.model, loaded), computed(fresh, loaded), strict=True):
            assert torch.equal(mine, theirs)
    return notes


@torch.no_grad()
def computed(model: nn.Module, loaded: TrainedModel) -> list[Tensor]:
    """What a model gives of two samples that the run was trained on."""
    recipe = loaded.recipe
    task = load_task(recipe.task, loaded.folder)
    batch = to_device(open_data(recipe.data, recipe.evaluation, recipe.seed).read_training(0, 2), torch.device("cpu"))
    torch.manual_seed(0)
    args, kwargs = task.inputs(batch)
    output = model(*args, **kwargs)
    if isinstance(output, Tensor):
        return [output]
    return list(output.values() if isinstance(output, dict) else output)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_goes_on_in_the_same_bits_on_any_workers_and_its_export_is_the_model(
    name: str, kinds: TrainHarness, world: ProcessWorlds, tmp_path: Path
) -> None:
    kind, changes, nproc = KINDS[name], {}, 1
    if kind.moves is not None:
        with pytest.raises(
            RecipeError, match=f"determinism: elastic cannot be kept, because forwards of the model change {kind.moves}"
        ):
            train(kinds, kind, 2, {})
        changes, nproc = {"determinism": "fixed-world"}, 2
    killed = train(kinds, kind, nproc, changes, faults=[plan_fault(5)])
    assert killed.result["num_restarts"] == 1
    (tmp_path / "again").mkdir()
    files = {"resolved": str(killed.run.resolved), "folder": str(kinds.folder), "out": str(tmp_path / "again")}
    assert world.run(2, undisturbed, **files) == [killed.digest] * 2
    notes = check_export(killed.run, tmp_path / "out")
    said = "what get_extra_state of ExtraState gives is not in the export, which holds weights"
    assert [note for note in notes if "get_extra_state" in note] == ([said] if name == "ExtraState" else [])


def test_synchronised_batch_norm_is_refused_where_there_are_several_workers_on_cpus(kinds: TrainHarness) -> None:
    with pytest.raises(RecipeError, match=r"SyncBatchNorm \(0.1\) computes over several workers on GPUs only"):
        train(kinds, pictures("synchronised"), 2, {"determinism": "fixed-world"})


def test_a_builder_that_fails_is_named_with_its_own_line(kinds: TrainHarness) -> None:
    with pytest.raises(
        RecipeError, match=r"model.build: model_zoo:broken failed: KeyError: 'depth' \(.*model_zoo.py:\d+"
    ):
        train(kinds, words("broken"), 1, {})
