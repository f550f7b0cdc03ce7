"""Export model weights from a checkpoint to the format of Hugging Face's tools and `safetensors`, with tokenizer and
generation config.

All of them come from the run, which copied them from the directories that its recipe names when it started. No other
directory is read, because a checkpoint of unknown origin may name any directory.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from phalanx.data import DataInfo
from phalanx.errors import DISK_FULL_ERRNOS, DataError, UsageError
from phalanx.recipe.imports import HF_CONFIG_FILE
from phalanx.recipe.schema import AdapterConfig
from phalanx.run import Run
from phalanx.run.companions import (
    COMPANION_FILES,
    GENERATION_CONFIG_FILE,
    IMAGE_PROCESSOR_FILES,
    MODEL_CARD_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    NoteFn,
    read_contained,
)
from phalanx.run.directory import fsync_if_supported, sync_directory, write_synced
from phalanx.train.adapters.lora import adapter_scale, merge_adapters
from phalanx.train.adapters.quantized_base import dequantize
from phalanx.train.adapters.targets import (
    adapted_weight_name,
    adapter_names,
    is_adapter_name,
    is_added_name,
    scale_name,
)
from phalanx.train.checkpoint.compressed_tensors import QuantizedForm, choose_layers
from phalanx.train.checkpoint.durable import make_temporary_path
from phalanx.train.checkpoint.format import CheckpointManifest, FloatDtype, TensorRecord, read_manifest
from phalanx.train.checkpoint.load import batch_by_bytes, choose_weights, load_tensors
from phalanx.train.checkpoint.peft_files import write_peft_adapter
from phalanx.train.checkpoint.pruning import PruningPlan
from phalanx.train.distributed.module_state import EXTRA_STATE_PREFIX
from phalanx.train.hf.config import DTYPE_KEYS, QUANTIZATION_KEY
from phalanx.train.hf.image_processor import ImageNormalization, describe_for_export, from_meta
from phalanx.train.hf.model import build_on_meta
from phalanx.train.hf.safetensors_reader import find_tied_names, revert_conversion, strip_wrapper_parts

STATE_PREFIXES = ("optimizer/", "scaler/", "grad_sync/", "local_sgd/", EXTRA_STATE_PREFIX, "settings/")
EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MAX_FILE_BYTES = 5_000_000_000


def is_weight_name(name: str) -> bool:
    """Return whether a logical name is that of a parameter or buffer of the model."""
    return not name.startswith(STATE_PREFIXES)


def export_huggingface(
    checkpoint: Path,
    out: Path,
    file_bytes: int | None = None,
    notes: NoteFn | None = None,
    dtype: str | None = None,
    form: QuantizedForm | Literal["peft"] | None = None,
    weights: str | None = None,
    pruning: PruningPlan | None = None,
) -> Path:
    """Write the model's weights to the new directory `out`: `model.safetensors`, or several files of at most
    `file_bytes` with `model.safetensors.index.json`; and `config.json` if the checkpoint's metadata has the recipe's
    `model`. Weights are rounded once, after merging, to `dtype` (fp32, bf16 or fp16); by default each has the dtype of
    the original. Adapters are merged; a tied weight with an adapter is untied. A model that came from a Hugging Face
    directory gets the original tensor names, number of tensors and config.json, so that `from_pretrained` reads it, and
    the run's tokenizer. With a quantized `form` its linear layers are quantized; with peft only the adapter is written
    (`peft_files.py`); with `pruning` only what that keeps. `out` appears atomically. At most one file is in memory at a
    time. `notes` receives messages about files that were copied or skipped. `weights` as in `choose_weights`. The
    parameters are those of the command.

    Raises UsageError if `out` exists, the disk is full or `form` does not fit the model, CorruptCheckpointError, which
    names a bad file of the checkpoint, and DataError if adapters or tensors cannot be converted back to their original
    form, or a weight is too large for the dtype."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out}: exists already; export writes a new directory")
    manifest = choose_weights(read_manifest(checkpoint), weights, checkpoint)
    if not any(is_weight_name(name) for name in manifest.tensors):
        raise DataError(f"{checkpoint}: holds no model weights")
    temporary = make_temporary_path(out.absolute(), f"export-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, temporary)
            if form == "peft":
                write_peft_adapter(checkpoint, manifest, temporary)
            else:
                note = notes or (lambda text: None)
                _write_export(checkpoint, manifest, temporary, file_bytes, note, dtype, form, pruning)
            sync_directory(temporary)
            os.rename(temporary, out)
            undo.pop_all()
        sync_directory(out.absolute().parent)
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise UsageError(f"{out}: cannot be written: {error.strerror}") from error
    return out


@dataclass(frozen=True)
class _Dtypes:
    """The dtypes of exported floating-point tensors: `main`, None for those of the checkpoint, and `others` by name."""

    main: torch.dtype | None = None
    others: Mapping[str, torch.dtype] = field(default_factory=dict)

    def round(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor in its exported dtype. Raises DataError if that has no such large numbers."""
        dtype = self.others.get(name, self.main)
        if dtype is None or not tensor.is_floating_point():
            return tensor
        rounded = tensor.to(dtype)
        if dtype == torch.float16 and bool((rounded.isinf() & tensor.isfinite()).any()):
            raise DataError(f"{name}: has values that fp16 cannot hold (above 65504); use --dtype bf16 or fp32")
        return rounded


def _choose_dtypes(origin: Mapping[str, Any], dtype: str | None) -> _Dtypes:
    """Choose `dtype` for all but the tensors that the model keeps in fp32, or else the dtypes of the original."""
    if dtype is not None:
        return _Dtypes(EXPORT_DTYPES[dtype], dict.fromkeys(origin.get("kept_in_fp32", ()), torch.float32))
    if not origin:
        return _Dtypes()
    config = origin["config"]
    declared = config.get("dtype") or config.get("torch_dtype")  # of checkpoints without the files' dtype
    name = origin.get("dtype") or (declared if declared in get_args(FloatDtype) else "float32")
    others = {key: getattr(torch, other) for key, other in origin.get("dtypes", {}).items()}
    return _Dtypes(getattr(torch, name), others)


@dataclass(frozen=True)
class _ExportPlan:
    """The contents of an export: `groups` of the checkpoint's tensors that must be in one file, each with the names of
    its tensors in the export."""

    groups: list[list[str]]
    source_names: Mapping[str, str]
    """Name in the checkpoint of each tensor that is written twice, because it is not tied any more."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    converted: Mapping[str, list[str]] = field(default_factory=dict)
    """Names of the original tensors that each group is converted back to, by the group's first tensor."""
    model: nn.Module | None = None
    dtypes: _Dtypes = _Dtypes()
    form: QuantizedForm | None = None
    quantized: frozenset[str] = frozenset()
    """Exported names of the weights that `form` quantizes."""

    def convert(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return what is written of a tensor, by name. Raises DataError if its dtype has no such large numbers."""
        if self.form is None or name not in self.quantized:
            return {name: self.dtypes.round(name, tensor)}
        scale_dtype = self.dtypes.others.get(name, self.dtypes.main) or tensor.dtype
        stem = name.removesuffix("weight")
        return {stem + suffix: part for suffix, part in self.form.quantize(tensor.float(), scale_dtype).items()}

    def count_bytes(self, tensor: TensorRecord) -> int:
        """Return the bytes of a checkpoint's tensor in an export."""
        dtype = self.dtypes.main
        if tensor.torch_dtype in (torch.int8, torch.uint8):  # a quantized weight, in uint8 two in a byte
            dtype = dtype or torch.float32
            return math.prod(tensor.shape) * dtype.itemsize * (2 if tensor.torch_dtype == torch.uint8 else 1)
        if dtype is None or not tensor.torch_dtype.is_floating_point:
            return tensor.nbytes
        return math.prod(tensor.shape) * dtype.itemsize


def _write_export(
    checkpoint: Path,
    manifest: CheckpointManifest,
    folder: Path,
    file_bytes: int | None,
    notes: NoteFn,
    dtype: str | None,
    form: QuantizedForm | None,
    pruning: PruningPlan | None,
) -> None:
    origin = manifest.meta.get("model", {}).get("huggingface", {})
    dtypes = _choose_dtypes(origin, dtype)
    config = manifest.meta.get("model")
    if origin:
        config = _config_with_dtype(origin["config"], dtypes.main or torch.float32)
    if config is not None:
        _write_json(folder / HF_CONFIG_FILE, config if pruning is None else pruning.edit_config(config))
    plan = replace(_plan_export(manifest, origin, folder), dtypes=dtypes)
    if form is not None:
        plan = _quantize_plan(plan, form, origin, folder)

    def count_bytes(group: list[str]) -> int:
        return sum(plan.count_bytes(manifest.tensors[plan.source_names.get(name, name)]) for name in group)

    file_bytes = file_bytes or origin.get("file_bytes") or _MAX_FILE_BYTES
    files = list(batch_by_bytes(plan.groups, count_bytes, file_bytes)) or [[]]
    single = len(files) == 1
    where: dict[str, str] = {}
    total = 0
    for number, groups in enumerate(files, 1):
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for group in groups:
            for name, tensor in _make_group_tensors(checkpoint, manifest, plan, group).items():
                for key, part in plan.convert(name, tensor).items():
                    tensors |= {key: part} if pruning is None else pruning.convert(key, part)
        _save_tensors(tensors, folder / file)
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors creates files that only the owner can read
        with open(folder / file, "rb") as written:
            fsync_if_supported(written.fileno())
        where |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if not single:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})
    if extra := [
        name.removeprefix(EXTRA_STATE_PREFIX) for name in manifest.tensors if name.startswith(EXTRA_STATE_PREFIX)
    ]:
        kind = str(manifest.meta.get("model", {}).get("build", "the model")).rpartition(":")[2]
        named = ", ".join(name or kind for name in sorted(extra))
        notes(f"what get_extra_state of {named} gives is not in the export, which holds weights")
    if unused := origin.get("unused"):
        count = f"{len(unused)} tensors" if len(unused) > 1 else "1 tensor"
        are = "are" if len(unused) > 1 else "is"
        notes(f"{count} of the original that the model does not use {are} not in the export ({unused[0]})")
    if origin:
        run = Run(checkpoint.absolute().parent.parent)
        write_companions(manifest.meta, run, folder, notes)
        write_image_processor(manifest.meta, run, folder)
        _write_pooling(manifest.meta.get("recipe", {}), json.loads((folder / HF_CONFIG_FILE).read_bytes()), folder)


def _write_pooling(recipe: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> None:
    """Write what sentence-transformers reads besides a model of embeddings: its modules, pooling and longest text."""
    task = recipe.get("task")
    if not isinstance(task, Mapping) or task.get("kind") != "embedding":
        return
    kinds = "sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling"
    paths = "", "1_Pooling"
    described = [{"idx": i, "name": str(i), "path": paths[i], "type": kinds[i]} for i in range(2)]
    width = config.get("hidden_size") or config.get("dim") or config.get("n_embd")
    pooling = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
    modes = {f"pooling_mode_{mode}": name == task["pooling"] for name, mode in pooling.items()}
    (folder / "1_Pooling").mkdir()
    _write_json(folder / "1_Pooling" / HF_CONFIG_FILE, {"word_embedding_dimension": width, **modes})
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": recipe["data"]["seq_len"]})
    _write_json(folder / "modules.json", described)


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # it has the number of a failed write in its text only
        if (found := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def _plan_export(manifest: CheckpointManifest, origin: Mapping[str, Any], folder: Path) -> _ExportPlan:
    """Plan which tensors are written, and under which names."""
    names = sorted(name for name in manifest.tensors if is_weight_name(name) and not is_added_name(name))
    adapted = {adapted_weight_name(name) for name in manifest.tensors if is_adapter_name(name)}
    converted = {tuple(each["tensors"]): each["held"] for each in origin.get("converted", [])}
    for name in (name for group in converted for name in group):
        if name not in manifest.tensors:
            raise DataError(f"the checkpoint says that {name} was made of other tensors, and does not hold it")
    shared: Mapping[str, str] | None = origin.get("tied")  # missing in older checkpoints
    model = build_on_meta(folder, {}) if converted or (adapted and origin and shared is None) else None
    if shared is None:
        shared = find_tied_names(model) if model is not None else {}
    tied = sorted((adapted - set(names)) | (adapted & set(shared.values())))
    if tied and not origin:
        raise DataError(
            f"there are adapters at {tied[0]}, which is tied to another weight, so they cannot be folded in; "
            "train without the adapter there (adapter.target_modules), or with a model that ties nothing"
        )
    source_names = _untie_weights(shared, tied, names, folder) if tied else {}
    converted_groups = {name: list(group) for group in converted for name in group}
    groups = [[name] for name in [*names, *source_names] if name not in converted_groups]
    groups += [list(group) for group in converted]
    clean = {name: strip_wrapper_parts(name) for name in [*names, *source_names]}
    if all(name.startswith("module.") for name in clean.values()):  # of DataParallel
        clean = {name: value.removeprefix("module.") for name, value in clean.items()}
    return _ExportPlan(
        sorted(groups),
        source_names,
        {**{name: clean[name] for name in clean if clean[name] != name}, **origin.get("names", {})},
        {group[0]: file_names for group, file_names in converted.items()},
        model,
    )


def _quantize_plan(plan: _ExportPlan, form: QuantizedForm, origin: Mapping[str, Any], folder: Path) -> _ExportPlan:
    """Add to a plan which weights are quantized, and say so in config.json. Raises UsageError if none can be."""
    if not origin or plan.converted:
        why = "its files hold other tensors than the model" if origin else "it did not come with model.build: hf:PATH"
        raise UsageError(f"--form: servers cannot load this model quantized, because {why}; use safetensors")
    layers, ignored = choose_layers(form, build_on_meta(folder, {}))
    config = json.loads((folder / HF_CONFIG_FILE).read_text(encoding="utf-8"))
    _write_json(folder / HF_CONFIG_FILE, {**config, QUANTIZATION_KEY: form.describe(ignored)})
    names = [f"{layer}.weight" for layer in layers]
    return replace(plan, form=form, quantized=frozenset(plan.renamed.get(name, name) for name in names))


def _untie_weights(owners: Mapping[str, str], tied: list[str], names: list[str], folder: Path) -> dict[str, str]:
    """Untie the weights in config.json; return the checkpoint's tensor for each weight that is then separate. Raises
    DataError if the adapters' weights are not among them."""
    config = json.loads((folder / HF_CONFIG_FILE).read_text(encoding="utf-8"))
    _write_json(folder / HF_CONFIG_FILE, {**config, "tie_word_embeddings": False})
    model = build_on_meta(folder, {})
    still_tied = find_tied_names(model)
    for name in tied:
        if name in still_tied or name in still_tied.values() or (name not in owners and name not in names):
            raise DataError(
                f"there are adapters at {name}, which {type(model).__name__} always ties to another weight, so they "
                "cannot be folded in; train without the adapter there (adapter.target_modules)"
            )
    return {name: owner for name, owner in owners.items() if name not in still_tied}


def _make_group_tensors(
    checkpoint: Path, manifest: CheckpointManifest, plan: _ExportPlan, group: list[str]
) -> dict[str, Tensor]:
    """Return the tensors of a group under their exported names, with adapters merged."""
    adapters = [name for weight in group for name in adapter_names(weight) if name in manifest.tensors]
    sources = [plan.source_names.get(name, name) for name in group]
    scales = {name: scale for name in sources if (scale := scale_name(name)) in manifest.tensors}
    loaded = load_tensors(checkpoint, [*sources, *adapters, *scales.values()], manifest=manifest)
    loaded |= {name: dequantize(loaded[name], loaded[scale]) for name, scale in scales.items()}
    tensors = {name: loaded[source] for name, source in zip(group, sources, strict=True)}
    if adapters:
        tensors |= {name: loaded[name] for name in adapters}
        tensors = merge_adapters(tensors, adapter_scale(read_adapter_config(manifest)))
    if group[0] in plan.converted:
        assert plan.model is not None
        return revert_conversion(plan.model, tensors, plan.converted[group[0]])
    return {plan.renamed.get(name, name): tensor for name, tensor in tensors.items()}


def read_adapter_config(manifest: CheckpointManifest) -> AdapterConfig:
    """Return `adapter` of the recipe in a checkpoint with adapters. Raises DataError if there is none."""
    config = manifest.meta.get("recipe", {}).get("adapter")
    if config is None:
        raise DataError(
            "the checkpoint holds adapters, and its recipe has no key `adapter`: it was written by an earlier version, "
            "with which it can be exported"
        )
    return AdapterConfig(**config)


def _config_with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return config.json with the dtype of the exported weights; otherwise readers would convert them."""
    name = str(dtype).removeprefix("torch.")
    parts = {
        key: _config_with_dtype(part, dtype)
        for key, part in config.items()
        if isinstance(part, dict) and not part.keys().isdisjoint(DTYPE_KEYS)  # of a part of the model
    }
    keys = [key for key in DTYPE_KEYS if key in config] or [DTYPE_KEYS[-1]]
    return {**config, **parts, **dict.fromkeys(keys, name)}


def _write_json(path: Path, value: Any) -> None:
    write_synced(path, (json.dumps(value, indent=2) + "\n").encode())


def write_companions(meta: Mapping[str, Any], run: Run, folder: Path, notes: NoteFn) -> None:
    """Copy to `folder` the tokenizer and companion files of a run that uses a Hugging Face model."""
    own = read_contained(run.tokenizer, run.path, notes)
    names = [name for name in COMPANION_FILES if name != MODEL_CARD_FILE]
    contents = {name: read_contained(run.companions / name, run.path, notes) for name in names}
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
            if GENERATION_CONFIG_FILE in copied:
                _replace_generation_tokens(folder)
        return
    if not described.get("of_model"):
        _name_ends(folder, run, described)
        if GENERATION_CONFIG_FILE in copied and "stops" not in described:  # it came with another tokenizer
            _replace_generation_tokens(folder)
    if "end_of_turn" in described:
        _add_generation_end(folder, described["end_of_turn"])
    if not copied.keys() - {TOKENIZER_FILE} and run.plan.is_file() and "of_model" not in described:
        notes(
            f"{TOKENIZER_CONFIG_FILE} and {HF_CONFIG_FILE} name the ends of a text by tokenizer.json alone, because an "
            "earlier version started the run. If its tokenizer is that of "
            f"{meta['model']['huggingface']['directory']}, copy the other files from there"
        )


def _add_generation_end(folder: Path, token: int) -> None:
    """Let generation stop at a token as well: at the end of an answer, which a base that never saw a conversation does
    not name."""
    path = folder / GENERATION_CONFIG_FILE
    values = json.loads((path if path.is_file() else folder / HF_CONFIG_FILE).read_text(encoding="utf-8"))
    if not path.is_file():  # what transformers takes of config.json then, of a vision-language model of its text part
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        owners = (values.get("text_config", {}), values)
        values = {key: owner[key] for owner in owners for key in keys if owner.get(key) is not None}
    named = values.get("eos_token_id")
    ends = named if isinstance(named, list) else [] if named is None else [named]
    if token in ends:
        return
    _write_json(path, {**values, "eos_token_id": [*ends, token]})


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

    tokenizer = load_run_tokenizer(run.tokenizer, described, run.companions)
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
