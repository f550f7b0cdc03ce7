"""Model weights out of a checkpoint, in the shape that Hugging Face's tools and `safetensors` read."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from phalanx.errors import DataError, UsageError
from phalanx.train.checkpoint.format import Manifest, read_manifest
from phalanx.train.checkpoint.load import load_tensors
from phalanx.train.checkpoint.publish import sync_directory, temporary_name, write_synced

STATE_PREFIXES = ("optimizer/", "scaler/", "exchange/")
_FILE_BYTES = 5_000_000_000


def is_weight(name: str) -> bool:
    """Whether a logical name is a parameter or buffer of the model."""
    return not name.startswith(STATE_PREFIXES)


def export_huggingface(checkpoint: Path, out: Path, file_bytes: int = _FILE_BYTES) -> Path:
    """Write the model's weights to the new directory `out`: `model.safetensors`, or several files of at most
    `file_bytes` with `model.safetensors.index.json`; and `config.json` when the checkpoint's meta has the recipe's
    `model`. `out` appears whole or not at all. It holds one file in memory at a time.
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
    where: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = load_tensors(checkpoint, names, manifest=manifest)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors lets only its owner read what it writes
        with open(folder / file, "rb") as written:
            os.fsync(written.fileno())
        where |= dict.fromkeys(names, file)
    if not single:
        total = sum(manifest.tensors[name].nbytes for name in where)
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})
    if "model" in manifest.meta:
        _write_json(folder / "config.json", manifest.meta["model"])


def _write_json(path: Path, value: Any) -> None:
    write_synced(path, (json.dumps(value, indent=2) + "\n").encode())


def _groups(manifest: Manifest, file_bytes: int) -> Iterator[list[str]]:
    """The weights' names, sorted, in groups for one file each; a tensor that is larger has a file of its own."""
    group: list[str] = []
    size = 0
    for name in sorted(filter(is_weight, manifest.tensors)):
        nbytes = manifest.tensors[name].nbytes
        if group and size + nbytes > file_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += nbytes
    yield group
