"""Predict the memory of fine-tuning a decoder on one device from its sizes alone: a base model in 4, 8, 16 or 32 bits,
adapters or all weights, preference and distillation losses. No torch, no weights, no trace: plain values in, bytes out.

`memory.py` predicts a run of Phalanx from a traced model. This file answers before there is one, for any software:
what that does (norms in fp32, fused kernels, copies for adapters) are fields of `FineTuningStack`.

A step has four moments, and the fullest counts: the loss, with everything that forward kept; backward of the last
block; backward of the first, where all gradients exist; the optimizer, which may copy a moment for all weights at once.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.planner.activation_memory import LOSS_CHUNK_ROWS
from phalanx.planner.memory import FRAGMENTATION_SHARE, GPU_CONTEXT_BYTES, NCCL_COMMUNICATOR_BYTES, MemoryEstimate

BaseDtype = Literal["fp32", "bf16", "int8", "int4", "nf4", "nf4-double"]

BYTES_PER_BASE_WEIGHT = {
    "fp32": 4.0,
    "bf16": 2.0,
    "int8": 1.0 + 4 / 64,
    "int4": 0.5 + 2 / 128,
    "nf4": 0.5 + 4 / 64,
    "nf4-double": 0.5 + 1 / 64 + 4 / (64 * 256),
}
"""Bytes of a frozen weight of a block: int8 and NF4 have an fp32 scale for 64 weights, GPTQ's int4 a 16-bit one for
128; NF4's may be quantized in turn, to 8 bits with an fp32 scale for 256 (Dettmers et al. 2023, section 3)."""
BYTES_PER_LOGIT = {"whole": 12.0, "in-place": 8.0, "kernel": 4.0, "sliced": 2.25, "fused": 0.0}
"""Bytes of a logit at the fullest moment of the loss. `whole`: log-probabilities, their gradient and that of logits, in
fp32. `in-place`: fp32 logits and a copy without the last token, over which a kernel writes the gradient. `kernel`:
logits and gradient in 16 bits (Phalanx without chunks). `sliced`: 16
bits of all, and the gradient of one slice in eight. `fused`: never more than a slice exists."""
MAX_SEQ_LEN = 2**24
MLP_LAYERS = ("gate", "up", "down")
ALL_LINEAR = frozenset(("q", "k", "v", "o", *MLP_LAYERS))
"""The linear layers of a block that may have adapters."""
INPUT_GROUPS = (("q", "k", "v"), ("o",), ("up", "gate"), ("down",))
"""Those that read the same tensor."""


@dataclass(frozen=True)
class DecoderSizes:
    """A decoder's dimensions, as in its `config.json`."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    gated: bool = True
    tie_embeddings: bool = False
    num_experts: int = 1
    experts_per_token: int = 1

    @property
    def linear_sizes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of a block, those of one expert."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        width, ffn = self.hidden_size, self.ffn_hidden_size
        sizes = {"q": (width, query), "k": (width, key), "v": (width, key), "o": (query, width), "down": (ffn, width)}
        return sizes | dict.fromkeys(("up", "gate") if self.gated else ("up",), (width, ffn))

    @property
    def block_weights(self) -> int:
        """Weights of the linear layers of a block, of all experts."""
        return sum(
            inputs * outputs * (self.num_experts if name in MLP_LAYERS else 1)
            for name, (inputs, outputs) in self.linear_sizes.items()
        )

    @property
    def outer_weights(self) -> int:
        """Weights of the embedding and the head."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)

    @property
    def num_parameters(self) -> int:
        """All weights but norms and biases."""
        return self.num_layers * self.block_weights + self.outer_weights


@dataclass(frozen=True)
class FineTuningStack:
    """What software does that memory shows. The defaults are eager transformers."""

    bytes_per_logit: float = BYTES_PER_LOGIT["whole"]
    loss_chunk_rows: int = 0
    """Rows of logits that a fused loss has at a time, in fp32, with their gradient."""
    fuses_norms: bool = False
    """Whether norms are single kernels that keep 16-bit inputs: compiled, written by hand, or LayerNorm."""
    fuses_gate: bool = False
    """Whether the gate of an MLP is a single kernel that keeps its two inputs."""
    fuses_qkv: bool = False
    """Whether q, k and v are one layer: its whole result lives as long as v, a view of it, and adapters' outputs
    are copied into it (LitGPT)."""
    outer_bytes: float = 2.0
    """Bytes of a frozen weight outside of blocks."""
    stream_bytes: float = 2.0
    """Bytes of an element of what passes from block to block: 4 where norms in fp32 or autocast leave that, as PEFT's
    `prepare_model_for_kbit_training` does."""
    copies_adapter_inputs: bool = False
    """Whether each adapter keeps its own copy of its input: fp32 adapters in autocast."""
    keeps_frozen_inputs: bool = False
    """Whether linear layers keep their inputs though their weights are frozen: 4-bit ones of bitsandbytes before 0.43.2
    (its pull request 1270)."""
    int8_decoding_bytes: float = 2.0
    """Bytes of an int8 weight while its layer turns it into 16 bits."""
    copies_moments: bool = False
    """Whether an optimizer step makes a copy of one of the two moments (torch's `foreach` AdamW)."""
    frees_late: bool = False
    """Whether what passes from block to block, and as much again, is there until the end of backward: measured where
    FSDP1 shards frozen weights."""


PHALANX_STACK = FineTuningStack(
    bytes_per_logit=BYTES_PER_LOGIT["fused"],
    loss_chunk_rows=LOSS_CHUNK_ROWS,
    fuses_norms=True,
    fuses_gate=True,
    outer_bytes=4.0,
    stream_bytes=4.0,
    copies_adapter_inputs=True,
    int8_decoding_bytes=8.0,
)
"""Phalanx on a GPU: compiled blocks, autocast with fp32 weights, chunked loss. Codes and scales of an int8 weight
are multiplied in fp32."""


@dataclass(frozen=True)
class FineTuning:
    """A run to predict. All weights are trained, in 16 bits, if `adapter_rank` is 0; else they are frozen."""

    sizes: DecoderSizes
    seq_len: int
    micro_size: int = 1
    sequences_per_sample: int = 1
    """2 where a sample is a pair of answers."""
    base_dtype: BaseDtype = "bf16"
    """Of the linear layers in blocks."""
    adapter_rank: int = 0
    adapter_targets: frozenset[str] = ALL_LINEAR
    adapter_dropout: bool = False
    trained_bytes: float = 4.0
    """Bytes of an element of a trained weight and of its gradient."""
    bytes_per_moment: float = 4.0
    """Bytes of each of the optimizer's two moments of a trained weight; 0 where they are not on the device."""
    keeps_gradients: bool = True
    """Whether all gradients exist at once; False where the optimizer runs in backward."""
    accumulates_gradients: bool = False
    """Whether gradients of an earlier micro-batch exist all the time."""
    checkpointing: Literal["none", "selective", "full"] = "full"
    offloads_checkpoints: bool = False
    """Whether what checkpointing keeps is in the host's memory."""
    num_shards: int = 1
    """Devices that divide weights, gradients and optimizer state (FSDP)."""
    offloads_state: bool = False
    """Whether their parts of these are in the host's memory."""
    frozen_models: tuple[tuple[DecoderSizes, BaseDtype], ...] = ()
    """Other models, which only run forward, such as a reference."""
    stack: FineTuningStack = PHALANX_STACK

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.seq_len * self.micro_size * self.sequences_per_sample

    @property
    def num_trained(self) -> int:
        """Weights that are trained."""
        if not self.adapter_rank:
            return self.sizes.num_parameters
        adapted = ((name, sum(it)) for name, it in self.sizes.linear_sizes.items() if name in self.adapter_targets)
        width = sum(both * (self.sizes.num_experts if name in MLP_LAYERS else 1) for name, both in adapted)
        return self.sizes.num_layers * self.adapter_rank * width


def with_preference_pairs(run: FineTuning, reference: Literal["online", "cached"]) -> FineTuning:
    """Return a run on pairs of answers, as DPO has them. An online reference is a frozen copy of the model, unless
    there are adapters to disable; a cached one is a number a sample."""
    needs_copy = reference == "online" and not run.adapter_rank
    copies = ((run.sizes, run.base_dtype),) if needs_copy else ()
    return replace(run, sequences_per_sample=2, frozen_models=run.frozen_models + copies)


def estimate_finetune_memory(run: FineTuning) -> MemoryEstimate:
    """Estimate the bytes on one device at the fullest moment of a step, by part."""
    sizes, stack = run.sizes, run.stack
    num_shards = math.inf if run.offloads_state else run.num_shards
    models = [*run.frozen_models, *([(sizes, run.base_dtype)] if run.adapter_rank else [])]
    parameters = sum(_frozen_bytes(*model, stack.outer_bytes) for model in models) + run.num_trained * run.trained_bytes
    all_gradients = run.num_trained * run.trained_bytes / num_shards
    one_moment = run.num_trained * run.bytes_per_moment / num_shards
    head_gradient = 0.0 if run.adapter_rank else 2.0 * sizes.vocab_size * sizes.hidden_size
    kept, kept_of_first, passing = _activation_bytes(run)
    gathered = _gathered_bytes(run) if num_shards > 1 else 0.0
    # Gradients, activations that are kept, and what comes and goes.
    at_loss = all_gradients if run.accumulates_gradients else 0.0
    at_last_block = max(at_loss, min(all_gradients, head_gradient / num_shards))
    at_end = all_gradients if run.keeps_gradients else head_gradient
    gradients, activations, temporaries = max(
        (at_loss, kept, _loss_bytes(run, head_gradient) + gathered),
        (at_last_block, kept, passing + gathered),
        (at_end, 2 * kept if stack.frees_late else kept_of_first, passing + gathered),
        (at_end, 0.0, one_moment if stack.copies_moments else 0.0),
        key=sum,
    )
    parameters, optimizer_state = parameters / num_shards, 2 * one_moment
    allocated = parameters + optimizer_state + gradients + activations + temporaries
    return MemoryEstimate(
        parameters=parameters,
        gradients=gradients,
        optimizer_state=optimizer_state,
        activations=activations,
        temporaries=temporaries,
        comm_buffers=NCCL_COMMUNICATOR_BYTES if num_shards > 1 else 0.0,
        fragmentation=FRAGMENTATION_SHARE * allocated,
        context=GPU_CONTEXT_BYTES,
    )


def find_longest_sequence(run: FineTuning, capacity_bytes: float, step: int = 256) -> int:
    """Return the most tokens of a sequence, a multiple of `step`, with which a run fits; 0 if none does."""
    return step * bisect_right(
        range(step, MAX_SEQ_LEN, step),
        capacity_bytes,
        key=lambda seq_len: estimate_finetune_memory(replace(run, seq_len=seq_len)).total,
    )


def _frozen_bytes(sizes: DecoderSizes, dtype: BaseDtype, outer_bytes: float) -> float:
    """Bytes of a frozen model: blocks in `dtype`, the rest in `outer_bytes` bytes."""
    return sizes.num_layers * sizes.block_weights * BYTES_PER_BASE_WEIGHT[dtype] + sizes.outer_weights * outer_bytes


def _gathered_bytes(run: FineTuning) -> float:
    """Bytes of gathered weights: the block at work, the one that is gathered ahead, and embedding or head; and of the
    gradient of a block."""
    block_bytes = 2 * BYTES_PER_BASE_WEIGHT[run.base_dtype] + (0.0 if run.adapter_rank else 2.0)
    return 2.0 * run.sizes.vocab_size * run.sizes.hidden_size + block_bytes * run.sizes.block_weights


def _loss_bytes(run: FineTuning, head_gradient: float) -> float:
    """Bytes of logits, their gradients, the hidden states that they come from and the gradient of the head's weight,
    which is added up slice by slice, or made when most of the rest is gone."""
    sizes, bytes_per_logit = run.sizes, run.stack.bytes_per_logit
    num_logits = run.num_tokens * sizes.vocab_size
    chunk = BYTES_PER_LOGIT["whole"] * min(run.num_tokens, run.stack.loss_chunk_rows) * sizes.vocab_size
    sliced = min(bytes_per_logit, BYTES_PER_LOGIT["sliced"]) * num_logits + 2 * head_gradient + chunk
    return max(bytes_per_logit * num_logits, sliced) + 6.0 * sizes.hidden_size * run.num_tokens


def _activation_bytes(run: FineTuning) -> tuple[float, float, float]:
    """Bytes that all blocks keep for backward, those of the first block among them, and those that come and go in the
    backward of a block."""
    kept, passing = _block_bytes(run)
    if run.checkpointing == "none":
        return run.sizes.num_layers * kept, kept, passing
    checkpoint = run.stack.stream_bytes * run.sizes.hidden_size * run.num_tokens
    if run.checkpointing == "selective":
        checkpoint += min(kept - checkpoint, _product_bytes(run) * run.num_tokens)
    recomputed = kept if run.checkpointing == "full" else kept - checkpoint
    if run.offloads_checkpoints:
        checkpoint = 0.0
    return run.sizes.num_layers * checkpoint, checkpoint, passing + recomputed


def _product_bytes(run: FineTuning) -> float:
    """Bytes a token of the results of a block's linear layers, adapters and attention, which selective checkpointing
    keeps."""
    sizes, num_elements = run.sizes, run.sizes.num_heads * run.sizes.head_dim
    for name, (_, outputs) in sizes.linear_sizes.items():
        adapter = outputs + run.adapter_rank if run.adapter_rank and name in run.adapter_targets else 0
        num_elements += (outputs + adapter) * (sizes.experts_per_token if name in MLP_LAYERS else 1)
    return 2.0 * num_elements


def _norm_bytes(run: FineTuning) -> float:
    """Bytes that a norm keeps of each of its inputs."""
    if run.stack.fuses_norms:
        return 2.0
    return 4.0 if run.adapter_rank else 6.0  # the gradient of a norm's weight needs the normalized input, too


def _block_bytes(run: FineTuning) -> tuple[float, float]:
    """Bytes that a block keeps for backward without checkpointing, and those of gradients and dequantized weights in
    the fullest moment of its backward."""
    sizes, stack = run.sizes, run.stack
    hidden, ffn, experts = sizes.hidden_size, sizes.ffn_hidden_size, sizes.experts_per_token
    query, key = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    norms = 2 * hidden * _norm_bytes(run)
    attention = 2.0 * (2 * query + 2 * key)
    if stack.fuses_qkv:
        adapted = run.adapter_targets & set("qkv") if run.adapter_rank else ()
        attention += 2.0 * (query + key + sum(sizes.linear_sizes[name][1] for name in adapted))
    gate_results = (2 if stack.fuses_gate else 3) if sizes.gated else 1
    mlp = 2.0 * gate_results * ffn * experts
    if sizes.num_experts > 1:
        mlp += 2 * 2.0 * hidden * experts  # copies of tokens for each expert, and of its weighted results
    kept = (norms + attention + mlp + _linear_input_bytes(run)) * run.num_tokens
    if run.base_dtype == "fp32":
        kept += 2.0 * sizes.block_weights  # autocast's copies
    # Gradients of the MLP's product and of its factors, or of the product alone while a weight is decoded; and of what
    # passes from block to block. Experts run one after another.
    product_gradient = 2.0 * ffn * experts / sizes.num_experts * run.num_tokens
    decoded = {"fp32": 0.0, "bf16": 0.0, "int8": stack.int8_decoding_bytes}.get(run.base_dtype, 2.0) * hidden * ffn
    passing = product_gradient + max((max(2, gate_results) - 1) * product_gradient, decoded)
    return kept, passing + 2 * stack.stream_bytes * hidden * run.num_tokens


def _linear_input_bytes(run: FineTuning) -> float:
    """Bytes a token that a block keeps of the inputs of linear layers with trained weights or adapters. A frozen layer
    needs none: the gradient of its input needs only its weight."""
    linear_sizes, stack = run.sizes.linear_sizes, run.stack
    num_bytes = 0.0
    for group in INPUT_GROUPS:
        names = [name for name in group if name in linear_sizes]
        times = run.sizes.experts_per_token if names[0] in MLP_LAYERS else 1
        width = linear_sizes[names[0]][0]
        num_adapters = sum(name in run.adapter_targets for name in names) if run.adapter_rank else 0
        if stack.fuses_qkv and len(names) == 3:
            num_adapters = min(1, num_adapters)
        num_copies = num_adapters if stack.copies_adapter_inputs or run.adapter_dropout else 0
        needs_input = not run.adapter_rank or stack.keeps_frozen_inputs or num_adapters > num_copies
        # The attention's result, which enters `o`, is kept anyway.
        num_bytes += 2.0 * width * times * (num_copies + (needs_input and names != ["o"]))
        num_bytes += (width * run.adapter_dropout + 2.0 * run.adapter_rank) * times * num_adapters
    return num_bytes
