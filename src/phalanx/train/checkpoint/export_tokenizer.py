"""Write the tokenizer and the generation config next to exported weights and config.json.

The run directory holds the run's own tokenizer.json. If it equals the one in the Hugging Face directory that the recipe
names, the other files of that directory belong to it and are copied too; otherwise they belong to another tokenizer and
are not copied. No other directory is read, because a checkpoint of unknown origin may name any directory.
"""

import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phalanx.recipe.imports import HF_CONFIG_FILE, HF_PREFIX
from phalanx.run import Run
from phalanx.train.checkpoint.commit import write_synced

NoteFn = Callable[[str], object]
"""Receives a message about a file that was copied or skipped."""
TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
COMPANION_FILES = (
    GENERATION_CONFIG_FILE,
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a Hugging Face directory that are copied together with its weights."""
MAX_COMPANION_BYTES = 2**28
"""Maximum bytes of one such file."""


def write_companions(meta: Mapping[str, Any], run: Run, folder: Path, notes: NoteFn) -> None:
    """Copy to `folder` the tokenizer and companion files of a run that uses a Hugging Face model."""
    directory = Path(meta["model"]["huggingface"]["directory"])
    own = _read_contained(run.tokenizer, run.path, notes)
    named = _recipe_names_directory(meta, directory)
    theirs = _read_contained(directory / TOKENIZER_FILE, directory, notes) if named else None
    if own is not None and own != theirs:
        write_synced(folder / TOKENIZER_FILE, own)
        notes(f"{TOKENIZER_FILE} copied from {run.path}")
        if named and directory.is_dir():
            _write_tokenizer_config(folder, _find_separator(run.tokenizer))
        return
    if own is None and _data_section(meta).get("tokenizer") == "bytes":
        notes("no tokenizer: the run's tokens are bytes")
        return
    if not named:
        if directory.is_dir():
            notes(f"nothing copied from {directory}, which the checkpoint names and its recipe does not")
        return
    copied = []
    for name in COMPANION_FILES:
        content = theirs if name == TOKENIZER_FILE else _read_contained(directory / name, directory, notes)
        if content is not None:
            write_synced(folder / name, content)
            copied.append(name)
    if copied:
        notes(f"{', '.join(copied)} copied from {directory}")


def _data_section(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    found = meta.get("recipe", {}).get("data")
    return found if isinstance(found, Mapping) else {}


def _recipe_names_directory(meta: Mapping[str, Any], directory: Path) -> bool:
    """Whether the recipe's `model.build` is `hf:` and this directory."""
    spec = meta.get("recipe", {}).get("model") or meta["model"]
    build = str(spec.get("build", ""))
    if not build.startswith(HF_PREFIX):
        return False
    path = Path(os.path.normpath(Path(build.removeprefix(HF_PREFIX)).expanduser()))
    parts = [part for part in path.parts if part not in (os.pardir, os.curdir)]
    return parts == list(Path(os.path.normpath(directory)).parts[-len(parts) :]) if parts else True


def _read_contained(file: Path, root: Path, notes: NoteFn) -> bytes | None:
    """A regular file below `root`, if it is there; links may lead to where `root` leads, and within the cache that a
    snapshot of Hugging Face's hub is part of, nowhere else."""
    if not os.path.lexists(file):
        return None
    within = root.parent.parent if root.parent.name == "snapshots" else root
    real = file.resolve()
    if not real.is_relative_to(within.resolve()):
        notes(f"{file} not copied: it is a link that leads out of {within}")
        return None
    try:
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        notes(f"{file} not copied: {error.strerror}")
        return None
    with open(descriptor, "rb") as opened:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_COMPANION_BYTES:
            notes(f"{file} not copied: not a regular file of at most {MAX_COMPANION_BYTES >> 20} MiB")
            return None
        return opened.read()


def _write_tokenizer_config(folder: Path, separator: tuple[int, str] | None) -> None:
    """For a tokenizer.json that is not the directory's: a tokenizer_config.json by which transformers reads it, and its
    end of text in config.json, where other tokens stood."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if separator is not None:
        config["eos_token"] = separator[1]
    write_synced(folder / TOKENIZER_CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
    of_model = json.loads((folder / HF_CONFIG_FILE).read_text(encoding="utf-8"))
    end = None if separator is None else separator[0]
    tokens = {"bos_token_id": None, "pad_token_id": None, "eos_token_id": end}
    of_model.update({key: value for key, value in tokens.items() if key in of_model})
    write_synced(folder / HF_CONFIG_FILE, (json.dumps(of_model, indent=2) + "\n").encode())


def _find_separator(file: Path) -> tuple[int, str] | None:
    """The token between documents, number and text."""
    from phalanx.data.tokenizers import load_tokenizer

    number = load_tokenizer(file).separator_token
    added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens") or []
    return next(((each["id"], str(each["content"])) for each in added if each.get("id") == number), None)


def write_generation_config(meta: Mapping[str, Any], folder: Path, notes: NoteFn) -> None:
    """Copy generation_config.json to an export with another tokenizer than the directory's: without tokens, which have
    other numbers, and with the end of text of config.json."""
    directory = Path(meta["model"]["huggingface"]["directory"])
    if (folder / GENERATION_CONFIG_FILE).exists() or not _recipe_names_directory(meta, directory):
        return
    content = _read_contained(directory / GENERATION_CONFIG_FILE, directory, notes)
    values = None if content is None else json.loads(content)
    if not isinstance(values, dict):
        return
    names_tokens = ("_token_id", "_token_ids")
    kept = {
        key: value for key, value in values.items() if not key.endswith(names_tokens) and not isinstance(value, list)
    }
    end = json.loads((folder / HF_CONFIG_FILE).read_text(encoding="utf-8")).get("eos_token_id")
    kept |= {} if end is None else {"eos_token_id": end}
    write_synced(folder / GENERATION_CONFIG_FILE, (json.dumps(kept, indent=2) + "\n").encode())
    notes(f"{GENERATION_CONFIG_FILE} copied from {directory} without its tokens, which are those of another tokenizer")
