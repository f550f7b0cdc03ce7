"""A tiny random Llama with a tokenizer and a chat template, and conversations, pairs and labelled answers for it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = ["red", "blue", "green", "black", "white", "one", "two", "three", "four", "five", "six", "seven"]


def write_chat_inputs(folder: Path, count: int = 24) -> None:
    """Write base/ (a model directory), chat.jsonl, pairs.jsonl and labels.jsonl into a folder."""
    rng = random.Random(0)

    def text(words: int) -> str:
        return " ".join(rng.choices(_WORDS, k=words))

    def turn(role: str) -> dict[str, str]:
        return {"role": role, "content": text(rng.randint(1, 6))}

    chats = [{"messages": [turn("user"), turn("assistant")] * rng.randint(1, 2)} for _ in range(count)]
    pairs = [
        {"prompt": [turn("user")], "chosen": [turn("assistant")], "rejected": [turn("assistant")]} for _ in range(count)
    ]
    labels = [{"messages": [turn("user"), turn("assistant")], "label": rng.random() < 0.5} for _ in range(count)]
    for name, records in (("chat", chats), ("pairs", pairs), ("labels", labels)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    save_chat_model(folder / "base")


def save_chat_model(folder: Path, seed: int = 0, **config: Any) -> None:
    """Write a model directory with a chat template: a tiny random Llama."""
    transformers: Any = pytest.importorskip("transformers")
    tokenizers: Any = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(_WORDS), "user assistant"], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    values = {
        "vocab_size": len(fast),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    transformers.set_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**values, **config}))
    model.save_pretrained(folder)
