"""Context parallelism on 2, 3 and 4 processes against one process that has the whole sequence."""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint

from phalanx.models import transformer
from phalanx.models.attention import make_document_mask
from phalanx.train.distributed.context_attention import ContextMethod
from phalanx.train.distributed.context_parallel import (
    ContextParallel,
    check_context_parallel,
    local_positions,
    make_checkpoint_contexts,
    shard_batch,
)
from phalanx.train.ops.collectives import Group
from process_worlds import ProcessWorlds

LENGTH = 24  # divides by 2n for 2, 3 and 4 ranks
VOCAB = 23
WAYS: tuple[ContextMethod, ...] = ("gather", "alltoall")


def together(rank: int, world: int, *, case: Callable[..., Any], **options: Any) -> Any:
    """`case` for the group of all ranks. What Hugging Face and the compiler warn of is no error here."""
    with warnings.catch_warnings(action="default"):
        return case(dist.group.WORLD, **options)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest value."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def documents_of(batch: int) -> Tensor:
    """Documents that end in different chunks of each sample; a single one in the last sample."""
    ends = torch.tensor([[5, 11, 12, 24], [2, 17, 23, 24], [24, 24, 24, 24]])[:batch]
    return (torch.arange(LENGTH)[None, :, None] >= ends[:, None, :]).sum(-1)


# Attention alone


def attention(group: Group, *, way: ContextMethod, kind: str, heads: int, kv_heads: int) -> list[Tensor]:
    """Result of one attention and the gradients of queries, keys and values, with the positions that they are of."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, 4), (kv_heads, 4), (kv_heads, 6))  # values are wider than keys
    whole = [torch.randn(3, count, LENGTH, dim, generator=generator) for count, dim in shapes]
    upstream = torch.randn(3, heads, LENGTH, shapes[2][1], generator=generator)
    documents = documents_of(3) if kind == "documents" else None
    own = local_positions(LENGTH, way, group, torch.device("cpu"))
    parts = [x[:, :, own].requires_grad_() for x in whole]
    mask = None if documents is None else make_document_mask(documents[:, own])
    with ContextParallel(group, way, documents):
        out = F.scaled_dot_product_attention(
            *parts, attn_mask=mask, is_causal=kind == "causal", enable_gqa=heads != kv_heads
        )
    out.backward(upstream[:, :, own])
    return [own, out.detach(), *(part.grad for part in parts if part.grad is not None)]


CASES = [
    *((way, kind, n, 12, 12) for way in WAYS for kind, n in (("causal", 3), ("full", 2), ("documents", 4))),
    *((way, kind, n, 12, 4) for way in WAYS for kind, n in (("causal", 2), ("documents", 4))),
    ("alltoall", "causal", 3, 12, 2),  # fewer key-value heads than ranks
    ("alltoall", "documents", 4, 12, 6),  # neither divides the other
    ("gather", "causal", 4, 3, 3),  # heads do not divide by the ranks
]


@pytest.mark.parametrize(("way", "kind", "n", "heads", "kv_heads"), CASES)
def test_attention_and_its_gradients_are_those_of_the_whole_sequence(
    world: ProcessWorlds, way: ContextMethod, kind: str, n: int, heads: int, kv_heads: int
) -> None:
    options: dict[str, Any] = {"way": way, "kind": kind, "heads": heads, "kv_heads": kv_heads}
    _, *alone = attention(None, **options)
    for own, *found in world.run(n, together, case=attention, **options):
        for part, whole in zip(found, alone, strict=True):
            assert_close(part, whole[:, :, own])


# Whole models


def build(family: str) -> nn.Module:
    torch.manual_seed(1)
    if family == "ours":
        return transformer(vocab_size=VOCAB, seq_len=LENGTH, layers=2, hidden_size=32, num_heads=4, num_kv_heads=2)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attn_implementation="sdpa",
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


class Recomputed(nn.Module):
    """A block that keeps nothing for the backward but its input."""

    def __init__(self, block: nn.Module, options: dict[str, Any]):
        super().__init__()
        self.block, self.options = block, options

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **self.options)


def training(
    group: Group,
    *,
    way: ContextMethod,
    family: str = "ours",
    packed: bool = False,
    recompute: str = "none",
    cache: bool = False,
) -> tuple[float, int, dict[str, Tensor]]:
    """Sum of losses, terms and all gradients of this rank's part of a batch."""
    model = build(family)
    if recompute == "ours":
        model.blocks = nn.ModuleList(
            Recomputed(block, {"context_fn": make_checkpoint_contexts}) for block in model.blocks
        )
    elif recompute == "forgetful":
        model.blocks = nn.ModuleList(Recomputed(block, {}) for block in model.blocks)
    elif recompute == "theirs":
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    targets = tokens[:, 1:].clone()
    targets[0, 3] = targets[1, 20] = -100
    batch = {"tokens": tokens[:, :-1], "targets": targets}
    if packed:
        batch["documents"] = documents_of(2)
    mine = shard_batch(batch, group, way)
    options: dict[str, Any] = {check_context_parallel(model, LENGTH): mine["positions"]}
    if family != "ours":
        options["use_cache"] = cache
    if packed:
        documents = mine["documents"]
        options |= {"documents": documents} if family == "ours" else {"attention_mask": make_document_mask(documents)}
    with ExitStack() as stack:
        mode = ContextParallel(group, way, batch.get("documents"))
        stack.enter_context(mode)
        logits = model(mine["tokens"], **options)
        logits = logits if isinstance(logits, Tensor) else logits.logits
        loss = F.cross_entropy(logits.flatten(0, 1), mine["targets"].flatten(), reduction="sum")
        if recompute != "theirs":  # theirs knows nothing of context_fn: the mode stays around the backward
            stack.close()
        loss.backward()
    assert mode.attention_seen
    gradients = {name.replace("block.", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), int((mine["targets"] != -100).sum()), gradients


def assert_adds_up(parts: list[Any], alone: tuple[float, int, dict[str, Tensor]]) -> None:
    """Losses, terms and gradients of the ranks are together those of one process."""
    loss, terms, gradients = alone
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-5)
    assert sum(part[1] for part in parts) == terms
    for name, expected in gradients.items():
        assert_close(torch.stack([part[2][name] for part in parts]).sum(0), expected)


@pytest.mark.parametrize("way", WAYS)
def test_recomputed_blocks_attend_to_the_whole_sequence_again(world: ProcessWorlds, way: ContextMethod) -> None:
    options: dict[str, Any] = {"way": way, "packed": True}
    assert_adds_up(world.run(2, together, case=training, recompute="ours", **options), training(None, **options))


def forgotten(group: Group, way: ContextMethod) -> bool:
    try:
        training(group, way=way, recompute="forgetful")
    except CheckpointError:
        return True
    return False


@pytest.mark.parametrize("way", WAYS)
def test_a_recomputation_without_it_is_an_error_not_another_gradient(world: ProcessWorlds, way: ContextMethod) -> None:
    assert world.run(2, together, case=forgotten, way=way) == [True, True]


@pytest.mark.parametrize(("recompute", "packed"), [("none", False), ("none", True), ("theirs", False)])
def test_hugging_face_llama_may_recompute_or_hold_a_cache(world: ProcessWorlds, recompute: str, packed: bool) -> None:
    pytest.importorskip("transformers")
    options: dict[str, Any] = {"way": "gather", "family": "llama", "packed": packed}
    parts = world.run(2, together, case=training, recompute=recompute, cache=recompute == "none", **options)
    assert_adds_up(parts, training(None, **options))


# Compiled blocks


class Block(nn.Module):
    """Attention between two projections."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.into, self.out, self.recompute = nn.Linear(16, 48), nn.Linear(16, 16), recompute

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.recompute:
            result: Tensor = checkpoint(self.inner, x, mask, use_reentrant=False)
            return result
        return self.inner(x, mask)

    def inner(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (part.unflatten(2, (4, 4)).transpose(1, 2) for part in self.into(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        out: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return out


def compiled(group: Group, *, way: ContextMethod, packed: bool, recompute: bool, alone: bool = False) -> list[Any]:
    """Result and gradients of a block, compiled unless `alone`, after three micro-batches with each its own mode; then
    how often it was compiled."""
    torch.manual_seed(3)
    block = Block(recompute and not alone)
    x = torch.randn(2, LENGTH, 16)
    documents = documents_of(2) if packed else None
    own = local_positions(LENGTH, way, group, torch.device("cpu"))
    mask = None if documents is None else make_document_mask(documents[:, own])
    torch.compiler.reset()
    compilations: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(1)
        return graph.forward

    run = block if alone else torch.compile(block, fullgraph=True, dynamic=False, backend=backend)
    for _ in range(3):
        with ContextParallel(group, way, documents) as mode:
            out = run(x[:, own], mask)
        assert mode.attention_seen
        out.square().sum().backward()
    return [own, out.detach(), [p.grad for p in block.parameters()], len(compilations)]


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize(("way", "packed"), [("gather", True), ("alltoall", False)])
def test_a_compiled_block_attends_to_the_whole_sequence(
    world: ProcessWorlds, way: ContextMethod, packed: bool, recompute: bool
) -> None:
    options: dict[str, Any] = {"way": way, "packed": packed, "recompute": recompute}
    _, whole, expected, _ = compiled(None, alone=True, **options)
    parts = world.run(2, together, case=compiled, **options)
    for own, out, _, compilations in parts:
        assert_close(out, whole[:, own])
        assert compilations == 1
    for found, gradient in zip(zip(*(part[2] for part in parts), strict=True), expected, strict=True):
        assert_close(torch.stack(found).sum(0), gradient)
