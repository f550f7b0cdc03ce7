"""A tiny random LLaVA with its processor, and conversations about images for it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS_OF_IMAGE = 4
NUM_IMAGES = (1, 2, 1, 1)
"""Images of a conversation, by its number modulo their count."""


def write_image_chats(folder: Path, count: int = 12, num_images: tuple[int, ...] = NUM_IMAGES) -> None:
    """Write images.jsonl and the images that it names, img/*.png, into a folder."""
    (folder / "img").mkdir(exist_ok=True)
    rng, records = np.random.default_rng(0), []
    for number in range(count):
        paths = [f"img/{number}-{image}.png" for image in range(num_images[number % len(num_images)])]
        for path in paths:
            Image.fromarray(rng.integers(0, 255, (18 + number, 24, 3), np.uint8)).save(folder / path)
        parts = [*({"type": "image", "path": path} for path in paths), {"type": "text", "text": f"what is {number}"}]
        answer = {"role": "assistant", "content": f"it is {number * 7}"}
        records.append({"messages": [{"role": "user", "content": parts}, answer]})
    (folder / "images.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def save_processor(folder: Path) -> Any:
    """Write tokenizer, template and image preprocessing, and return the processor."""
    transformers: Any = pytest.importorskip("transformers")
    tokenizers: Any = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: number for number, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    names = ["<|im_start|>", "<image>"]
    tokenizer.add_special_tokens(["<|im_end|>", *names])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", additional_special_tokens=names
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    processor = transformers.LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        fast,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)
    return processor


def save_vision_model(folder: Path, seed: int = 0) -> None:
    """Write a model directory: a tiny random LLaVA with its processor."""
    transformers: Any = pytest.importorskip("transformers")
    tokenizer = save_processor(folder).tokenizer
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
        "projection_dim": 16,
    }
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=transformers.LlamaConfig(**text),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    transformers.set_seed(seed)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
