"""Parallelize a model, in the only order that works:

    tensor -> expert -> fp8 -> cast once -> activation checkpointing -> compile -> shard, and then the optimizer.

Tensor and expert parallelism replace parameters, and determine which matmuls are large enough for fp8. Activation
checkpointing must wrap them, so that it does not recompute without their communication; a compiled block must contain
all of this; FSDP shards the result. An optimizer that is built before would silently update tensors that are not part
of the model any more. Blocks are compiled one by one, so equal blocks share a compilation, and for static shapes,
since all micro-batches of a recipe have the same shape. (docs/how-to/parallelism.md explains the reasons.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from phalanx.compat import raise_recompile_limit
from phalanx.errors import RecipeError
from phalanx.recipe.schema import Parallelism
from phalanx.train.distributed.activation_checkpoint import ActivationCheckpointing, apply_activation_checkpointing
from phalanx.train.distributed.async_tp import ASYNC_TP_CHUNKS
from phalanx.train.distributed.context_parallel import check_context_parallel
from phalanx.train.distributed.expert_parallel import apply_expert_parallel, check_experts, find_expert_modules
from phalanx.train.distributed.fsdp import (
    apply_fsdp,
    check_fsdp_groups,
    check_parameter_hooks,
    check_tied_params,
    reduce_unused_parameters,
)
from phalanx.train.distributed.mesh import Mesh
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.distributed.shard_spec import DimShard
from phalanx.train.distributed.stubs import ModuleStub
from phalanx.train.distributed.tensor_parallel import apply_tensor_parallel, check_tp_plan
from phalanx.train.distributed.tp_plans import find_divisible_sizes, find_tp_plan
from phalanx.train.ops.blocks import find_blocks
from phalanx.train.ops.cached_cast_linear import linear_names_in_blocks, use_cached_casts
from phalanx.train.ops.collectives import Group
from phalanx.train.ops.float8 import use_float8
from phalanx.train.ops.random_draws import refuse_draws, seed_after_blocks
from phalanx.train.precision import AUTOCAST_DTYPES

CompileMode = bool | Literal["cuda-graphs"]
BLOCKS_COMPILED_ATTR = "blocks_are_compiled"
"""Attribute that is set on a model that has it, when its blocks are compiled but the model is not. Such a model may
pass its blocks inputs (rotations, masks) in a form that compiles better."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the parts of a model are computed: everything in the recipe besides the parallelism.

    `sequence`: the sequence length, if the data have one. `vocabulary`: whether the loss can be computed over shards of
    the vocabulary. `cache_weight_casts`: linear layers in blocks, and the `lm_head` layer, cache their weights in
    autocast's dtype for a step.
    """

    precision: str = "fp32"
    activation_checkpointing: ActivationCheckpointing = "none"
    compile: CompileMode = False
    tp_plan: Mapping[str, str] | None = None
    seq_len: int | None = None
    vocab_parallel_loss: bool = False
    cache_weight_casts: bool = False
    lm_head: str | None = None


@dataclass(frozen=True)
class ModelPlan:
    """The analysis of a whole model before it is divided: its `blocks` in order, the tensor-parallel `tp_styles` of its
    modules, attributes that count heads (`divided_attributes`), and whether hidden states are sharded along the
    `sequence`."""

    blocks: tuple[str, ...]
    tp_styles: Mapping[str, str]
    divided_attributes: Mapping[str, Sequence[str]]
    sequence_parallel: bool


def plan_model(model: nn.Module, parallelism: Parallelism, config: ParallelConfig) -> ModelPlan:
    """Analyze a whole model's names and shapes. Raises RecipeError, naming the rule, if it does not support this."""
    module_order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    blocks = tuple(sorted(find_blocks(model), key=module_order.__getitem__))
    tp_styles: Mapping[str, str] = {}
    divided_attributes: Mapping[str, Sequence[str]] = {}
    if parallelism.tensor > 1:
        tp_plan = find_tp_plan(model)
        tp_styles = check_tp_plan(model, _get_tp_styles(model, parallelism.tensor, config), parallelism.tensor)
        divided_attributes = tp_plan.divided_attributes if tp_plan is not None and not config.tp_plan else {}
    if parallelism.expert > 1:
        check_experts(model, parallelism.expert)
    if parallelism.context > 1:
        if config.seq_len is None:
            raise RecipeError("parallelism.context: is for models of sequences, and these data have none")
        check_context_parallel(model, config.seq_len)
    if parallelism.shard * parallelism.context * parallelism.pipeline * parallelism.expert > 1:
        check_parameter_hooks(model)
    if parallelism.shard * parallelism.context > 1:
        modules = [model.get_submodule(name) for name in blocks]
        check_tied_params(model, modules)
        check_fsdp_groups(model, modules, rest=parallelism.pipeline == 1)
    length = None if config.seq_len is None else config.seq_len // parallelism.context
    if parallelism.async_tp and (length is None or length % (parallelism.tensor * ASYNC_TP_CHUNKS)):
        raise RecipeError(
            f"parallelism.async_tp: needs sequences that {parallelism.tensor} ranks can share in {ASYNC_TP_CHUNKS} "
            f"chunks each; a rank's have {length} positions"
        )
    return ModelPlan(blocks, tp_styles, divided_attributes, length is not None and length % parallelism.tensor == 0)


def parallelize(model: nn.Module, root: nn.Module, mesh: Mesh, config: ParallelConfig) -> tuple[ParallelModel, Group]:
    """Parallelize `model`, which `root` contains, in place. Return it and the group over which its vocabulary is
    sharded. Raises RecipeError if the model does not support this."""
    dim_shards, partial_grads, vocab_group = parallelize_part(
        model, root, mesh, config, plan_model(model, mesh.parallelism, config)
    )
    return ParallelModel(
        mesh, (model,), dim_shards, partial_grads, fsdp_root=None if mesh.fsdp_mesh is None else root
    ), vocab_group


def parallelize_part(
    model: nn.Module, root: nn.Module, mesh: Mesh, config: ParallelConfig, model_plan: ModelPlan
) -> tuple[dict[str, tuple[DimShard, ...]], frozenset[str], Group]:
    """Parallelize a model, or one pipeline stage of it, in place. Return the shards of parameters, the parameters with
    partial gradients on each tensor-parallel rank, and the group over which the vocabulary is sharded."""
    tp_result = apply_tensor_parallel(
        model,
        model_plan.tp_styles,
        mesh.tensor_group,
        blocks=model_plan.blocks,
        divided_attributes=model_plan.divided_attributes,
        sequence_parallel=model_plan.sequence_parallel,
        vocab_parallel_loss=config.vocab_parallel_loss,
        async_tp=mesh.parallelism.async_tp,
    )
    dim_shards: dict[str, tuple[DimShard, ...]] = {
        name: (dim_shard,) for name, dim_shard in tp_result.dim_shards.items()
    }
    modules = {name: module for name, module in model.named_modules() if not isinstance(module, ModuleStub)}
    blocks = [name for name in model_plan.blocks if name in modules]
    if mesh.expert_group is not None and find_expert_modules(model):  # a pipeline stage may have no experts
        for name, dim_shard in apply_expert_parallel(model, mesh.expert_group).items():
            dim_shards[name] = (*dim_shards.get(name, ()), dim_shard)
    if config.precision == "fp8":
        use_float8(model, blocks)
    if config.cache_weight_casts and mesh.is_pure_ddp:
        use_cached_casts(
            model,
            [*linear_names_in_blocks(model, blocks), *filter(None, [config.lm_head])],
            AUTOCAST_DTYPES[config.precision],
        )
    if mesh.parallelism.tensor * mesh.parallelism.context * mesh.parallelism.expert > 1:
        for name, experts_module in find_expert_modules(model).items():
            experts_module.forward = refuse_draws(name, experts_module.forward)
    apply_activation_checkpointing(model, blocks, config.activation_checkpointing)
    if config.compile:
        compile_blocks(model, [modules[name] for name in blocks], graphs=config.compile == "cuda-graphs")
    named = dict(model.named_modules())  # stubs too: a stage's forward passes the blocks before its own
    seed_after_blocks([named[name] for name in model_plan.blocks if name in named])
    if mesh.fsdp_mesh is not None:
        experts = [
            m for m in modules.values() if mesh.expert_group is not None and getattr(m, "expert_parallel", False)
        ]
        apply_fsdp(
            root,
            [modules[name] for name in blocks],
            mesh.fsdp_mesh,
            experts=experts,
            expert_mesh=mesh.expert_fsdp_mesh,
            precision=config.precision,
        )
        if mesh.pipeline_group is None:  # what a stage uses does not depend on the batch (pipeline/dataflow.py)
            hooked = mesh.is_tree_hsdp and mesh.fsdp_mesh.device_type == "cpu"  # see BucketedReducer
            reduce_unused_parameters(root, hooked)
    return dim_shards, frozenset(tp_result.partial_grads), tp_result.vocab_group


def _get_tp_styles(model: nn.Module, size: int, config: ParallelConfig) -> Mapping[str, str]:
    """Return the tensor-parallel styles of the recipe, or those of the model's family."""
    family_plan = find_tp_plan(model)
    styles = config.tp_plan or (family_plan.styles if family_plan is not None else None)
    if not styles:
        raise RecipeError(
            f"parallelism.tensor: no rules are known for {type(model).__name__}; give model.tp_plan, such as "
            '{"blocks.*.attention.query": columns, "blocks.*.attention.out": rows}, or parallelism.tensor=1'
        )
    for what, count in find_divisible_sizes(model).items():
        if count % size and "vocabulary" not in what:
            raise RecipeError(f"parallelism.tensor: {size} ranks cannot share the model's {count} {what}")
    return styles


def compile_blocks(model: nn.Module, blocks: list[nn.Module], graphs: bool = False) -> None:
    """Compile each repeated block in place; a model without blocks as a whole. Names and parameters do not change.

    `graphs` also records each block as a CUDA graph, which launches all its kernels at once. The graphs of a forward
    share memory that the next forward overwrites, so results must not be kept across two forwards of the model.
    """
    if hasattr(model, BLOCKS_COMPILED_ATTR):
        setattr(model, BLOCKS_COMPILED_ATTR, True)
    parts = blocks or [model]
    raise_recompile_limit(len(parts))
    options: dict[str, Any] = {"mode": "reduce-overhead"} if graphs else {}
    for module in parts:
        module.compile(dynamic=False, **options)
    if graphs:
        model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
