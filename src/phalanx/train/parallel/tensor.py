"""Tensor parallel for any module: matrices cut over a group of ranks by rules `pattern -> style`, hidden states cut
along the sequence between them (Shoeybi et al. 2019; Korthikanti et al. 2022).

The styles are described in `families.py`, where the rules of known models are. A linear layer with the style `columns`
outside of a region is a region of its own. Everything that has no style stays whole on all ranks. Every pattern must
match a module, every layer with parameters inside a region must have a style, and a tied weight must be cut alike in
all its places.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.train.adapter import LEAVE, A, B, has_adapter
from phalanx.train.fp8 import Fp8Linear
from phalanx.train.parallel.collectives import (
    Group,
    copy_to,
    gather,
    gather_alike,
    rank_in,
    scatter_sum,
    size_of,
    split,
    sum_from,
)
from phalanx.train.parallel.cuts import Cut, cut_evenly, rows_of_shard
from phalanx.train.parallel.families import STYLES, matching
from phalanx.train.parallel.overlap import divides, product_scattered
from phalanx.train.parallel.standins import StandIn

KEY = "model.tp_plan"
BY_VOCABULARY = ("vocabulary", "head")
SEQUENCE = 1  # the dimension of the sequence in hidden states [b, s, w]


@dataclass
class Division:
    """What tensor parallel did: the `cuts` of parameters, and the whole ones whose gradient is `partial` on each rank,
    both by name (tied parameters by their first); `vocabulary` is the group over which the head is cut."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    vocabulary: Group = None


def match(model: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """The style of each module that a rule matches. RecipeError for unknown styles, patterns that match nothing, and
    modules that two rules treat differently."""
    modules = dict(model.named_modules())
    found: dict[str, str] = {}
    for pattern, style in rules.items():
        if style not in STYLES:
            raise RecipeError(f"{KEY}.{pattern}: no style {style!r}; expected {', '.join(STYLES)}")
        names = matching(pattern, modules)
        if not names:
            raise RecipeError(f"{KEY}.{pattern}: matches no module; the model's are named {_examples(modules)}")
        for name in names:
            if found.setdefault(name, style) != style:
                raise RecipeError(f"{KEY}.{pattern}: makes {name} {style}, another rule makes it {found[name]}")
    return found


def check_rules(model: nn.Module, rules: Mapping[str, str], size: int) -> dict[str, str]:
    """`match`, and whether the model can be cut so over `size` ranks. RecipeError naming rule and module."""
    styles = match(model, rules)
    modules = dict(model.named_modules())
    for name, style in styles.items():
        for parameter, dim, parts in _cut_dimensions(modules[name], style, name):
            length = parameter.shape[dim]
            if style not in BY_VOCABULARY and length % (parts * size):
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
                f"{KEY}: {name} has parameters and lies in {inside} (region), so it needs a style; "
                "shared keeps it whole"
            )
    _check_ties(model, styles)
    return styles


def cut_model(
    model: nn.Module,
    styles: Mapping[str, str],
    group: Group,
    *,
    blocks: Sequence[str] = (),
    counts: Mapping[str, Sequence[str]] | None = None,
    sequence: bool = False,
    vocabulary: bool = False,
    overlap: bool = False,
) -> Division:
    """Cut the model's parameters in place and make its layers talk over `group`. Done before optimizer and FSDP.

    `styles` are those that `check_rules` found for the whole model; a pipeline stage has only some of its modules.
    `sequence`: hidden states between the first and last of `blocks` are cut along the sequence, whose length must
    divide. `overlap`: so cut, what leaves a region travels in chunks, while others are computed. `vocabulary`: whether
    the loss can be computed over parts of the vocabulary; otherwise embedding and head stay whole. `counts`: attributes
    of modules (by pattern) that count heads or features, which are divided, too.
    """
    division = Division()
    if size_of(group) == 1:
        return division
    sequence = sequence and len(blocks) > 0  # else there is nothing between which it could be cut
    modules = {name: m for name, m in model.named_modules() if not isinstance(m, StandIn)}
    names = {p: name for name, p in model.named_parameters()}
    styles = {name: style for name, style in styles.items() if name in modules and _is_here(modules[name], style)}
    if not vocabulary:
        styles = {name: style for name, style in styles.items() if style not in BY_VOCABULARY}
    elif "head" in styles.values():
        division.vocabulary = group
    done: dict[nn.Parameter, Cut] = {}
    for name, style in styles.items():
        for parameter, dim, parts in _cut_dimensions(modules[name], style, name):
            if parameter not in done:
                done[parameter] = cut = _cut_of(parameter, dim, parts, style, group)
                division.cuts[names[parameter]] = cut
    for parameter, cut in done.items():
        pieces = [parameter.data.narrow(cut.dim, start, end - start) for start, end in cut.ranges]
        parameter.data = torch.cat(pieces, cut.dim).clone(memory_format=torch.contiguous_format)
    for name, style in styles.items():
        in_region = any(styles.get(parent) == "region" for parent in _parents(name))
        _CONNECT[style.partition(":")[0]](modules[name], _Wires(group, sequence, in_region, overlap))
    for pattern, attributes in (counts or {}).items():
        for name in matching(pattern, modules):
            for attribute in attributes:
                setattr(modules[name], attribute, getattr(modules[name], attribute) // size_of(group))
    whole = {names[p] for p in names if p not in done}
    division.partial = {name for name in whole for parent in _parents(name) if styles.get(parent) == "shared"}
    # What an adapter makes of the inputs goes only into this rank's outputs.
    columns = {name for name, style in styles.items() if style.startswith("columns")}
    division.partial |= {name for name in whole if name.endswith(f".{A}") and name.rpartition(".")[0] in columns}
    if sequence:
        _cut_between(modules, blocks, group)
        division.partial |= {name for name in whole if any(name.startswith(f"{block}.") for block in blocks)}
    return division


def _cut_between(modules: Mapping[str, nn.Module], blocks: Sequence[str], group: Group) -> None:
    """Cut the hidden state along the sequence where it enters the first block, and join it after the last."""
    if blocks[0] in modules:
        modules[blocks[0]].register_forward_pre_hook(
            _first_argument(lambda x: split(x, group, SEQUENCE)), with_kwargs=True
        )
    if blocks[-1] in modules:
        modules[blocks[-1]].register_forward_hook(_first_output(lambda x: gather_alike(x, group, SEQUENCE)))


def _is_here(module: nn.Module, style: str) -> bool:
    """Whether a pipeline stage has this module's parameters."""
    return style in ("region", "shared") or isinstance(getattr(module, "weight", None), nn.Parameter)


@dataclass(frozen=True)
class _Wires:
    """How a layer talks: over which group, whether the hidden state is cut along the sequence, whether what enters the
    layer has entered a region already, and whether it talks while it computes."""

    group: Group
    sequence: bool
    in_region: bool
    overlap: bool

    def enter(self, x: Tensor) -> Tensor:
        """From the hidden state into a region."""
        return gather(x, self.group, SEQUENCE) if self.sequence else copy_to(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """From a region's partial results back to the hidden state."""
        return scatter_sum(x, self.group, SEQUENCE) if self.sequence else sum_from(x, self.group)


def _cut_dimensions(module: nn.Module, style: str, name: str) -> list[tuple[nn.Parameter, int, int]]:
    """Which parameters a style cuts along which dimension, and of how many fused parts that is made."""
    kind, _, fused = style.partition(":")
    parts = int(fused or 1)
    if kind in ("region", "shared"):
        return []
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    wanted = nn.Embedding if kind == "vocabulary" else nn.Linear if kind in ("columns", "rows", "head") else nn.Module
    if not isinstance(module, wanted) or not isinstance(weight, nn.Parameter) or weight.dim() != 2:
        expected = wanted.__name__ if wanted is not nn.Module else "Conv1D"
        raise RecipeError(f"{KEY}: {name} is {type(module).__name__}, and {style} is for {expected}")
    dim = {"columns": 0, "rows": 1, "vocabulary": 0, "head": 0, "columns-conv1d": 1, "rows-conv1d": 0}[kind]
    cut = [(weight, dim, parts)]
    rows = kind in ("rows", "rows-conv1d")
    if isinstance(bias, nn.Parameter) and not rows:
        cut.append((bias, 0, parts))
    if has_adapter(module):  # of the two, the one that lies at the side that is cut is cut with it
        cut.append((module.get_parameter(A if rows else B), dim, parts))
    return cut


def _cut_of(parameter: nn.Parameter, dim: int, parts: int, style: str, group: Group) -> Cut:
    rank, size, whole = rank_in(group), size_of(group), parameter.shape[dim]
    if style in BY_VOCABULARY:  # any size of vocabulary will do
        return Cut(dim, (rows_of_shard(whole, rank, size),), whole, "tensor")
    return cut_evenly(dim, whole, rank, size, "tensor", parts)


def _check_ties(model: nn.Module, styles: Mapping[str, str]) -> None:
    """RecipeError when a parameter that several modules share would be cut in one and not in another."""
    seen: dict[nn.Parameter, tuple[str, object]] = {}
    for name, module in model.named_modules():
        cut = {p: (dim, parts) for p, dim, parts in _cut_dimensions(module, styles.get(name, "shared"), name)}
        for parameter in module.parameters(recurse=False):
            place, how = seen.setdefault(parameter, (name, cut.get(parameter)))
            if how != cut.get(parameter):
                raise RecipeError(
                    f"{KEY}: {place} and {name} share a weight (tied), but only one of them would be cut, or each "
                    "differently; give both a style that cuts alike, such as vocabulary and head"
                )


def _connect_region(module: nn.Module, wires: _Wires) -> None:
    module.register_forward_pre_hook(_first_argument(wires.enter), with_kwargs=True)


def _connect_columns(module: nn.Module, wires: _Wires) -> None:
    if not wires.in_region:
        module.register_forward_pre_hook(_first_argument(wires.enter), with_kwargs=True)


def _connect_rows(module: nn.Module, wires: _Wires) -> None:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        if isinstance(self, Fp8Linear):
            out = wires.leave(self.product(x))
        elif wires.overlap and wires.group is not None and divides(x, wires.group):
            out = product_scattered(x, self.weight, wires.group)
        else:
            out = wires.leave(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias  # once, not once a rank

    vars(module).update({"forward": MethodType(forward, module), LEAVE: wires.leave})


def _connect_rows_conv1d(module: nn.Module, wires: _Wires) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = wires.leave(x @ self.weight) + self.bias
        return out

    vars(module).update({"forward": MethodType(forward, module), LEAVE: wires.leave})


def _connect_conv1d(module: nn.Module, wires: _Wires) -> None:
    _connect_columns(module, wires)

    def forward(self: Any, x: Tensor) -> Tensor:  # its own forward goes by the features of the whole
        out: Tensor = x @ self.weight + self.bias
        return out

    vars(module)["forward"] = MethodType(forward, module)


def _connect_vocabulary(module: nn.Module, wires: _Wires) -> None:
    assert isinstance(module, nn.Embedding)
    start, _ = rows_of_shard(module.num_embeddings, rank_in(wires.group), size_of(wires.group))

    def forward(self: nn.Embedding, tokens: Tensor) -> Tensor:
        local = tokens - start
        outside = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(outside, 0), self.weight).masked_fill(outside.unsqueeze(-1), 0.0)
        return sum_from(rows, wires.group)

    vars(module)["forward"] = MethodType(forward, module)


def _connect_nothing(module: nn.Module, wires: _Wires) -> None:
    """`shared` computes as before; `head` is left out of the forward, and the loss takes its weight."""


_CONNECT: dict[str, Callable[[nn.Module, _Wires], None]] = {
    "region": _connect_region,
    "columns": _connect_columns,
    "rows": _connect_rows,
    "columns-conv1d": _connect_conv1d,
    "rows-conv1d": _connect_rows_conv1d,
    "vocabulary": _connect_vocabulary,
    "head": _connect_nothing,
    "shared": _connect_nothing,
}


def _first_argument(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A forward pre-hook that changes the first floating-point tensor among the arguments."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for i, value in enumerate(args):
            if isinstance(value, Tensor) and value.is_floating_point():
                return (*args[:i], change(value), *args[i + 1 :]), kwargs
        for key, value in kwargs.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                return args, {**kwargs, key: change(value)}
        raise RecipeError(f"{KEY}: a {type(module).__name__} with a style was called without a floating-point tensor")

    return hook


def _first_output(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A forward hook that changes the output, or the first of several."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return change(output) if isinstance(output, Tensor) else (change(output[0]), *output[1:])

    return hook


def _parents(name: str) -> list[str]:
    """Dotted names above and including `name`."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def _examples(modules: Mapping[str, nn.Module]) -> str:
    names = [name for name, module in modules.items() if any(True for _ in module.parameters(recurse=False))]
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
