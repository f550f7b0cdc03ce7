"""Model weights out of a checkpoint, in the shape that Hugging Face's tools and `safetensors` read."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from phalanx.errors import DataError, UsageError
from phalanx.recipe.imports import CONFIG
from phalanx.recipe.schema import LoraConfig
from phalanx.run import Run
from phalanx.run.directory import sync
from phalanx.train.adapter import A, B, folded, is_adapter, scale_of
from phalanx.train.checkpoint.companions import Notes, write_companions
from phalanx.train.checkpoint.format import EXTRA, Manifest, read_manifest
from phalanx.train.checkpoint.load import load_tensors
from phalanx.train.checkpoint.publish import sync_directory, temporary_name, write_synced
from phalanx.train.weight_source import aliases, plain_name

STATE_PREFIXES = ("optimizer/", "scaler/", "exchange/", EXTRA, "settings/")
_FILE_BYTES = 5_000_000_000


def is_weight(name: str) -> bool:
    """Whether a logical name is a parameter or buffer of the model."""
    return not name.startswith(STATE_PREFIXES)


def export_huggingface(checkpoint: Path, out: Path, file_bytes: int = _FILE_BYTES, notes: Notes | None = None) -> Path:
    """Write the model's weights to the new directory `out`: `model.safetensors`, or several files of at most
    `file_bytes` with `model.safetensors.index.json`; and `config.json` when the checkpoint's meta has the recipe's
    `model`. Adapters are folded in; a tied weight that has one is untied. A model that came from a Hugging Face
    directory gets the tensor names, the number of tensors and the config.json that it had there, so that
    `from_pretrained` reads it, and the run's tokenizer (`companions.py`). `out` appears whole or not at all. One
    file at most is held in memory at a time. What was copied from where, and what was not, is said to `notes`.
    UsageError when something is at `out` already; CorruptError names a bad file of the checkpoint; DataError where
    adapters or tensors cannot be brought into the form that they came in."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out}: exists already; export writes a new directory")
    manifest = read_manifest(checkpoint)
    if not any(is_weight(name) for name in manifest.tensors):
        raise DataError(f"{checkpoint}: holds no model weights")
    temporary = temporary_name(out.absolute(), f"export-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        _write(checkpoint, manifest, temporary, file_bytes, notes or _ignored)
        sync_directory(temporary)
        os.rename(temporary, out)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    sync_directory(out.absolute().parent)
    return out


def _ignored(note: str) -> None:
    """Takes notes that are not wanted."""


@dataclass(frozen=True)
class _Tensors:
    """What is written: `groups` of the checkpoint's tensors that must be in one file, each with the names that tensors
    of it get there."""

    groups: list[list[str]]
    own: Mapping[str, str]
    """The checkpoint's name of a tensor that is written twice, because it is tied no more."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    converted: Mapping[str, list[str]] = field(default_factory=dict)
    """By the first tensor of a group that others are made of: the names of those."""
    model: nn.Module | None = None


def _write(checkpoint: Path, manifest: Manifest, folder: Path, file_bytes: int, notes: Notes) -> None:
    origin = manifest.meta.get("model", {}).get("huggingface", {})
    if origin:
        _write_json(folder / CONFIG, _config(origin["config"], manifest))
    elif "model" in manifest.meta:
        _write_json(folder / CONFIG, manifest.meta["model"])
    plan = _planned(manifest, origin, folder)
    files = list(_files(plan, manifest, file_bytes))
    single = len(files) == 1
    where: dict[str, str] = {}
    total = 0
    for number, groups in enumerate(files, 1):
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for group in groups:
            tensors |= _made(checkpoint, manifest, plan, group)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors lets only its owner read what it writes
        with open(folder / file, "rb") as written:
            sync(written.fileno())
        where |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if not single:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})
    if extra := [name.removeprefix(EXTRA) for name in manifest.tensors if name.startswith(EXTRA)]:
        kind = str(manifest.meta.get("model", {}).get("build", "the model")).rpartition(":")[2]
        named = ", ".join(name or kind for name in sorted(extra))
        notes(f"what get_extra_state of {named} gives is not in the export, which holds weights")
    if origin:
        write_companions(manifest.meta, Run(checkpoint.absolute().parent.parent), folder, notes)


def _planned(manifest: Manifest, origin: Mapping[str, Any], folder: Path) -> _Tensors:
    """Which tensors are written, and how."""
    names = sorted(name for name in manifest.tensors if is_weight(name) and not is_adapter(name))
    adapted = {f"{name.rpartition('.')[0]}.weight" for name in manifest.tensors if is_adapter(name)}
    converted = {tuple(each["tensors"]): each["held"] for each in origin.get("converted", [])}
    for name in (name for group in converted for name in group):
        if name not in manifest.tensors:
            raise DataError(f"the checkpoint says that {name} was made of other tensors, and does not hold it")
    shared: Mapping[str, str] | None = origin.get("tied")  # checkpoints of before have none
    model = _model(folder) if converted or (adapted and origin and shared is None) else None
    if shared is None:
        shared = aliases(model) if model is not None else {}
    tied = sorted((adapted - set(names)) | (adapted & set(shared.values())))
    if tied and not origin:
        raise DataError(
            f"there are adapters at {tied[0]}, which is tied to another weight, so they cannot be folded in; "
            "train without the adapter there (lora.target_modules), or with a model that ties nothing"
        )
    own = _untied(shared, tied, names, folder) if tied else {}
    together = {name: list(group) for group in converted for name in group}
    groups = [[name] for name in [*names, *own] if name not in together]
    groups += [list(group) for group in converted]
    clean = _clean([*names, *own])
    return _Tensors(
        sorted(groups),
        own,
        {**{name: clean[name] for name in clean if clean[name] != name}, **origin.get("names", {})},
        {group[0]: held for group, held in converted.items()},
        model,
    )


def _model(folder: Path) -> nn.Module:
    """The architecture of the config.json that was written, without memory."""
    from phalanx.train import huggingface

    return huggingface.build(folder, {})


def _untied(owners: Mapping[str, str], tied: list[str], names: list[str], folder: Path) -> dict[str, str]:
    """Has config.json tie nothing, and says which tensor of the checkpoint a weight is that has one of its own then.
    DataError when the adapters' weights are none of them."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    _write_json(folder / CONFIG, {**config, "tie_word_embeddings": False})
    model = _model(folder)
    left = aliases(model)
    for name in tied:
        if name in left or name in left.values() or (name not in owners and name not in names):
            raise DataError(
                f"there are adapters at {name}, which {type(model).__name__} always ties to another weight, so they "
                "cannot be folded in; train without the adapter there (lora.target_modules)"
            )
    return {name: owner for name, owner in owners.items() if name not in left}


def _made(checkpoint: Path, manifest: Manifest, plan: _Tensors, group: list[str]) -> dict[str, Tensor]:
    """The tensors of a group under the names that they get, with their adapters folded in."""
    from phalanx.train.huggingface_names import reverted

    paths = [name.rpartition(".")[0] for name in group if name.endswith(".weight")]
    adapters = [f"{path}.{part}" for path in paths for part in (A, B) if f"{path}.{part}" in manifest.tensors]
    held = load_tensors(checkpoint, [*(plan.own.get(name, name) for name in group), *adapters], manifest=manifest)
    tensors = {name: held[plan.own.get(name, name)] for name in group} | {name: held[name] for name in adapters}
    if adapters:
        tensors = folded(tensors, scale_of(LoraConfig(**manifest.meta["recipe"]["lora"])))
    if group[0] in plan.converted:
        assert plan.model is not None
        return reverted(plan.model, tensors, plan.converted[group[0]])
    return {plan.renamed.get(name, name): tensor for name, tensor in tensors.items()}


def _clean(names: list[str]) -> dict[str, str]:
    """Names without what wrappers put there: those of torch, and `module.` of data parallelism, where all have it."""
    plain = {name: plain_name(name) for name in names}
    if all(name.startswith("module.") for name in plain.values()):
        plain = {name: value.removeprefix("module.") for name, value in plain.items()}
    return plain


def _config(config: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    """config.json with the number format of what is written: readers would round weights to another one."""
    floating = (t.torch_dtype for name, t in manifest.tensors.items() if is_weight(name))
    dtype = str(next(dtype for dtype in floating if dtype.is_floating_point)).removeprefix("torch.")
    key = "dtype" if "dtype" in config else "torch_dtype"  # the name that it had before transformers 5
    return {**config, key: dtype}


def _write_json(path: Path, value: Any) -> None:
    write_synced(path, (json.dumps(value, indent=2) + "\n").encode())


def _files(plan: _Tensors, manifest: Manifest, file_bytes: int) -> Iterator[list[list[str]]]:
    """The groups of each file; one that is larger has a file of its own."""
    file: list[list[str]] = []
    size = 0
    for group in plan.groups:
        nbytes = sum(manifest.tensors[plan.own.get(name, name)].nbytes for name in group)
        if file and size + nbytes > file_bytes:
            yield file
            file, size = [], 0
        file.append(group)
        size += nbytes
    yield file
