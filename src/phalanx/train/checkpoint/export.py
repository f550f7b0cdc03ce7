"""Model weights out of a checkpoint, in the shape that Hugging Face's tools and `safetensors` read."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from phalanx.errors import DataError, UsageError
from phalanx.recipe.imports import CONFIG
from phalanx.recipe.schema import Adapter
from phalanx.run import Run
from phalanx.train.adapter import A, B, folded, is_adapter, scale_of
from phalanx.train.checkpoint.format import Manifest, read_manifest
from phalanx.train.checkpoint.load import load_tensors
from phalanx.train.checkpoint.publish import sync_directory, temporary_name, write_synced

STATE_PREFIXES = ("optimizer/", "scaler/", "exchange/", "extra/", "settings/")
_FILE_BYTES = 5_000_000_000
BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
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
"""Files of a Hugging Face directory that go with its weights wherever they go."""


def is_weight(name: str) -> bool:
    """Whether a logical name is a parameter or buffer of the model."""
    return not name.startswith(STATE_PREFIXES)


def export_huggingface(checkpoint: Path, out: Path, file_bytes: int = _FILE_BYTES) -> Path:
    """Write the model's weights to the new directory `out`: `model.safetensors`, or several files of at most
    `file_bytes` with `model.safetensors.index.json`; and `config.json` when the checkpoint's meta has the recipe's
    `model`. Adapters are folded in. A model that came from a Hugging Face directory gets the tensor names, config.json
    and tokenizer files that it had there, so that `from_pretrained` reads it. `out` appears whole or not at all. It
    holds one file in memory at a time.
    UsageError when something is at `out` already; CorruptError names a bad file of the checkpoint."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out}: exists already; export writes a new directory")
    manifest = read_manifest(checkpoint)
    if not any(is_weight(name) for name in manifest.tensors):
        raise DataError(f"{checkpoint}: holds no model weights")
    temporary = temporary_name(out.absolute(), f"export-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        _write(checkpoint, manifest, temporary, file_bytes)
        sync_directory(temporary)
        os.rename(temporary, out)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    sync_directory(out.absolute().parent)
    return out


def _write(checkpoint: Path, manifest: Manifest, folder: Path, file_bytes: int) -> None:
    groups = list(_groups(manifest, file_bytes))
    single = len(groups) == 1
    origin = manifest.meta.get("model", {}).get("huggingface", {})
    renamed: dict[str, str] = origin.get("names", {})
    where: dict[str, str] = {}
    total = 0
    for number, names in enumerate(groups, 1):
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {renamed.get(name, name): t for name, t in _load(checkpoint, manifest, names).items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors lets only its owner read what it writes
        with open(folder / file, "rb") as written:
            os.fsync(written.fileno())
        where |= dict.fromkeys(tensors, file)
        total += sum(manifest.tensors[name].nbytes for name in names)
    if not single:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})
    if origin:
        _write_json(folder / CONFIG, _config(origin["config"], manifest))
        _copy_beside(Path(origin["directory"]), Run(checkpoint.absolute().parent.parent).tokenizer, folder)
    elif "model" in manifest.meta:
        _write_json(folder / CONFIG, manifest.meta["model"])


def _load(checkpoint: Path, manifest: Manifest, names: list[str]) -> dict[str, Tensor]:
    """Weights with the adapters beside them folded in."""
    paths = [name.rpartition(".")[0] for name in names if name.endswith(".weight")]
    beside = [f"{path}.{part}" for path in paths for part in (A, B) if f"{path}.{part}" in manifest.tensors]
    tensors = load_tensors(checkpoint, [*names, *beside], manifest=manifest)
    return folded(tensors, scale_of(Adapter(**manifest.meta["recipe"]["adapter"]))) if beside else tensors


def _config(config: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    """config.json with the number format of what is written: readers would round weights to another one."""
    floating = (t.torch_dtype for name, t in manifest.tensors.items() if is_weight(name))
    dtype = str(next(dtype for dtype in floating if dtype.is_floating_point)).removeprefix("torch.")
    key = "dtype" if "dtype" in config else "torch_dtype"  # the name that it had before transformers 5
    return {**config, key: dtype}


def _copy_beside(directory: Path, tokenizer: Path, folder: Path) -> None:
    """The tokenizer and what else belongs to the weights; if the directory is gone, the run's own tokenizer."""
    files = [directory / name for name in BESIDE]
    if not directory.is_dir():
        files = [tokenizer]
    for file in files:
        if file.is_file():
            write_synced(folder / file.name, file.read_bytes())


def _write_json(path: Path, value: Any) -> None:
    write_synced(path, (json.dumps(value, indent=2) + "\n").encode())


def _groups(manifest: Manifest, file_bytes: int) -> Iterator[list[str]]:
    """The weights' names, sorted, in groups for one file each; a tensor that is larger has a file of its own."""
    group: list[str] = []
    size = 0
    for name in sorted(name for name in manifest.tensors if is_weight(name) and not is_adapter(name)):
        nbytes = manifest.tensors[name].nbytes
        if group and size + nbytes > file_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += nbytes
    yield group
