"""Run llama.cpp's converter, a script that is the first argument, so that it also takes tokenizers of one's own.

It recognizes how a tokenizer cuts texts by the tokens of a sample, and thus only published vocabularies. For others the
cutting that tokenizer.json describes is looked up here.
"""

import json
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_WORD_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST_PATTERN = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_CPP_NAMES = {
    _WORD_PATTERN + r"\p{N}{1,3}" + _REST_PATTERN: "llama-bpe",
    _WORD_PATTERN + r"\p{N}" + _REST_PATTERN: "qwen2",
}
"""What llama.cpp calls cutting by a regular expression: that of Llama 3, and that of Qwen 2 and 3."""


def name_pre_tokenizer(described: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of what a tokenizer.json describes as `pre_tokenizer`, None if it has none."""
    parts = described.get("pretokenizers", [described])
    if any(part.get("add_prefix_space") for part in parts):
        return None
    match [part["type"] for part in parts]:
        case ["ByteLevel"]:
            return "gpt-2" if parts[0].get("use_regex", True) else None
        case ["Split", "ByteLevel"]:
            return LLAMA_CPP_NAMES.get(parts[0]["pattern"].get("Regex"))
    return None


def main() -> None:
    """Run the script of sys.argv[1] with the arguments behind it."""
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    try:
        from conversion.base import TextModel
    except ImportError:  # an older converter is one file
        pass
    else:
        recognize = TextModel.get_vocab_base_pre

        def recognize_or_look_up(model: Any, tokenizer: Any) -> str:
            try:
                return str(recognize(model, tokenizer))
            except NotImplementedError:
                described = json.loads(Path(model.dir_model, "tokenizer.json").read_text(encoding="utf-8"))
                if (name := name_pre_tokenizer(described.get("pre_tokenizer") or {"type": None})) is None:
                    raise
                return name

        TextModel.get_vocab_base_pre = recognize_or_look_up
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
