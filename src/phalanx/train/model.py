"""The model of a recipe: built by import path, with what the data know filled in, from the seed's random numbers."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from phalanx.data import Facts
from phalanx.errors import PhalanxError, RecipeError
from phalanx.recipe import huggingface_directory, import_object, told
from phalanx.recipe.arguments import arguments
from phalanx.recipe.schema import LoraConfig, ModelConfig
from phalanx.train import huggingface
from phalanx.train.adapter import add_adapters
from phalanx.train.memory import is_out_of_memory
from phalanx.train.place import Place, agree, broken_gpu
from phalanx.train.savable import check_model, own_memory, persistent_buffers
from phalanx.train.undrawn import NeededError, Undrawn

OURS = "phalanx.models:"
"""Begins what builds the models that ship: they can be built without memory."""
GIB = 2**30


def seed_for(*parts: object) -> int:
    """A 63-bit seed that is a pure function of its parts."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode()) >> 1


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed the generators that modules draw from: the CPU's and this device's."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also visits every other backend: 100 times slower
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).manual_seed(seed)


class Seeds:
    """Random numbers of a run's forwards: a pure function of seed, step and micro-batch, whoever computes it."""

    def __init__(self, seed: int, device: torch.device):
        self._seed, self._device = seed, device
        self._step = 0
        self._own = range(1 << 62)

    def begin(self, step: int, own: range) -> None:
        """A step begins of which these micro-batches are done here."""
        self._step, self._own = step, own

    def of(self, micro_batch: int) -> None:
        """Seed the forward of this worker's micro-batch with that number in the step."""
        seed_everything(seed_for(self._seed, self._step, self._own[micro_batch]), self._device)

    def of_stage(self, micro_batch: int, stage: int) -> None:
        """The same for one stage of a pipeline, each of which draws its own."""
        seed_everything(seed_for(self._seed, self._step, self._own[micro_batch], stage), self._device)


def known(facts: Facts) -> dict[str, int | None]:
    """What the data tell a model's builder."""
    return {"vocab_size": facts.vocab, "seq_len": facts.sequence, "num_classes": facts.classes}


def described(spec: ModelConfig, facts: Facts, folder: Path | None) -> dict[str, Any]:
    """What builds the same model anywhere: its import path, and all its arguments with those that the data filled in;
    for a Hugging Face directory, what writes one again. It stands in checkpoints, and in the config.json of an export.
    """
    if (directory := huggingface_directory(spec.build, folder)) is not None:
        return {"build": spec.build, "args": spec.args, "huggingface": huggingface.describe(directory, spec.args)}
    builder = import_object(spec.build, folder, key="model.build")
    return {"build": spec.build, "args": arguments(builder, spec.args, known(facts))}


def build_model(
    spec: ModelConfig,
    facts: Facts,
    folder: Path | None,
    seed: int,
    device: torch.device,
    adapter: LoraConfig | None = None,
    *,
    load: bool = True,
    draw: bool = True,
) -> nn.Module:
    """The model with its initial weights, which depend on `seed` only, or with those of a Hugging Face directory; with
    adapters beside its layers if the recipe wants them. Without `load` the parameters of a Hugging Face directory stay
    on the meta device (adapters and buffers on the CPU). Without `draw`, for one that takes over a whole state, random
    parameters may hold anything. RecipeError for what the user can mend."""
    if (directory := huggingface_directory(spec.build, folder)) is not None:
        if load:
            model = huggingface.build_loaded(directory, spec.args, facts, device)
        else:
            model = huggingface.build(directory, spec.args, facts)
    else:
        model = _built(spec, facts, folder, seed, draw)
        if device.type != "cpu":  # `to` replaces imagined parameters (trial.py), which cannot be
            model = model.to(device)
    own_memory(model)
    check_model(model)
    if adapter is not None:
        add_adapters(model, adapter, torch.Generator().manual_seed(seed_for(seed, "adapter")))
    return model


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Seed what builders draw from besides torch: Python's and numpy's random numbers, which go on afterwards where
    they were."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def check_begins_alike(place: Place, model: nn.Module) -> None:
    """RecipeError on all workers unless parameters and persistent buffers of their models have the same values. Every
    worker calls it; what has no values yet is left out."""
    if place.world == 1:
        return
    digest = xxhash.xxh3_64()
    for tensor in (*model.parameters(), *persistent_buffers(model).values()):
        if not tensor.is_meta:
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    cure = "draw it from the random numbers of torch, Python or numpy, which are seeded while a recipe's model is built"
    cure += "; in a loop of your own those of torch, or seed the others in build()"
    agree(place, digest.hexdigest(), "initial state", cure, everywhere=True, error=RecipeError)


def _built(spec: ModelConfig, facts: Facts, folder: Path | None, seed: int, draw: bool) -> nn.Module:
    """The model of an import path, on the CPU."""
    builder = import_object(spec.build, folder, key="model.build")
    filled = arguments(builder, spec.args, known(facts))
    seed_everything(seed_for(seed, "init"), torch.device("cpu"))
    undrawn = None if draw else Undrawn()
    try:
        with _drawing_from(seed_for(seed, "init")), undrawn or nullcontext():
            model = builder(**filled)
    except NeededError:
        return _built(spec, facts, folder, seed, draw=True)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"model.args: {spec.build} refuses them: {error}") from error
    except Exception as error:
        if isinstance(error, PhalanxError) or is_out_of_memory(error) or broken_gpu(error):
            raise
        raise RecipeError(f"model.build: {spec.build} failed: {told(error, folder)}") from error
    if not isinstance(model, nn.Module):
        raise RecipeError(f"model.build: {spec.build} returned {type(model).__name__}, expected an nn.Module")
    if undrawn is not None and not (undrawn.alike and undrawn.only_of(model)):
        return _built(spec, facts, folder, seed, draw=True)
    return model


def check_room(spec: ModelConfig, facts: Facts, folder: Path | None, memory: int) -> None:
    """RecipeError where the parameters of a model of ours, built without memory, are more than `memory` bytes hold."""
    if not spec.build.startswith(OURS):
        return
    with torch.device("meta"):
        model = _built(spec, facts, folder, 0, draw=True)
    if (needed := sum(parameter.nbytes for parameter in model.parameters())) > memory:
        raise RecipeError(
            f"model.args: {spec.build} has {sum(p.numel() for p in model.parameters()):,} parameters with them, "
            f"{needed / GIB:,.0f} GiB, and this machine has {memory / GIB:,.0f} GiB; make it smaller, or plan it for a "
            "cluster with `phalanx plan`"
        )


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the model normalises over the batch, which makes results depend on the micro-batch."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return any(isinstance(module, kinds) for module in model.modules())
