"""Tensor-parallel plans of known models, as data: patterns of module names to styles.

Included are our transformer and Hugging Face's Llama, Qwen2, Qwen3 and GPT-2. `tensor_parallel.py` implements the
styles; this module imports no model code and changes nothing. (Shoeybi et al. 2019, Megatron-LM.)

A pattern is a dotted module name in which `*` stands for one component: `blocks.*.ffn.up`.

    style              module                    what a rank holds
    region             attention, feed-forward   works on whole sequences with its share of the features: its modules
                                                 share one communication when entering
    columns            nn.Linear                 rows of the weight [out, in], the bias with them: part of the outputs
    rows               nn.Linear                 columns of the weight: part of the inputs; partial outputs are summed,
                                                 and the bias, whole on each rank, is added once, after the sum
    columns-conv1d     transformers' Conv1D      the same for a weight stored as [in, out]
    columns-conv1d:3   Conv1D                    as above for three matrices stored as one [in, 3 x out] (query, key,
                                                 value): a part of each of the three
    rows-conv1d        Conv1D                    rows of the weight [in, out]
    vocabulary         nn.Embedding              rows: part of the vocabulary
    head               nn.Linear                 as columns; the outputs are logits of part of the vocabulary. If it
                                                 is tied to the embedding, both are sharded in the same way
    shared             any with parameters       everything, but used for local heads only: gradients are partial, and
                                                 summed over the ranks
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from phalanx.models.transformer import CausalSelfAttention, FeedForward, Transformer
from phalanx.train.ops.blocks import find_matching, matches_pattern

CONV1D_STYLES = ("columns-conv1d", "columns-conv1d:3", "rows-conv1d")
TP_STYLES = ("region", "columns", "rows", *CONV1D_STYLES, "vocabulary", "head", "shared")


@dataclass(frozen=True)
class TPPlan:
    """The plan of a model family."""

    styles: Mapping[str, str]
    """Pattern -> style. Patterns are those of the model with its head; for a model without one (`base_prefix`), see
    `find_tp_plan`."""
    divided_attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Pattern of modules -> attributes that count heads or features, and are divided by the number of ranks too."""
    divisible_sizes: Mapping[str, str] = field(default_factory=dict)
    """Sizes that the number of ranks must divide: description -> attribute of `model.config`. For our own transformer
    they are read from its modules (`find_divisible_sizes`)."""
    base_prefix: str = ""
    """Prefix that a model without a head lacks in all names: `model.` for LlamaModel."""
    optional_patterns: frozenset[str] = frozenset()
    """Patterns for which some members of the family have no module."""


TRANSFORMER_TP_PLAN = TPPlan(
    styles={
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
    divided_attributes={"blocks.*.attention": ("num_heads", "num_kv_heads")},
    optional_patterns=frozenset({"blocks.*.attention.query_norm", "blocks.*.attention.key_norm", "blocks.*.ffn.gate"}),
)

# These attention modules need no divided attributes: they view projections as [b, s, -1, d].
LLAMA_TP_PLAN = TPPlan(
    styles={
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
    },
    divisible_sizes={
        "attention heads": "num_attention_heads",
        "key-value heads": "num_key_value_heads",
        "features of the feed-forward": "intermediate_size",
        "tokens of the vocabulary": "vocab_size",
    },
    base_prefix="model.",
    optional_patterns=frozenset({"lm_head"}),
)

QWEN3_TP_PLAN = replace(
    LLAMA_TP_PLAN,
    styles={
        **LLAMA_TP_PLAN.styles,
        "model.layers.*.self_attn.q_norm": "shared",
        "model.layers.*.self_attn.k_norm": "shared",
    },
)

GPT2_TP_PLAN = TPPlan(
    styles={
        "transformer.wte": "vocabulary",  # position embeddings (wpe) are replicated
        "transformer.h.*.attn": "region",
        "transformer.h.*.mlp": "region",
        "transformer.h.*.attn.c_attn": "columns-conv1d:3",
        "transformer.h.*.attn.c_proj": "rows-conv1d",
        "transformer.h.*.mlp.c_fc": "columns-conv1d",
        "transformer.h.*.mlp.c_proj": "rows-conv1d",
        "lm_head": "head",
    },
    divided_attributes={"transformer.h.*.attn": ("num_heads", "split_size")},
    divisible_sizes={"attention heads": "n_head", "features": "n_embd", "tokens of the vocabulary": "vocab_size"},
    base_prefix="transformer.",
    optional_patterns=frozenset({"lm_head"}),
)

HF_TP_PLANS: Mapping[str, TPPlan] = {
    "llama": LLAMA_TP_PLAN,
    "qwen2": LLAMA_TP_PLAN,
    "qwen3": QWEN3_TP_PLAN,
    "gpt2": GPT2_TP_PLAN,
}
"""By `model.config.model_type`."""


def find_tp_plan(model: nn.Module) -> TPPlan | None:
    """Return the plan of a model: by class for our transformer, by `config.model_type` for Hugging Face models; None
    for others. Patterns are fitted to this model: without modules that it lacks, and without the prefix if it has no
    head."""
    plan = _plan_for_transformer(model) if isinstance(model, Transformer) else _plan_for_hugging_face(model)
    if plan is None:
        return None
    names = [name for name, _ in model.named_modules()]
    bare = bool(plan.base_prefix) and not hasattr(model, plan.base_prefix.removesuffix("."))

    def fit_pattern(pattern: str) -> str:
        return pattern.removeprefix(plan.base_prefix) if bare else pattern

    styles = {fit_pattern(pattern): style for pattern, style in plan.styles.items()}
    absent = {
        fit_pattern(pattern) for pattern in plan.optional_patterns if not find_matching(fit_pattern(pattern), names)
    }
    divided_attributes = {fit_pattern(pattern): attributes for pattern, attributes in plan.divided_attributes.items()}
    styles_present = {pattern: style for pattern, style in styles.items() if pattern not in absent}
    return TPPlan(styles_present, divided_attributes, plan.divisible_sizes, "" if bare else plan.base_prefix)


def _plan_for_transformer(model: Transformer) -> TPPlan:
    """Return the plan of our transformer. A mixture of experts is not a region: each tensor-parallel rank computes it
    for its own part of the sequence, so only feed-forwards of blocks without experts are sharded."""
    dense = [name for name, module in model.named_modules() if isinstance(module, FeedForward)]
    dense = [name for name in dense if matches_pattern("blocks.*.ffn", name)]
    if len(dense) == len(model.blocks):
        return TRANSFORMER_TP_PLAN
    styles = {pattern: style for pattern, style in TRANSFORMER_TP_PLAN.styles.items() if ".ffn" not in pattern}
    for pattern, style in TRANSFORMER_TP_PLAN.styles.items():
        if pattern.startswith("blocks.*.ffn"):
            styles |= {name + pattern.removeprefix("blocks.*.ffn"): style for name in dense}
    optional = TRANSFORMER_TP_PLAN.optional_patterns | {pattern for pattern in styles if pattern.endswith(".gate")}
    return replace(TRANSFORMER_TP_PLAN, styles=styles, optional_patterns=optional)


def find_divisible_sizes(model: nn.Module) -> dict[str, int]:
    """Return the sizes that the number of tensor-parallel ranks must divide, by description. Empty for a model of an
    unknown family."""
    if isinstance(model, Transformer):
        attention = next(module for module in model.modules() if isinstance(module, CausalSelfAttention))
        sizes = {"attention heads": attention.num_heads, "key-value heads": attention.num_kv_heads}
        for ffn in (module for module in model.modules() if isinstance(module, FeedForward)):
            sizes["features of the feed-forward"] = ffn.up.out_features
        return sizes | {"tokens of the vocabulary": model.embedding.num_embeddings}
    plan = _plan_for_hugging_face(model)
    return {} if plan is None else {what: getattr(model.config, name) for what, name in plan.divisible_sizes.items()}


def _plan_for_hugging_face(model: nn.Module) -> TPPlan | None:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return HF_TP_PLANS.get(kind) if isinstance(kind, str) else None
