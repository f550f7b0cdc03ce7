"""Divide a model over the workers of a layout, in the one order that is right:

    tensor -> expert -> fp8 -> cast once -> recompute -> compile -> shard, and the optimizer is built last.

Tensor and expert parallel change what parameters are, and with it which products are large enough for fp8;
recomputation must wrap what they made, or it would not repeat their communication; a compiled block must contain all
of them; FSDP shards what is left; and an optimizer that was built before would update tensors that no longer belong to
the model, silently. (docs/how-to/parallelism.md tells the reasons at length.)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from phalanx.errors import RecipeError
from phalanx.recipe.schema import Parallelism
from phalanx.train.cast_once import cast_once, linear_in
from phalanx.train.parallel.blocks import find_blocks
from phalanx.train.parallel.collectives import Group
from phalanx.train.parallel.compiled import Compile, compile_blocks
from phalanx.train.parallel.context import check_model
from phalanx.train.parallel.cuts import Cut
from phalanx.train.parallel.divided import Divided
from phalanx.train.parallel.expert import check_experts, experts_in, split_experts
from phalanx.train.parallel.families import divisible, family_of
from phalanx.train.parallel.mesh import Mesh
from phalanx.train.parallel.overlap import CHUNKS
from phalanx.train.parallel.recompute import Recompute, apply_recompute
from phalanx.train.parallel.shard import check_groups, check_hooks, check_ties, shard_model
from phalanx.train.parallel.standins import StandIn
from phalanx.train.parallel.tensor import check_rules, cut_model
from phalanx.train.precision import AUTOCAST


@dataclass(frozen=True)
class Choices:
    """How the parts of a model are to be computed: what the recipe says besides the layout. `sequence` is the length
    of the sequences, where there are any; `vocabulary` whether the loss can be computed over parts of the vocabulary.
    `fp8`, given a model and the names of its blocks, has linear layers in them computed in fp8, and returns which.
    `cast_once`: linear layers in blocks, and the `output` layer, keep their weights in autocast's dtype for a step.
    """

    precision: str = "fp32"
    recompute: Recompute = "none"
    compile: Compile = False
    rules: Mapping[str, str] | None = None
    sequence: int | None = None
    vocabulary: bool = False
    fp8: Callable[[nn.Module, Iterable[str]], list[str]] | None = None
    cast_once: bool = False
    output: str | None = None


@dataclass(frozen=True)
class Outline:
    """What was found in a whole model before any of it is divided: its `blocks` in order, the tensor-parallel `styles`
    of its modules, attributes that `counts` heads, and whether hidden states are cut along the `sequence`."""

    blocks: tuple[str, ...]
    styles: Mapping[str, str]
    counts: Mapping[str, Sequence[str]]
    sequence: bool


def outline(model: nn.Module, layout: Parallelism, choices: Choices) -> Outline:
    """Look at a whole model's names and shapes. RecipeError, naming the rule, when it cannot be divided so."""
    places = {name: place for place, (name, _) in enumerate(model.named_modules())}
    blocks = tuple(sorted(find_blocks(model), key=places.__getitem__))
    styles: Mapping[str, str] = {}
    counts: Mapping[str, Sequence[str]] = {}
    if layout.tensor > 1:
        family = family_of(model)
        styles = check_rules(model, _rules(model, layout.tensor, choices), layout.tensor)
        counts = family.divided if family is not None and not choices.rules else {}
    if layout.expert > 1:
        check_experts(model, layout.expert)
    if layout.context > 1:
        if choices.sequence is None:
            raise RecipeError("parallelism.context: is for models of sequences, and these data have none")
        check_model(model, choices.sequence)
    if layout.shard * layout.context * layout.pipeline * layout.expert > 1:
        check_hooks(model)
    if layout.shard * layout.context > 1:
        modules = [model.get_submodule(name) for name in blocks]
        check_ties(model, modules)
        check_groups(model, modules, rest=layout.pipeline == 1)
    length = None if choices.sequence is None else choices.sequence // layout.context
    if layout.async_tp and (length is None or length % (layout.tensor * CHUNKS)):
        raise RecipeError(
            f"parallelism.async_tp: needs sequences that {layout.tensor} ranks can share in {CHUNKS} chunks each; "
            f"a rank's have {length} positions"
        )
    return Outline(blocks, styles, counts, length is not None and length % layout.tensor == 0)


def divide(model: nn.Module, root: nn.Module, mesh: Mesh, choices: Choices) -> tuple[Divided, Group]:
    """Divide `model`, which `root` contains, in place; the group over which its vocabulary is cut comes with it.
    RecipeError when it does not fit the layout."""
    cuts, partial, vocabulary = divide_part(model, root, mesh, choices, outline(model, mesh.layout, choices))
    return Divided(mesh, (model,), cuts, partial, root=None if mesh.fsdp is None else root), vocabulary


def divide_part(
    model: nn.Module, root: nn.Module, mesh: Mesh, choices: Choices, found: Outline
) -> tuple[dict[str, tuple[Cut, ...]], frozenset[str], Group]:
    """Divide a model or one pipeline stage of it, in place: cuts of parameters, those whose gradient is partial on each
    tensor rank, and the group over which its vocabulary is cut."""
    tensor = cut_model(
        model,
        found.styles,
        mesh.tensor,
        blocks=found.blocks,
        counts=found.counts,
        sequence=found.sequence,
        vocabulary=choices.vocabulary,
        overlap=mesh.layout.async_tp,
    )
    cuts: dict[str, tuple[Cut, ...]] = {name: (cut,) for name, cut in tensor.cuts.items()}
    modules = {name: module for name, module in model.named_modules() if not isinstance(module, StandIn)}
    blocks = [name for name in found.blocks if name in modules]
    if mesh.expert is not None and experts_in(model):  # a pipeline stage may have none
        for name, cut in split_experts(model, mesh.expert).items():
            cuts[name] = (*cuts.get(name, ()), cut)
    if choices.fp8 is not None:
        choices.fp8(model, blocks)
    if choices.cast_once and mesh.only_replicates:
        cast_once(model, [*linear_in(model, blocks), *filter(None, [choices.output])], AUTOCAST[choices.precision])
    apply_recompute(model, blocks, choices.recompute)
    if choices.compile:
        compile_blocks(model, [modules[name] for name in blocks], graphs=choices.compile == "cuda-graphs")
    if mesh.fsdp is not None:
        experts = [m for m in modules.values() if mesh.expert is not None and getattr(m, "expert_parallel", False)]
        shard_model(
            root,
            [modules[name] for name in blocks],
            mesh.fsdp,
            experts=experts,
            expert_mesh=mesh.expert_fsdp,
            precision=choices.precision,
            stage=mesh.pipeline is not None,
            hooked=mesh.rounds and mesh.fsdp.device_type == "cpu",  # see GradientExchange
        )
    return cuts, frozenset(tensor.partial), tensor.vocabulary


def _rules(model: nn.Module, size: int, choices: Choices) -> Mapping[str, str]:
    """The rules by which tensor ranks cut the model: the recipe's, or those of its family."""
    family = family_of(model)
    rules = choices.rules or (family.rules if family is not None else None)
    if not rules:
        raise RecipeError(
            f"parallelism.tensor: no rules are known for {type(model).__name__}; give model.tp_plan, such as "
            '{"blocks.*.attention.query": columns, "blocks.*.attention.out": rows}, or parallelism.tensor=1'
        )
    for what, count in divisible(model).items():
        if count % size and "vocabulary" not in what:
            raise RecipeError(f"parallelism.tensor: {size} ranks cannot share the model's {count} {what}")
    return rules
