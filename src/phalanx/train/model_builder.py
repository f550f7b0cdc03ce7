"""Build the model of a recipe: by import path, with arguments that the data provide, and seeded initialization.

A model that is restored anyway is built without random weights (`SkipInit`): initializing them takes longer than
reading a checkpoint. This is only valid if random numbers go to the model's parameters and nowhere else. A builder must
be run again with initialization if it reads values that were skipped, for a mask or a buffer that no checkpoint holds;
if it draws other random numbers, since they would differ; or if it keeps a module in a plain list, since its parameters
are not the model's.
"""

import math
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

from phalanx.data import DataInfo
from phalanx.errors import PhalanxError, RecipeError
from phalanx.formatting import BYTES_PER_GIB
from phalanx.pytree import iterate_tensors
from phalanx.recipe import describe_exception, import_object
from phalanx.recipe.imports import describe_message, fill_arguments
from phalanx.recipe.locations import huggingface_directory
from phalanx.recipe.schema import AdapterConfig, ModelConfig
from phalanx.train.adapters.lora import add_adapters
from phalanx.train.checkpoint.compressed_tensors import make_int4_aware
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.failures import is_gpu_failure, is_out_of_memory
from phalanx.train.distributed.module_state import check_model_can_be_saved, get_persistent_buffers
from phalanx.train.distributed.object_collectives import assert_same_on_all_ranks
from phalanx.train.hf import model as hf_model
from phalanx.train.hf.inputs import install_input_adapter, is_transformers_model
from phalanx.train.hf.safetensors_reader import open_weight_reader
from phalanx.train.ops.random_draws import derive_seed, seed_everything

BUILT_IN_PREFIX = "phalanx.models:"
"""Prefix of built-in models, which can be built without memory for parameters."""


def model_facts(facts: DataInfo) -> dict[str, int | None]:
    """Return the arguments that the data provide to a model's builder."""
    return {"vocab_size": facts.vocab_size, "seq_len": facts.seq_len, "num_classes": facts.num_classes}


def describe_model(spec: ModelConfig, facts: DataInfo, folder: Path | None) -> dict[str, Any]:
    """Return what is needed to build the same model anywhere: the import path and all arguments, including those that
    the data provide; for a Hugging Face directory, what an export needs. Saved in checkpoints and in an export's
    config.json.
    """
    if (directory := huggingface_directory(spec.build, folder)) is not None:
        origin = hf_model.describe_for_export(directory, spec.args, facts)
        return {"build": spec.build, "args": spec.args, "huggingface": origin}
    builder = import_object(spec.build, folder, key="model.build")
    return {"build": spec.build, "args": fill_arguments(builder, spec.args, model_facts(facts))}


def build_model(
    spec: ModelConfig,
    facts: DataInfo,
    folder: Path | None,
    seed: int,
    device: torch.device,
    adapter: AdapterConfig | None = None,
    *,
    load: bool = True,
    init_weights: bool = True,
) -> nn.Module:
    """Build the model with its initial weights: random ones, which depend on `seed` only, or those of a Hugging Face
    directory; with adapters if the recipe has them. Without `load`, the parameters of a Hugging Face directory
    stay on the meta device (adapters and buffers are on the CPU). Without `init_weights`, if a whole state is restored
    later, random parameters may stay uninitialized. The many parameters replace a recipe: a model is also built without
    one. Raises RecipeError for errors that the user can fix."""
    if (directory := huggingface_directory(spec.build, folder)) is not None:
        if load:
            model = hf_model.build_with_weights(directory, spec.args, facts, device, derive_seed(seed, "init"))
        else:
            model = hf_model.build_on_meta(directory, spec.args, facts)
    else:
        model = _build_from_import_path(spec, facts, folder, seed, init_weights)
        if device.type != "cpu":  # `to` would replace fake parameters (autoconfig/profile_trial.py)
            model = model.to(device)
    check_model_can_be_saved(model)
    if not load:
        hf_model.init_new_head(model, derive_seed(seed, "init"))
    if adapter is not None:
        add_adapters(model, adapter, torch.Generator().manual_seed(derive_seed(seed, "adapter")))
        _check_head_is_trained(model)
    if spec.quantization_aware is not None and directory is not None:
        make_int4_aware(model, getattr(torch, open_weight_reader(directory).find_main_dtype()))
    if spec.embedding_noise is not None:
        _add_embedding_noise(model, spec.embedding_noise, facts.seq_len)
    return model


def _check_head_is_trained(model: nn.Module) -> None:
    """Raise RecipeError if a head that may be new stays as it begins."""
    parameters = dict(model.named_parameters())
    for name in sorted(hf_model.find_new_head(model) or ()):
        head = name.rpartition(".")[0]
        if "pooler" not in name and name in parameters and not parameters[name].requires_grad:
            raise RecipeError(
                f"adapter.modules_to_save: {head} may be new, and is not trained; name it: modules_to_save: [{head}]"
            )


def _add_embedding_noise(model: nn.Module, alpha: float, length: int | None) -> None:
    """Add uniform noise to the input embeddings in training (NEFTune, Jain et al. 2023), by a hook. Raises RecipeError
    if the model has none, or the data no sequences."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if is_transformers_model(model):
        embeddings = [model.get_input_embeddings(), *embeddings]  # type: ignore[operator]
    if not embeddings or length is None:
        raise RecipeError("model.embedding_noise: is for models of text with an nn.Embedding; leave it out")
    # Of the whole sequence, also where ranks hold parts of it.
    limit = alpha / math.sqrt(length * embeddings[0].embedding_dim)

    def add_noise(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output + limit * (2 * torch.rand_like(output) - 1) if module.training else output

    embeddings[0].register_forward_hook(add_noise)


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Seed Python's and numpy's random numbers, which builders may use besides torch's, and restore their states
    afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def check_same_initial_values(place: DistEnv, model: nn.Module) -> None:
    """Raise RecipeError on all workers unless parameters and persistent buffers have the same values on each. Every
    worker calls it. Tensors without values yet are left out."""
    if place.world_size == 1:
        return
    digest = xxhash.xxh3_64()
    for tensor in (*model.parameters(), *get_persistent_buffers(model).values()):
        if not tensor.is_meta:
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    cure = "draw it from the random numbers of torch, Python or numpy, which are seeded while a recipe's model is built"
    cure += "; in a loop of your own those of torch, or seed the others in build()"
    assert_same_on_all_ranks(place, digest.hexdigest(), "initial state", cure, also_single_node=True, error=RecipeError)


def _build_from_import_path(
    spec: ModelConfig, facts: DataInfo, folder: Path | None, seed: int, init_weights: bool
) -> nn.Module:
    """Build the model of an import path, on the CPU."""
    builder = import_object(spec.build, folder, key="model.build")
    filled = fill_arguments(builder, spec.args, model_facts(facts))
    seed_everything(derive_seed(seed, "init"), torch.device("cpu"))
    skip_init = None if init_weights else SkipInit()
    try:
        with _drawing_from(derive_seed(seed, "init")), skip_init or nullcontext():
            model = builder(**filled)
    except InitValueNeeded:
        return _build_from_import_path(spec, facts, folder, seed, init_weights=True)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"model.args: {spec.build} refuses them: {describe_message(error)}") from error
    except Exception as error:
        if isinstance(error, PhalanxError) or is_out_of_memory(error) or is_gpu_failure(error):
            raise
        raise RecipeError(f"model.build: {spec.build} failed: {describe_exception(error, folder)}") from error
    if not isinstance(model, nn.Module):
        raise RecipeError(f"model.build: {spec.build} returned {type(model).__name__}, expected an nn.Module")
    if is_transformers_model(model):
        install_input_adapter(model)
    if skip_init is not None and not (skip_init.only_parameters_differ and skip_init.only_of(model)):
        return _build_from_import_path(spec, facts, folder, seed, init_weights=True)
    return model


def check_model_fits_memory(spec: ModelConfig, facts: DataInfo, folder: Path | None, memory: int) -> None:
    """Raise RecipeError if the parameters of a built-in model, built without memory, need more than `memory` bytes."""
    if not spec.build.startswith(BUILT_IN_PREFIX):
        return
    with torch.device("meta"):
        model = _build_from_import_path(spec, facts, folder, 0, init_weights=True)
    if (needed := sum(parameter.nbytes for parameter in model.parameters())) > memory:
        raise RecipeError(
            f"model.args: {spec.build} has {sum(p.numel() for p in model.parameters()):,} parameters with them, "
            f"{needed / BYTES_PER_GIB:,.0f} GiB, and this machine has {memory / BYTES_PER_GIB:,.0f} GiB; make it "
            "smaller, or plan it for a cluster with `phalanx plan`"
        )


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether the model normalizes over the batch, so that results depend on the micro-batch size."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return any(isinstance(module, kinds) for module in model.modules())


_PLAIN_DISTRIBUTIONS = ("normal_", "uniform_", "trunc_normal_")
_SCALED_DISTRIBUTIONS = ("xavier_normal_", "xavier_uniform_", "kaiming_normal_", "kaiming_uniform_")
INIT_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    (
        Tensor.normal_,
        Tensor.uniform_,
        *(getattr(init, name) for name in (*_PLAIN_DISTRIBUTIONS, *_SCALED_DISTRIBUTIONS)),
    )
)
"""Functions that only fill a tensor with random numbers and return it."""
_RANDOM_NAMES = ("randn", "rand", "normal", "randint", "randperm", "randn_like", "rand_like")
RANDOM_FUNCTIONS = INIT_FUNCTIONS | {getattr(torch, name) for name in _RANDOM_NAMES}
"""Other common functions that draw random numbers; the generator's state shows at the end whether there were more."""
_PLAIN_ATTRIBUTES = {"shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn"}
METADATA_ATTRIBUTES = _PLAIN_ATTRIBUTES | {"size", "dim", "numel", "stride", "__hash__"}
"""Methods and attributes that do not depend on a tensor's values."""


class InitValueNeeded(BaseException):
    """A builder reads skipped values, or draws numbers that may be needed. A BaseException, to not be caught."""


class SkipInit(TorchFunctionMode):
    """While this mode is active, no random numbers are drawn into parameters, which keep uninitialized memory. Raises
    InitValueNeeded as soon as this is known to be invalid."""

    def __init__(self) -> None:
        super().__init__()
        self._rng_state_before = torch.default_generator.get_state()
        self._uninitialized: dict[int, nn.Parameter] = {}  # by address; referenced, so that addresses stay unique
        self._value_needed = False

    @property
    def only_parameters_differ(self) -> bool:
        """Whether everything but parameters is as with initialization."""
        return not self._value_needed and torch.default_generator.get_state().equal(self._rng_state_before)

    def only_of(self, model: nn.Module) -> bool:
        """Return whether all uninitialized tensors that still exist are parameters of the model. No checkpoint holds
        others, such as those of a frozen model in a list."""
        undrawn = [weakref.ref(parameter) for parameter in self._uninitialized.values()]
        self._uninitialized.clear()
        held = {_storage_address(parameter) for parameter in model.parameters()}
        there = [parameter for reference in undrawn if (parameter := reference()) is not None]
        return all(_storage_address(parameter) in held for parameter in there)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("tensor")
        if function in INIT_FUNCTIONS and isinstance(first, nn.Parameter):
            self._uninitialized[_storage_address(first)] = first
            return first
        if function in RANDOM_FUNCTIONS:
            self._fail()
        tensors = iterate_tensors((args, kwargs))
        touched = [tensor for tensor in tensors if _storage_address(tensor) in self._uninitialized]
        result = function(*args, **kwargs)
        is_in_place = result is first and all(tensor is first for tensor in touched)
        if touched and not is_in_place and _attribute_name(function) not in METADATA_ATTRIBUTES:
            self._fail()
        return result

    def _fail(self) -> NoReturn:
        self._value_needed = True
        raise InitValueNeeded


def _attribute_name(function: Any) -> str:
    """Return the name of a method, or of the attribute that a getter or setter belongs to."""
    name: str = getattr(function, "__name__", "")
    return getattr(function.__self__, "__name__", "") if name in ("__get__", "__set__") else name


def _storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; -1 if it is not plain memory on this host."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu else -1
