"""From a published run to a `Setup`: its model built from its shape and followed, its hardware from the catalogue, and
what its software is known to do.
"""

import math
import re
from dataclasses import replace
from functools import lru_cache

from torch import nn

from phalanx.cluster import load_cluster
from phalanx.cluster.catalogue import accelerator
from phalanx.cluster.description import Cluster, ScaleOut
from phalanx.errors import RecipeError
from phalanx.models import moe, transformer
from phalanx.plan.profile import Profile
from phalanx.plan.setup import Setup, Stack
from phalanx.plan.stacks import known, stack
from phalanx.plan.tracing import build, language_loss, profile
from phalanx.recipe.schema import Parallelism
from planner_validation.cells import CannotPredict
from planner_validation.rows import Run, Shape, largest_divisor

TOKENS = 8192
"""Tokens of a micro-batch where a row does not tell: usual, and enough to keep an accelerator busy."""


def setup_of(run: Run, source: str) -> Setup:
    """What is to be predicted. CannotPredict: the hardware is unknown, or cannot do what the row says."""
    cluster = cluster_of(run)
    device = cluster.node.accelerator
    inner = run.tensor * run.pipeline
    using = stack_of(source, run.zero, inner, device.generation, run.notes.get("release", ""))
    if re.search(r"async", run.notes.get("technique", ""), re.IGNORECASE):
        using = replace(using, tensor_hidden=max(using.tensor_hidden, 0.6))
    sharded = run.zero == 3
    layout = Parallelism(
        replicate=run.replicate if sharded else run.parts,
        shard=run.parts // run.replicate if sharded else 1,
        tensor=run.tensor,
        pipeline=run.pipeline,
        context=run.context,
        expert=run.expert,
    )
    return Setup(
        profile=profile_of(run.shape),
        cluster=cluster,
        layout=layout,
        micro=run.micro or _usual(run),
        batch=run.batch,
        precision=run.precision,
        recompute=run.recompute or "none",
        zero=run.zero,
        chunks=run.chunks,
        stack=using,
    )


def stack_of(source: str, zero: int, inner: int, generation: str, release: str = "") -> Stack:
    """The stack that a source's name tells; without a name that says it, by how the run is divided: weights that are
    sharded over data-parallel ranks are torch's, tensor and pipeline ranks Megatron's, TPUs are programmed through XLA.
    `inner`: tensor x pipeline ranks. `release`: of the software, "26.04" or so, "" where nobody tells."""
    for name, values in known()["stacks"].items():
        right = generation == values.get("generation", generation) and release >= values.get("since", "")
        if right and "match" in values and re.search(values["match"], source, re.IGNORECASE):
            return stack(name)
    if generation == "tpu":
        return stack("xla")
    return stack("torch" if zero == 3 or inner == 1 else "megatron")


def cluster_of(run: Run) -> Cluster:
    """So many of the devices that a row names, in nodes that are usual for them; the network is that of the note."""
    try:
        device = accelerator(run.gpu)
        one = load_cluster(f"{device.name}:1")
        count = load_cluster(one.node.name).node.count if one.node.name != "workstation" else 8
        nodes = math.ceil(run.devices / count)
        whole = load_cluster(f"{one.node.name}:{nodes}") if one.node.name != "workstation" else one
    except RecipeError as error:
        raise CannotPredict(str(error)) from None
    if whole.node.scale_up is None and run.devices > 1:
        whole = load_cluster(f"{device.name}:{min(run.devices, 8)}")
    if run.network_gbps is not None:
        network = ScaleOut(link="as the note says", gbps=run.network_gbps / count, ports=count)
        whole = whole.model_copy(update={"node": whole.node.model_copy(update={"scale_out": network})})
    return whole


@lru_cache(maxsize=512)
def profile_of(shape: Shape) -> Profile:
    """The profile of a decoder of this shape."""
    common = {
        "vocab_size": shape.vocab,
        "seq_len": shape.sequence,
        "layers": shape.layers,
        "hidden_size": shape.width,
        "num_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_embeddings": shape.tie,
        "qk_norm": False,
    }

    def make() -> nn.Module:
        if not shape.experts:
            return transformer(**common, ffn_hidden_size=shape.ffn, activation="swiglu" if shape.gated else "relu2")  # type: ignore[arg-type]
        return moe(
            **common,  # type: ignore[arg-type]
            num_experts=shape.experts,
            top_k=shape.top_k,
            expert_hidden_size=shape.expert_ffn,
            shared_expert_hidden_size=shape.shared_ffn,
            dense_layers=shape.dense_layers,
        )

    try:
        model = build(make)
    except ValueError as error:  # sizes that fit no such model
        raise CannotPredict(str(error)) from None
    return profile(model, language_loss(shape.vocab, shape.sequence), shape.sequence)


def _usual(run: Run) -> int:
    """A micro-batch of a usual number of tokens that divides a group's share."""
    share = run.batch // run.parts
    most = max(1, TOKENS // (run.shape.sequence // run.context))
    if run.pipeline > 1:
        most = max(1, min(most, share // (2 * run.pipeline)))
    return largest_divisor(share, most)
