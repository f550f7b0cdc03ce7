"""From a published run to a `Scenario`: its model built from its shape and followed, its hardware from the catalogue,
and what its software is known to do.
"""

import math
import re
from dataclasses import replace
from functools import lru_cache

from torch import nn

from phalanx.cluster import load_cluster
from phalanx.cluster.catalog import find_accelerator
from phalanx.cluster.spec import Cluster, ScaleOutNetwork
from phalanx.errors import RecipeError
from phalanx.models import moe, transformer
from phalanx.planner.device_costs import load_stack_data, stack_by_name
from phalanx.planner.model_profile import ModelProfile
from phalanx.planner.scenario import Scenario, SoftwareStack
from phalanx.planner.trace.trace_model import build_on_meta, language_modeling_forward, profile_model
from phalanx.recipe.schema import Parallelism
from planner_validation.cells import CannotPredict
from planner_validation.llm_rows import DecoderShape, PublishedRun, largest_divisor

DEFAULT_MICRO_BATCH_TOKENS = 8192
"""Tokens of a micro-batch where a row does not tell: usual, and enough to keep an accelerator busy."""


def scenario_of(run: PublishedRun, source: str) -> Scenario:
    """What is to be predicted. CannotPredict: the hardware is unknown, or cannot do what the row says."""
    cluster = cluster_of(run)
    device = cluster.node.accelerator
    inner = run.tensor * run.pipeline
    stack = stack_of(source, run.zero, inner, device.generation, run.notes.get("release", ""))
    if re.search(r"async", run.notes.get("technique", ""), re.IGNORECASE):
        stack = replace(stack, max_tp_overlap=max(stack.max_tp_overlap, 0.6))
    sharded = run.zero == 3
    parallelism = Parallelism(
        replicate=run.replicate if sharded else run.data_parallel,
        shard=run.data_parallel // run.replicate if sharded else 1,
        tensor=run.tensor,
        pipeline=run.pipeline,
        context=run.context,
        expert=run.expert,
    )
    return Scenario(
        profile=profile_of_shape(_without_padding(run)),
        cluster=cluster,
        parallelism=parallelism,
        micro_size=run.micro_size or _default_micro_size(run),
        global_batch=run.global_batch,
        precision=run.precision,
        checkpointing=run.checkpointing or "none",
        zero_level=run.zero,
        virtual_stages=run.virtual_stages,
        stack=stack,
    )


def stack_of(source: str, zero: int, inner: int, generation: str, release: str = "") -> SoftwareStack:
    """The stack that a source's name tells; without a name that says it, by how the run is divided: weights that are
    sharded over data-parallel ranks are torch's, tensor and pipeline ranks Megatron's, TPUs are programmed through XLA.
    `inner`: tensor x pipeline ranks. `release`: of the software, "26.04" or so, "" where nobody tells."""
    for name, values in load_stack_data()["stacks"].items():
        right = generation == values.get("generation", generation) and release >= values.get("since", "")
        if right and "match" in values and re.search(values["match"], source, re.IGNORECASE):
            return stack_by_name(name)
    if generation == "tpu":
        return stack_by_name("xla")
    return stack_by_name("torch" if zero == 3 or inner == 1 else "megatron")


def cluster_of(run: PublishedRun) -> Cluster:
    """So many of the devices that a row names, in nodes that are usual for them; the network is that of the note."""
    try:
        device = find_accelerator(run.gpu)
        one = load_cluster(f"{device.name}:1")
        count = load_cluster(one.node.name).node.count if one.node.name != "workstation" else 8
        nodes = math.ceil(run.devices / count)
        whole = load_cluster(f"{one.node.name}:{nodes}") if one.node.name != "workstation" else one
    except RecipeError as error:
        raise CannotPredict(str(error)) from None
    if whole.node.scale_up is None and run.devices > 1:
        whole = load_cluster(f"{device.name}:{min(run.devices, 8)}")
    if run.network_gbps is not None:
        network = ScaleOutNetwork(link="as the note says", gbps=run.network_gbps / count, ports=count)
        whole = whole.model_copy(update={"node": whole.node.model_copy(update={"scale_out": network})})
    return whole


@lru_cache(maxsize=512)
def profile_of_shape(shape: DecoderShape) -> ModelProfile:
    """The profile of a decoder of this shape. Two of its equal blocks are traced, and counted as all of them."""
    layers = min(shape.layers, shape.dense_layers + 2)
    common = {
        "vocab_size": shape.vocab_size,
        "seq_len": shape.seq_len,
        "layers": layers,
        "hidden_size": shape.hidden_size,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "tie_embeddings": shape.tie_embeddings,
        "qk_norm": False,
    }

    def make() -> nn.Module:
        if not shape.num_experts:
            return transformer(
                **common,  # type: ignore[arg-type]
                ffn_hidden_size=shape.ffn_hidden_size,
                activation="swiglu" if shape.gated else "relu2",
            )
        return moe(
            **common,  # type: ignore[arg-type]
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            expert_hidden_size=shape.expert_hidden_size,
            shared_expert_hidden_size=shape.shared_expert_hidden_size,
            dense_layers=shape.dense_layers,
        )

    try:
        model = build_on_meta(make)
    except ValueError as error:  # sizes that fit no such model
        raise CannotPredict(str(error)) from None
    profile = profile_model(model, language_modeling_forward(shape.vocab_size, shape.seq_len), shape.seq_len)
    *before, blocks, head = profile.segments
    repeated = replace(blocks, repeats=blocks.repeats + shape.layers - layers)
    return replace(profile, segments=(*before, repeated, head))


def _without_padding(run: PublishedRun) -> DecoderShape:
    """The shape with as many tokens as are no padding, in eights."""
    if not run.padding_share:
        return run.shape
    return replace(run.shape, seq_len=max(8, round(run.shape.seq_len * (1 - run.padding_share) / 8) * 8))


def _default_micro_size(run: PublishedRun) -> int:
    """A micro-batch of a usual number of tokens that divides a group's share."""
    samples_per_group = run.global_batch // run.data_parallel
    most = max(1, DEFAULT_MICRO_BATCH_TOKENS // (run.shape.seq_len // run.context))
    if run.pipeline > 1:
        most = max(1, min(most, samples_per_group // (2 * run.pipeline)))
    return largest_divisor(samples_per_group, most)
