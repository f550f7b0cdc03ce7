"""Tensor parallelism for any module: shard matrices over a group of ranks by rules `pattern -> style`, and hidden
states along the sequence in between (Shoeybi et al. 2019; Korthikanti et al. 2022).

`tp_plans.py` describes the styles and has the rules of known models. A linear layer with style `columns` outside of a
region is a region of its own. Modules without a style are replicated. Every pattern must match a module, every layer
with parameters inside a region must have a style, and a tied weight must be sharded in the same way wherever it is
used.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.train.adapters.lora import LEAVE_REGION_ATTR
from phalanx.train.adapters.targets import LORA_A_NAME, LORA_B_NAME, has_adapter
from phalanx.train.distributed.async_tp import can_chunk, linear_reduce_scatter
from phalanx.train.distributed.shard_spec import DimShard, fsdp_row_range, shard_evenly
from phalanx.train.distributed.stubs import ModuleStub
from phalanx.train.distributed.tp_plans import TP_STYLES
from phalanx.train.ops.blocks import find_matching
from phalanx.train.ops.collectives import (
    Group,
    copy_to_group,
    gather_from_group,
    gather_replicated,
    group_rank,
    group_size,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
)
from phalanx.train.ops.float8 import Float8Linear
from phalanx.train.ops.random_draws import enter_columns, leave_columns, leave_rows

TP_PLAN_KEY = "model.tp_plan"
VOCAB_STYLES = ("vocabulary", "head")
SEQUENCE_DIM = 1  # in hidden states [b, s, w]


@dataclass
class TensorParallelResult:
    """The result of tensor parallelism: `dim_shards` of parameters, and `partial_grads`, the replicated parameters with
    partial gradients on each rank, by name (tied parameters by their first); `vocabulary` is the group over which the
    head is sharded."""

    dim_shards: dict[str, DimShard] = field(default_factory=dict)
    partial_grads: set[str] = field(default_factory=set)
    vocab_group: Group = None


def resolve_styles(model: nn.Module, styles_by_pattern: Mapping[str, str]) -> dict[str, str]:
    """Return the style of each module that a rule matches. Raises RecipeError for unknown styles, patterns that match
    nothing, and modules that two rules treat differently."""
    modules = dict(model.named_modules())
    found: dict[str, str] = {}
    for pattern, style in styles_by_pattern.items():
        if style not in TP_STYLES:
            raise RecipeError(f"{TP_PLAN_KEY}.{pattern}: no style {style!r}; expected {', '.join(TP_STYLES)}")
        names = find_matching(pattern, modules)
        if not names:
            named = [name for name, module in modules.items() if any(True for _ in module.parameters(recurse=False))]
            examples = ", ".join(named[:4]) + (", ..." if len(named) > 4 else "")
            raise RecipeError(f"{TP_PLAN_KEY}.{pattern}: matches no module; the model's are named {examples}")
        for name in names:
            if found.setdefault(name, style) != style:
                raise RecipeError(f"{TP_PLAN_KEY}.{pattern}: makes {name} {style}, another rule makes it {found[name]}")
    return found


def check_tp_plan(model: nn.Module, styles_by_pattern: Mapping[str, str], size: int) -> dict[str, str]:
    """`resolve_styles`, and check that `size` ranks can shard the model. Raises RecipeError naming rule and module."""
    styles = resolve_styles(model, styles_by_pattern)
    modules = dict(model.named_modules())
    for name, style in styles.items():
        for parameter, dim, parts in _sharded_dims(modules[name], style, name):
            length = parameter.shape[dim]
            if style not in VOCAB_STYLES and length % (parts * size):
                features = f"{length} features" + (f" ({parts} x {length // parts})" if parts > 1 else "")
                raise RecipeError(
                    f"parallelism.tensor: {name} ({style}) has {features}, which {size} ranks cannot share"
                )
    regions = [name for name, style in styles.items() if style == "region"]
    for name, module in modules.items():
        bare = any(True for _ in module.parameters(recurse=False)) and name not in styles
        inside = next((region for region in regions if name.startswith(f"{region}.")), None)
        if bare and inside is not None:
            raise RecipeError(
                f"{TP_PLAN_KEY}: {name} has parameters and lies in {inside} (region), so it needs a style; "
                "shared keeps it whole"
            )
    _check_tied_styles(model, styles)
    return styles


def apply_tensor_parallel(
    model: nn.Module,
    styles: Mapping[str, str],
    group: Group,
    *,
    blocks: Sequence[str] = (),
    divided_attributes: Mapping[str, Sequence[str]] | None = None,
    sequence_parallel: bool = False,
    vocab_parallel_loss: bool = False,
    async_tp: bool = False,
) -> TensorParallelResult:
    """Shard the model's parameters in place and make its layers communicate over `group`. Call it before FSDP and
    before the optimizer is built.

    `styles` is the result of `check_tp_plan` for the whole model; a pipeline stage has only some of its modules.
    `sequence_parallel`: hidden states between the first and last of `blocks` are sharded along the sequence; its length
    must divide. `async_tp`: with that, the matmul that leaves a region overlaps with its communication.
    `vocab_parallel_loss`: whether the loss can be computed over shards of the vocabulary; otherwise embedding and head
    are replicated. `divided_attributes`: attributes of modules (by pattern) that count heads or features, and are
    divided too.
    """
    result = TensorParallelResult()
    if group_size(group) == 1:
        return result
    sequence_parallel = sequence_parallel and len(blocks) > 0  # without blocks there is nothing to shard in between
    modules = {name: m for name, m in model.named_modules() if not isinstance(m, ModuleStub)}
    names = {p: name for name, p in model.named_parameters()}
    styles = {  # a pipeline stage has the parameters of some modules only
        name: style
        for name, style in styles.items()
        if name in modules
        and (style in ("region", "shared") or isinstance(getattr(modules[name], "weight", None), nn.Parameter))
    }
    if not vocab_parallel_loss:
        styles = {name: style for name, style in styles.items() if style not in VOCAB_STYLES}
    elif "head" in styles.values():
        result.vocab_group = group
    dim_shards: dict[nn.Parameter, DimShard] = {}
    for name, style in styles.items():
        for parameter, dim, parts in _sharded_dims(modules[name], style, name):
            if parameter not in dim_shards:
                dim_shards[parameter] = dim_shard = _make_dim_shard(parameter, dim, parts, style, group)
                result.dim_shards[names[parameter]] = dim_shard
    for parameter, dim_shard in dim_shards.items():
        pieces = [parameter.data.narrow(dim_shard.dim, start, end - start) for start, end in dim_shard.ranges]
        parameter.data = torch.cat(pieces, dim_shard.dim).clone(memory_format=torch.contiguous_format)
    for name, style in styles.items():
        in_region = any(styles.get(parent) == "region" for parent in _name_and_parents(name))
        kind, _, fused = style.partition(":")
        _APPLY_STYLE[kind](modules[name], _TPComm(group, sequence_parallel, in_region, async_tp))
        if kind.startswith("columns"):
            modules[name].register_forward_pre_hook(lambda *_: enter_columns())
            modules[name].register_forward_hook(partial(_note_cut_features, int(fused or 1)))
        elif kind.startswith("rows"):
            modules[name].register_forward_hook(lambda *_: leave_rows())
    for pattern, attributes in (divided_attributes or {}).items():
        for name in find_matching(pattern, modules):
            for attribute in attributes:
                setattr(modules[name], attribute, getattr(modules[name], attribute) // group_size(group))
    whole = {names[p] for p in names if p not in dim_shards}
    result.partial_grads = {
        name for name in whole for parent in _name_and_parents(name) if styles.get(parent) == "shared"
    }
    # What an adapter computes from the inputs only enters this rank's outputs.
    columns = {name for name, style in styles.items() if style.startswith("columns")}
    result.partial_grads |= {
        name for name in whole if name.endswith(f".{LORA_A_NAME}") and name.rpartition(".")[0] in columns
    }
    if sequence_parallel:
        _shard_sequence_between(modules, blocks, group)
        result.partial_grads |= {name for name in whole if any(name.startswith(f"{block}.") for block in blocks)}
    return result


def _shard_sequence_between(modules: Mapping[str, nn.Module], blocks: Sequence[str], group: Group) -> None:
    """Shard the hidden state along the sequence where it enters the first block, and gather it after the last."""
    if blocks[0] in modules:
        modules[blocks[0]].register_forward_pre_hook(
            _transform_first_argument(lambda x: scatter_to_group(x, group, SEQUENCE_DIM)), with_kwargs=True
        )
    if blocks[-1] in modules:
        modules[blocks[-1]].register_forward_hook(
            _transform_first_output(lambda x: gather_replicated(x, group, SEQUENCE_DIM))
        )


@dataclass(frozen=True)
class _TPComm:
    """Communication of a layer: the group, whether hidden states are sharded along the sequence, whether the input has
    entered a region already, and whether communication overlaps with the matmul."""

    group: Group
    sequence_parallel: bool
    in_region: bool
    async_tp: bool

    def enter_region(self, x: Tensor) -> Tensor:
        """Turn a hidden state into the input of a region."""
        if self.sequence_parallel:
            return gather_from_group(x, self.group, SEQUENCE_DIM)
        return copy_to_group(x, self.group)

    def leave_region(self, x: Tensor) -> Tensor:
        """Turn partial results of a region into the hidden state."""
        if self.sequence_parallel:
            return reduce_scatter_to_group(x, self.group, SEQUENCE_DIM)
        return reduce_from_group(x, self.group)


def _sharded_dims(module: nn.Module, style: str, name: str) -> list[tuple[nn.Parameter, int, int]]:
    """Return the parameters that a style shards, the dimension of each, and the number of fused parts in it."""
    kind, _, fused = style.partition(":")
    parts = int(fused or 1)
    if kind in ("region", "shared"):
        return []
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    expected_type = (
        nn.Embedding if kind == "vocabulary" else nn.Linear if kind in ("columns", "rows", "head") else nn.Module
    )
    if not isinstance(module, expected_type) or not isinstance(weight, nn.Parameter) or weight.dim() != 2:
        expected = expected_type.__name__ if expected_type is not nn.Module else "Conv1D"
        raise RecipeError(f"{TP_PLAN_KEY}: {name} is {type(module).__name__}, and {style} is for {expected}")
    dim = {"columns": 0, "rows": 1, "vocabulary": 0, "head": 0, "columns-conv1d": 1, "rows-conv1d": 0}[kind]
    sharded = [(weight, dim, parts)]
    rows = kind in ("rows", "rows-conv1d")
    if isinstance(bias, nn.Parameter) and not rows:
        sharded.append((bias, 0, parts))
    if has_adapter(module) and kind == "vocabulary":
        raise RecipeError(
            f"parallelism.tensor: cuts the embedding {name}, which has an adapter; leave it out of "
            "adapter.target_modules, or use parallelism.shard"
        )
    if has_adapter(module):  # of the two LoRA matrices, the one on the sharded side is sharded too
        sharded.append((module.get_parameter(LORA_A_NAME if rows else LORA_B_NAME), dim, parts))
    return sharded


def _make_dim_shard(parameter: nn.Parameter, dim: int, parts: int, style: str, group: Group) -> DimShard:
    rank, size, full_size = group_rank(group), group_size(group), parameter.shape[dim]
    if style in VOCAB_STYLES:  # any vocabulary size is allowed
        return DimShard(dim, (fsdp_row_range(full_size, rank, size),), full_size, "tensor")
    return shard_evenly(dim, full_size, rank, size, "tensor", parts)


def _check_tied_styles(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Raise RecipeError if a parameter that several modules share would be sharded differently in them."""
    seen: dict[nn.Parameter, tuple[str, object]] = {}
    for name, module in model.named_modules():
        sharded = {p: (dim, parts) for p, dim, parts in _sharded_dims(module, styles.get(name, "shared"), name)}
        for parameter in module.parameters(recurse=False):
            first_name, sharding = seen.setdefault(parameter, (name, sharded.get(parameter)))
            if sharding != sharded.get(parameter):
                raise RecipeError(
                    f"{TP_PLAN_KEY}: {first_name} and {name} share a weight (tied), but only one of them would be cut, "
                    "or each differently; give both a style that cuts the same dimension, such as vocabulary and head"
                )


def _apply_region(module: nn.Module, comm: _TPComm) -> None:
    module.register_forward_pre_hook(_transform_first_argument(comm.enter_region), with_kwargs=True)


def _apply_colwise(module: nn.Module, comm: _TPComm) -> None:
    if not comm.in_region:
        module.register_forward_pre_hook(_transform_first_argument(comm.enter_region), with_kwargs=True)


def _apply_rowwise(module: nn.Module, comm: _TPComm, has_inputs_first: bool = False) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if has_inputs_first:
            out = comm.leave_region(x @ self.weight)
        elif isinstance(self, Float8Linear):
            out = comm.leave_region(self.matmul(x))
        elif comm.async_tp and comm.group is not None and can_chunk(x, comm.group):
            out = linear_reduce_scatter(x, self.weight, comm.group)
        else:
            out = comm.leave_region(F.linear(x, self.weight))
        # The bias is added to the sum of all ranks' products: once, and in their format, as a whole layer does under
        # autocast.
        return out if self.bias is None else out + self.bias.to(out.dtype)

    vars(module).update({"forward": MethodType(forward, module), LEAVE_REGION_ATTR: comm.leave_region})


def _apply_colwise_conv1d(module: nn.Module, comm: _TPComm) -> None:
    _apply_colwise(module, comm)

    def forward(self: Any, x: Tensor) -> Tensor:  # the original forward uses the unsharded number of features
        return F.linear(x, self.weight.t(), self.bias)

    vars(module)["forward"] = MethodType(forward, module)


def _apply_vocab_embedding(module: nn.Module, comm: _TPComm) -> None:
    assert isinstance(module, nn.Embedding)
    start, _ = fsdp_row_range(module.num_embeddings, group_rank(comm.group), group_size(comm.group))

    def forward(self: nn.Embedding, tokens: Tensor) -> Tensor:
        local = tokens - start
        outside = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(outside, 0), self.weight).masked_fill(outside.unsqueeze(-1), 0.0)
        return reduce_from_group(rows, comm.group)

    vars(module)["forward"] = MethodType(forward, module)


def _apply_nothing(module: nn.Module, comm: _TPComm) -> None:
    """Do nothing: `shared` computes as before; `head` is not called, because the loss uses its weight."""


_APPLY_STYLE: dict[str, Callable[[nn.Module, _TPComm], None]] = {
    "region": _apply_region,
    "columns": _apply_colwise,
    "rows": _apply_rowwise,
    "columns-conv1d": _apply_colwise_conv1d,
    "rows-conv1d": partial(_apply_rowwise, has_inputs_first=True),
    "vocabulary": _apply_vocab_embedding,
    "head": _apply_nothing,
    "shared": _apply_nothing,
}


def _transform_first_argument(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return a forward pre-hook that changes the first floating-point tensor among the arguments."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for i, value in enumerate(args):
            if isinstance(value, Tensor) and value.is_floating_point():
                return (*args[:i], change(value), *args[i + 1 :]), kwargs
        for key, value in kwargs.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                return args, {**kwargs, key: change(value)}
        raise RecipeError(
            f"{TP_PLAN_KEY}: a {type(module).__name__} with a style was called without a floating-point tensor"
        )

    return hook


def _transform_first_output(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return a forward hook that changes the output, or the first of several."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return change(output) if isinstance(output, Tensor) else (change(output[0]), *output[1:])

    return hook


def _note_cut_features(parts: int, module: nn.Module, args: Any, output: Tensor) -> None:
    """Forward hook of a layer with outputs cut into parts of `parts` fused matrices."""
    leave_columns(output.shape[-1], parts)


def _name_and_parents(name: str) -> list[str]:
    """Return the dotted names above and including `name`."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
