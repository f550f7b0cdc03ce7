"""The data and Hugging Face models that recipes of the parity matrix read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallelism_cases import BLOCKS


def write_parity_inputs(folder: Path, text: str) -> None:
    """Write a text, the same as short documents, images, and Hugging Face models into the folder of recipes."""
    (folder / "few.txt").write_text(text)
    lines = [json.dumps({"text": text[start : start + 11]}) for start in range(0, len(text), 11)]
    (folder / "documents.jsonl").write_text("\n".join(lines))
    random = np.random.default_rng(0)
    for name, shape, num_values in (("images", (200, 8, 8), 256), ("labels", (200,), 10)):
        head = b"\0\0\x08" + bytes([len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
        (folder / f"parity.{name}").write_bytes(head + random.integers(0, num_values, shape, dtype=np.uint8).tobytes())
    _save_huggingface_models(folder)


def _save_huggingface_models(folder: Path) -> None:
    tiny: Any = pytest.importorskip("tiny_huggingface")
    transformers: Any = pytest.importorskip("transformers")
    for family in ("llama", "mixtral", "gpt2"):
        layers = {"n_layer": BLOCKS} if family == "gpt2" else {"num_hidden_layers": BLOCKS}
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "mixtral" else {}
        config = tiny.make_config(family, vocab_size=257, **layers, **experts)
        transformers.set_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / f"parity-{family}")
