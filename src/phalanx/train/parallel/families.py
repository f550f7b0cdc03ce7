"""How the matrices of known models are cut over tensor-parallel ranks, as data: patterns of module names to styles.

Shipped are our transformer and Hugging Face's Llama, Qwen2, Qwen3 and GPT-2. What a style does to a module is told in
`tensor.py`, not here; this file imports no model code and changes nothing. (Shoeybi et al. 2019, Megatron-LM.)

A pattern is a module's dotted name in which `*` stands for one whole part: `blocks.*.ffn.up`.

    style              module                    what a rank holds
    region             attention, feed-forward   works on whole sequences with its share of the features: what is in it
                                                 shares one communication when entering
    columns            nn.Linear                 rows of the weight [out, in], the bias with them: part of the outputs
    rows               nn.Linear                 columns of the weight: part of the inputs; partial outputs are summed,
                                                 and the bias, whole on each rank, is added once, after the sum
    columns-conv1d     transformers' Conv1D      the same for a weight stored as [in, out]
    columns-conv1d:3   Conv1D                    as above for three matrices stored as one [in, 3 x out] (query, key,
                                                 value): a part of each of the three
    rows-conv1d        Conv1D                    rows of the weight [in, out]
    vocabulary         nn.Embedding              rows: part of the vocabulary
    head               nn.Linear                 as columns; the outputs are logits of part of the vocabulary. Where it
                                                 is tied to the embedding, both are cut alike
    shared             any with parameters       everything, but used for local heads only: gradients are partial, and
                                                 summed over the ranks
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from torch import nn

from phalanx.models.transformer import Attention, FeedForward, Transformer

STYLES = (
    "region",
    "columns",
    "rows",
    "columns-conv1d",
    "columns-conv1d:3",
    "rows-conv1d",
    "vocabulary",
    "head",
    "shared",
)


@dataclass(frozen=True)
class Family:
    """Models that are cut alike."""

    rules: Mapping[str, str]
    """Pattern -> style. Patterns are of the whole model; for one without its head (`base`), see `family_of`."""
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Pattern of modules -> attributes that count heads or features, and are divided by the number of ranks with them.
    """
    sizes: Mapping[str, str] = field(default_factory=dict)
    """What the number of ranks must divide: its name in words -> attribute of `model.config`; for our own transformer
    they are read off its modules (`divisible`)."""
    base: str = ""
    """Prefix that a model without a head lacks in all its names: `model.` of LlamaModel's."""
    optional: frozenset[str] = frozenset()
    """Patterns that some members of the family have no module for."""


OURS = Family(
    rules={
        "embedding": "vocabulary",
        "blocks.*.attention": "region",
        "blocks.*.ffn": "region",
        "blocks.*.attention.query": "columns",
        "blocks.*.attention.key": "columns",
        "blocks.*.attention.value": "columns",
        "blocks.*.attention.query_norm": "shared",
        "blocks.*.attention.key_norm": "shared",
        "blocks.*.attention.out": "rows",
        "blocks.*.ffn.gate": "columns",
        "blocks.*.ffn.up": "columns",
        "blocks.*.ffn.down": "rows",
        "head": "head",
    },
    divided={"blocks.*.attention": ("heads", "kv_heads")},
    optional=frozenset({"blocks.*.attention.query_norm", "blocks.*.attention.key_norm", "blocks.*.ffn.gate"}),
)

_LLAMA_RULES = {
    "model.embed_tokens": "vocabulary",
    "model.layers.*.self_attn": "region",
    "model.layers.*.mlp": "region",
    "model.layers.*.self_attn.q_proj": "columns",
    "model.layers.*.self_attn.k_proj": "columns",
    "model.layers.*.self_attn.v_proj": "columns",
    "model.layers.*.self_attn.o_proj": "rows",
    "model.layers.*.mlp.gate_proj": "columns",
    "model.layers.*.mlp.up_proj": "columns",
    "model.layers.*.mlp.down_proj": "rows",
    "lm_head": "head",
}
_LLAMA_SIZES = {
    "attention heads": "num_attention_heads",
    "key-value heads": "num_key_value_heads",
    "features of the feed-forward": "intermediate_size",
    "tokens of the vocabulary": "vocab_size",
}

# Attention of these counts its local heads by itself: it views projections as [b, s, -1, d].
LLAMA = Family(rules=_LLAMA_RULES, sizes=_LLAMA_SIZES, base="model.", optional=frozenset({"lm_head"}))

QWEN3 = Family(
    rules={
        **_LLAMA_RULES,
        "model.layers.*.self_attn.q_norm": "shared",
        "model.layers.*.self_attn.k_norm": "shared",
    },
    sizes=_LLAMA_SIZES,
    base="model.",
    optional=frozenset({"lm_head"}),
)

GPT2 = Family(
    rules={
        "transformer.wte": "vocabulary",  # positions (wpe) are whole on each rank
        "transformer.h.*.attn": "region",
        "transformer.h.*.mlp": "region",
        "transformer.h.*.attn.c_attn": "columns-conv1d:3",
        "transformer.h.*.attn.c_proj": "rows-conv1d",
        "transformer.h.*.mlp.c_fc": "columns-conv1d",
        "transformer.h.*.mlp.c_proj": "rows-conv1d",
        "lm_head": "head",
    },
    divided={"transformer.h.*.attn": ("num_heads", "split_size")},
    sizes={
        "attention heads": "n_head",
        "features": "n_embd",
        "tokens of the vocabulary": "vocab_size",
    },
    base="transformer.",
    optional=frozenset({"lm_head"}),
)

HUGGING_FACE: Mapping[str, Family] = {"llama": LLAMA, "qwen2": LLAMA, "qwen3": QWEN3, "gpt2": GPT2}
"""By `model.config.model_type`."""


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = ("[^.]+" if part == "*" else re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split("."))
    return re.compile(r"\.".join(parts))


def matches(pattern: str, name: str) -> bool:
    """Whether a dotted name fits a pattern, part by part: `blocks.*.ffn` fits `blocks.0.ffn`, not `blocks.0.1.ffn`."""
    return _compiled(pattern).fullmatch(name) is not None


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that fit, in their order."""
    return [name for name in names if matches(pattern, name)]


def family_of(model: nn.Module) -> Family | None:
    """What is known about a model: by class for our transformer, by `config.model_type` for Hugging Face's. None for
    any other. Patterns are as they fit this very model: without what it lacks, and without the base's prefix where it
    is the bare base."""
    family = _ours(model) if isinstance(model, Transformer) else _of_hugging_face(model)
    if family is None:
        return None
    names = [name for name, _ in model.named_modules()]
    bare = bool(family.base) and not hasattr(model, family.base.removesuffix("."))

    def fitted(pattern: str) -> str:
        return pattern.removeprefix(family.base) if bare else pattern

    rules = {fitted(pattern): style for pattern, style in family.rules.items()}
    absent = {fitted(pattern) for pattern in family.optional if not matching(fitted(pattern), names)}
    divided = {fitted(pattern): attributes for pattern, attributes in family.divided.items()}
    kept = {pattern: style for pattern, style in rules.items() if pattern not in absent}
    return Family(kept, divided, family.sizes, "" if bare else family.base)


def _ours(model: Transformer) -> Family:
    """Our transformer's. A mixture of experts is no region: each tensor rank computes it for its own part of the
    sequence, so only feed-forwards that stand alone in their block are cut."""
    dense = [name for name, module in model.named_modules() if isinstance(module, FeedForward)]
    dense = [name for name in dense if matches("blocks.*.ffn", name)]
    if len(dense) == len(model.blocks):
        return OURS
    rules = {pattern: style for pattern, style in OURS.rules.items() if ".ffn" not in pattern}
    for pattern, style in OURS.rules.items():
        if pattern.startswith("blocks.*.ffn"):
            rules |= {name + pattern.removeprefix("blocks.*.ffn"): style for name in dense}
    optional = OURS.optional | {pattern for pattern in rules if pattern.endswith(".gate")}
    return replace(OURS, rules=rules, optional=optional)


def divisible(model: nn.Module) -> dict[str, int]:
    """What the number of tensor-parallel ranks must divide: its name in words -> its size. Empty for a model whose
    family is not known."""
    if isinstance(model, Transformer):
        attention = next(module for module in model.modules() if isinstance(module, Attention))
        sizes = {"attention heads": attention.heads, "key-value heads": attention.kv_heads}
        for ffn in (module for module in model.modules() if isinstance(module, FeedForward)):
            sizes["features of the feed-forward"] = ffn.up.out_features
        return sizes | {"tokens of the vocabulary": model.embedding.num_embeddings}
    family = _of_hugging_face(model)
    return {} if family is None else {what: getattr(model.config, name) for what, name in family.sizes.items()}


def _of_hugging_face(model: nn.Module) -> Family | None:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return HUGGING_FACE.get(kind) if isinstance(kind, str) else None
