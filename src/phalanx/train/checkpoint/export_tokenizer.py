"""Write the tokenizer and the generation config next to exported weights and config.json.

All of them come from the run, which copied them from the directories that its recipe names when it started. No other
directory is read, because a checkpoint of unknown origin may name any directory.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from phalanx.data import DataInfo
from phalanx.errors import DataError
from phalanx.recipe.imports import HF_CONFIG_FILE
from phalanx.run import Run
from phalanx.run.companions import (
    COMPANION_FILES,
    GENERATION_CONFIG_FILE,
    IMAGE_PROCESSOR_FILES,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    NoteFn,
    read_contained,
)
from phalanx.train.checkpoint.commit import write_synced
from phalanx.train.hf.image_processor import ImageNormalization, describe_for_export, from_meta


def write_companions(meta: Mapping[str, Any], run: Run, folder: Path, notes: NoteFn) -> None:
    """Copy to `folder` the tokenizer and companion files of a run that uses a Hugging Face model."""
    own = read_contained(run.tokenizer, run.path, notes)
    contents = {name: read_contained(run.companions / name, run.path, notes) for name in COMPANION_FILES}
    copied = {name: content for name, content in {TOKENIZER_FILE: own, **contents}.items() if content is not None}
    for name, content in copied.items():
        write_synced(folder / name, content)
    if copied:
        notes(f"{', '.join(copied)} copied from {run.path}")
    described = run.read_json_or_empty(run.plan).get("tokenizer")
    described = described if isinstance(described, Mapping) else {}
    if own is None:
        if described.get("name") == "bytes":
            notes("no tokenizer: the run's tokens are bytes")
        return
    if not described.get("of_model"):
        _name_ends(folder, run, described)
        if GENERATION_CONFIG_FILE in copied and "stops" not in described:  # it came with another tokenizer
            _replace_generation_tokens(folder)
    if not copied.keys() - {TOKENIZER_FILE} and run.plan.is_file() and "of_model" not in described:
        notes(
            f"{TOKENIZER_CONFIG_FILE} and {HF_CONFIG_FILE} name the ends of a text by tokenizer.json alone, because an "
            "earlier version started the run. If its tokenizer is that of "
            f"{meta['model']['huggingface']['directory']}, copy the other files from there"
        )


def write_image_processor(meta: Mapping[str, Any], run: Run, folder: Path) -> None:
    """Write what training made of images as preprocessor_config.json, in place of what the model came with."""
    facts = run.read_json_or_empty(run.plan).get("data_info")
    followed = "image_normalization" in meta or meta.get("recipe", {}).get("task") == "classification"
    if not followed or not isinstance(facts, Mapping) or facts.get("kind") != "images":
        return
    try:
        info = TypeAdapter(DataInfo).validate_python(facts)
    except ValidationError as error:
        raise DataError(f"{run.plan}: data_info is not what data have ({error.errors()[0]['msg']})") from None
    normalization = from_meta(meta.get("image_normalization")) or ImageNormalization()
    _write_json(folder / IMAGE_PROCESSOR_FILES[0], describe_for_export(normalization, info))
    (folder / IMAGE_PROCESSOR_FILES[1]).unlink(missing_ok=True)


def _name_ends(folder: Path, run: Run, described: Mapping[str, Any]) -> None:
    """For a tokenizer that is not that of the model's directory: a tokenizer_config.json by which transformers reads
    it, where there is none, and its begin and end of a text in config.json, where other tokens stood."""
    from phalanx.data.tokenizers import HuggingFaceTokenizer, load_run_tokenizer

    tokenizer = load_run_tokenizer(run.tokenizer, described)
    begins = tokenizer.begin_tokens or HuggingFaceTokenizer(run.tokenizer).begin_tokens
    begin, end = next(iter(begins), None), tokenizer.separator_token
    if not (folder / TOKENIZER_CONFIG_FILE).is_file():
        names = {"bos_token": begin, "eos_token": end}
        config = {key: tokenizer.control_tokens[token] for key, token in names.items() if token is not None}
        _write_json(folder / TOKENIZER_CONFIG_FILE, {"tokenizer_class": "PreTrainedTokenizerFast", **config})
    of_model = json.loads((folder / HF_CONFIG_FILE).read_text(encoding="utf-8"))
    tokens = {"bos_token_id": begin, "pad_token_id": None, "eos_token_id": end}
    of_model.update({key: value for key, value in tokens.items() if key in of_model})
    _write_json(folder / HF_CONFIG_FILE, of_model)


def _replace_generation_tokens(folder: Path) -> None:
    """Leave out the tokens of generation_config.json, which have other numbers in this tokenizer, and name the end of
    text of config.json."""
    values = json.loads((folder / GENERATION_CONFIG_FILE).read_text(encoding="utf-8"))
    names_tokens = ("_token_id", "_token_ids")
    kept = {
        key: value for key, value in values.items() if not key.endswith(names_tokens) and not isinstance(value, list)
    }
    end = json.loads((folder / HF_CONFIG_FILE).read_text(encoding="utf-8")).get("eos_token_id")
    _write_json(folder / GENERATION_CONFIG_FILE, kept | ({} if end is None else {"eos_token_id": end}))


def _write_json(path: Path, value: Any) -> None:
    write_synced(path, (json.dumps(value, indent=2) + "\n").encode())
