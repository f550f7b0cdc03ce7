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

KINDS = ("llama", "llama-tied", "qwen2", "qwen3", "gpt2")


def config(kind: str, **more: Any) -> Any:
    """The configuration of a kind."""
    if kind == "gpt2":
        return transformers.GPT2Config(**{**_GPT2, "bos_token_id": 1, "eos_token_id": 2, **more})
    name, _, tied = kind.partition("-")
    values = {**_LLAMA, "tie_word_embeddings": bool(tied), **({"head_dim": 8} if name == "qwen3" else {}), **more}
    return transformers.AutoConfig.for_model(name, **values)


def saved(folder: Path, kind: str, seed: int = 0, **options: Any) -> nn.Module:
    """A model of a kind with weights far from their usual start, written to `folder`, in evaluation mode."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config(kind)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(folder, **options)
    return model


def tokens(batch: int = 2, length: int = 16, seed: int = 0) -> torch.Tensor:
    """Random tokens [batch, length]."""
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
