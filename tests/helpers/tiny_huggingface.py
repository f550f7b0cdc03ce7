"""Tiny random Hugging Face models, saved by transformers itself, for tests of what reads and writes directories."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers: Any = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

VOCAB, LAYERS = 96, 2
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}

MODEL_KINDS = ("llama", "llama-tied", "qwen2", "qwen3", "gpt2")


def make_config(kind: str, **more: Any) -> Any:
    """The configuration of a kind."""
    if kind == "gpt2":
        return transformers.GPT2Config(**{**_GPT2, "bos_token_id": 1, "eos_token_id": 2, **more})
    name, _, tied = kind.partition("-")
    values = {**_LLAMA, "tie_word_embeddings": bool(tied), **({"head_dim": 8} if name == "qwen3" else {}), **more}
    return transformers.AutoConfig.for_model(name, **values)


def save_random_model(folder: Path, kind: str, seed: int = 0, **options: Any) -> nn.Module:
    """A model of a kind with weights far from their usual start, written to `folder`, in evaluation mode."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(make_config(kind)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(folder, **options)
    return model


def save_chat_model(folder: Path, template: str) -> None:
    """A tiny random model with a byte-level tokenizer and a chat template, whose end of turn `<|end|>` (token 3) is not
    its end of text (token 1)."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<|bos|>", "<|eos|>", "<|start|>", "<|end|>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=260, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["a"], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[(special[0], 0)]
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1])
    fast.chat_template = template
    config = make_config("llama", vocab_size=260, max_position_embeddings=256, bos_token_id=0, eos_token_id=1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def random_tokens(batch: int = 2, length: int = 16, seed: int = 0) -> torch.Tensor:
    """Random tokens [batch, length]."""
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


_TINY = {**_LLAMA, "pad_token_id": 0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_OLD = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
WINDOW_TOKENS = 5
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("Bloom", _OLD),
    "cohere2": ("Cohere2", {"sliding_window": WINDOW_TOKENS, "layer_types": ["sliding_attention", "full_attention"]}),
    "deepseek-v2": ("DeepseekV2", _LATENT),
    "deepseek-v3": ("DeepseekV3", _LATENT),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0},
    ),
    "falcon": ("Falcon", {}),
    "flex-olmo": ("FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": WINDOW_TOKENS}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 8, "sliding_window": WINDOW_TOKENS, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "glm4-moe": ("Glm4Moe", {**_LATENT, "n_shared_experts": 1, "head_dim": 8}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": WINDOW_TOKENS},
    ),
    "gpt2": ("GPT2", _OLD),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "jamba": ("Jamba", {"num_experts": 4, "mamba_d_state": 4, "attn_layer_offset": 1, "attn_layer_period": 2}),
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama4": (
        "Llama4",
        {
            "num_local_experts": 4,
            "intermediate_size_mlp": 64,
            "head_dim": 8,
            "attention_chunk_size": WINDOW_TOKENS,
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "mamba": ("Mamba", {"state_size": 4}),
    "minimax": ("MiniMax", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "block_size": 4}),
    "mistral": ("Mistral", {"sliding_window": WINDOW_TOKENS}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": WINDOW_TOKENS}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "opt": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "phi3": ("Phi3", {"sliding_window": WINDOW_TOKENS}),
    "phimoe": ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW_TOKENS, "max_window_layers": 1}),
    "qwen2-moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 8}),
    "smollm3": ("SmolLM3", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW_TOKENS}),
}
"""Families of transformers, by the first part of their class's name and what makes them tiny. Those with windows have
some that are shorter than a sample."""


def build_random_model(name: str, seed: int = 0) -> nn.Module:
    """A tiny causal model of an architecture, with weights far from their usual start, in evaluation mode."""
    family, values = ARCHITECTURES[name]
    wanted = next(
        getattr(transformers, f"{family}{suffix}")
        for suffix in ("TextConfig", "Config")
        if hasattr(transformers, f"{family}{suffix}")
    )
    kind = next(
        getattr(transformers, f"{family}{suffix}")
        for suffix in ("ForCausalLM", "LMHeadModel")
        if hasattr(transformers, f"{family}{suffix}")
    )
    torch.manual_seed(seed)
    model: nn.Module = kind(wanted(**{**_TINY, **values})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model
