"""Export a checkpoint for other tools, prove what was written, and record both with it: `export.json` for programs, and
a model card, README.md, for people.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from phalanx import __version__
from phalanx.app.checkpoint import select_checkpoint
from phalanx.app.export_proof import compute_reference, prove_export
from phalanx.errors import UsageError
from phalanx.recipe.imports import huggingface_location
from phalanx.run import Run
from phalanx.run.companions import LICENSE_FILES, MODEL_CARD_FILE, read_contained
from phalanx.run.directory import sync_directory, write_synced
from phalanx.train.checkpoint.compressed_tensors import QUANTIZED_FORMS
from phalanx.train.checkpoint.digest import digest_checkpoint
from phalanx.train.checkpoint.durable import make_temporary_path
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.checkpoint.format import parse_step, read_manifest
from phalanx.train.checkpoint.gguf import GGUF_FILE, GGUF_FORM, convert_to_gguf, find_converter
from phalanx.train.checkpoint.pruning import PruningRequest as PruningRequest
from phalanx.train.checkpoint.pruning import find_family
from phalanx.train.hf.reload import ProofCheck
from phalanx.train.hf.safetensors_reader import open_weight_reader
from phalanx.train.inference import set_threads
from phalanx.train.model_builder import BUILT_IN_PREFIX
from phalanx.train.tasks import BUILT_IN_TASKS

EXPORT_RECORD_FILE, RECORD_FORMAT = "export.json", 1
NOT_LOADED = (
    f"{GGUF_FILE} itself was not loaded, because llama-cpp-python is not installed (pip install 'phalanx[gguf]'): the "
    "checks are those of the weights from which it was converted"
)


@dataclass(frozen=True)
class ExportRecord:
    """The contents of export.json. `name` is the recipe's; `base_model` as the recipe names it, without directories;
    `base_license` as the base's own files name it; `dtype` that of most tensors; `files` the SHA-256 of each that holds
    the model; `proof` is empty if nothing was verified."""

    format: int
    phalanx: str
    name: str
    checkpoint: str
    checkpoint_digest: str
    data_fingerprint: str | None
    base_model: str | None
    base_license: str | None
    form: str
    dtype: str
    files: Mapping[str, str]
    proof: list[ProofCheck]
    recipe: Mapping[str, Any]


def hash_files(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a directory, by its path there."""
    hashes = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            hashes[path.relative_to(directory).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def make_record(
    checkpoint: Path, meta: Mapping[str, Any], form: str, dtype: str, files: Mapping[str, str], proof: list[ProofCheck]
) -> ExportRecord:
    """Describe an export of a checkpoint with this `meta` in its manifest."""
    recipe, model = meta.get("recipe", {}), meta.get("model", {})
    identity = (recipe.get("name", "model"), checkpoint.name, digest_checkpoint(checkpoint), meta.get("fingerprint"))
    base, base_license = huggingface_location(model.get("build", "")), None
    if base is not None:
        config = (model.get("huggingface") or {}).get("config", {})
        base_license = find_license(Run(checkpoint.absolute().parent.parent), config)
        base = base.removeprefix("hf://") if "://" in base else Path(base).name
    return ExportRecord(RECORD_FORMAT, __version__, *identity, base, base_license, form, dtype, files, proof, recipe)


def find_license(run: Run, config: Mapping[str, Any]) -> str | None:
    """Return the license of a run's base model, as its model card or config.json names it, or how its text begins."""
    described = run.read_json_or_empty(run.plan).get("tokenizer")
    if isinstance(described, dict) and not described.get("of_model", True):
        return None  # the run keeps the files of another directory

    def read(name: str) -> str:
        return (read_contained(run.companions / name, run.path) or b"").decode(errors="replace")

    named = re.match(r"---\n(?:.*\n)*?license: *[\"']?([\w.+-]+)", read(MODEL_CARD_FILE).partition("\n---")[0])
    text = " ".join(next(filter(None, map(read, LICENSE_FILES)), "").split())
    return named[1] if named else config.get("license") or text[:60] or None


def write_record(directory: Path, record: ExportRecord) -> None:
    """Write export.json and the model card."""
    write_synced(directory / EXPORT_RECORD_FILE, (json.dumps(asdict(record), indent=2) + "\n").encode())
    write_synced(directory / MODEL_CARD_FILE, format_card(record).encode())


def format_card(record: ExportRecord) -> str:
    """Return the text of README.md: the facts of a record, with the keys that the hub reads."""
    base, base_license = record.base_model, record.base_license or "not named"
    lines = [f"# {record.name}", ""]
    if base is not None:
        hub_license = "other" if " " in base_license else base_license
        lines = ["---", "library_name: transformers", f"base_model: {base}", f"license: {hub_license}", "---", *lines]
        lines.append(f"- Base model: {base}, license: {base_license}")
    lines += [
        f"- Form: {record.form}, {record.dtype}",
        f"- Checkpoint: {record.checkpoint}, digest `{record.checkpoint_digest}`",
        f"- Data: fingerprint `{record.data_fingerprint}`",
        f"- Written by Phalanx {record.phalanx}; `{EXPORT_RECORD_FILE}` has the recipe and the SHA-256 of each file",
        *("", "## Proof", ""),
    ]
    if not record.proof:
        return "\n".join([*lines, "None: it was exported with `--no-verify`.", ""])
    is_loaded = record.form != GGUF_FORM or any(check.name.startswith(GGUF_FORM) for check in record.proof)
    lines += [
        "What was written was reloaded and compared with the checkpoint." if is_loaded else f"Note: {NOT_LOADED}."
    ]
    lines += ["", "| check | result | found |"]
    cells = ((each.name, "PASS" if each.passed else "FAIL", each.found.replace("|", "&#124;")) for each in record.proof)
    return "\n".join([*lines, "|---|---|---|", *(f"| {' | '.join(row)} |" for row in cells), ""])


@dataclass(frozen=True)
class ExportOutcome:
    """What was written to `directory`: OUT, or OUT.failed if a check failed."""

    checkpoint: Path
    directory: Path
    files: list[str]
    notes: list[str]
    checks: list[ProofCheck]


def export_checkpoint(
    source: str,
    out: Path,
    step: int | None = None,
    form_name: str = "safetensors",
    dtype: str | None = None,
    verify: bool = True,
    trust_code: bool = False,
    weights: str | None = None,
    request: PruningRequest | None = None,
) -> ExportOutcome:
    """Export the checkpoint of `step`, by default the newest, of a run or URL to the new directory `out`, which appears
    once its proof has passed; if that fails, as `OUT.failed`. `form_name` is safetensors, peft, gguf or one of
    QUANTIZED_FORMS, `dtype` fp32, bf16 or fp16; by default each weight has the dtype that it came with. `verify`: prove
    it, if needed with code of the run's own (`trust_code`). `weights`: model or ema; by default those that were
    evaluated. A `request` makes the model smaller. The many parameters are the options of the commands.

    Raises UsageError if `out` exists, the form does not fit the model or what the proof needs is not there, and
    DataError if the checkpoint or the run's data are damaged."""
    final, failed = out.absolute(), out.absolute().with_name(f"{out.name}.failed")
    if final.exists() and not (final.is_dir() and not any(final.iterdir())):
        raise UsageError(f"{out}: exists already; export writes a new directory")
    if failed.exists():
        raise UsageError(f"{failed}: exists already, from an export that failed its proof; remove it first")
    checkpoint = select_checkpoint(source, step)
    if form_name == "peft":
        written = export_huggingface(checkpoint, out, form="peft", weights=weights)
        note = "the adapter alone is not compared with the checkpoint's model; --form safetensors is"
        return ExportOutcome(checkpoint, written, sorted(file.name for file in written.iterdir()), [note], [])
    form = QUANTIZED_FORMS.get(form_name)
    meta, run = read_manifest(checkpoint).meta, Run(checkpoint.absolute().parent.parent)
    model, recipe = meta.get("model", {}), meta.get("recipe", {})
    if isinstance(num_threads := recipe.get("num_threads"), int) and num_threads > 0:
        set_threads(num_threads)
    notes, reference = list[str](), None
    family = None if request is None else find_family(model)
    is_built_in = model.get("build", "").startswith(BUILT_IN_PREFIX) and recipe.get("task") in list(BUILT_IN_TASKS)
    if form_name == GGUF_FORM and not (model.get("huggingface") and run.tokenizer.is_file()):
        why = "the converter needs a model of transformers (model.build: hf:PATH) and a tokenizer.json (data.tokenizer)"
        raise UsageError(f"{source}: --form gguf: {why}; use --form safetensors")
    converter = find_converter() if form_name == GGUF_FORM else None
    needed = None
    if form is not None and find_spec("compressed_tensors") is None:
        needed = "compressed-tensors, which is not installed: pip install 'phalanx[compressed-tensors]'"
    elif (model.get("huggingface") or family is not None) and not run.plan.is_file():
        needed = "the directory of its run, with plan.json: give that"
    if verify and needed:
        raise UsageError(f"{source}: the proof of an export needs {needed}, or export with --no-verify")
    if verify and (model.get("huggingface") or family is not None or (is_built_in and run.plan.is_file())):
        reference = compute_reference(run, parse_step(checkpoint.absolute()), trust_code, weights, form, request)
    elif verify:
        notes.append("not compared with the checkpoint's model: only the run's directory or own code can call it")
    temporary = make_temporary_path(final, "unproved")
    shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, temporary, ignore_errors=True)
        pruning = None if reference is None else reference.pruning
        export_huggingface(checkpoint, temporary, None, notes.append, dtype, form, weights, pruning)
        weights_dtype = open_weight_reader(temporary).find_main_dtype()
        if converter is not None:
            convert_to_gguf(converter, temporary, weights_dtype)
        hashes = hash_files(temporary)
        checks = [] if reference is None else prove_export(reference, temporary, form, weights_dtype)
        if verify:
            changed = [name for name, value in hash_files(temporary).items() if hashes.get(name) != value]
            found = f"{', '.join(changed)} changed after it was written" if changed else f"{len(hashes)} as written"
            checks.append(ProofCheck("files", not changed, found))
        if converter is not None and all(check.passed for check in checks):
            for name in hashes.keys() - {GGUF_FILE, *LICENSE_FILES}:  # what it was converted from
                del hashes[name]
                (temporary / name).unlink()
            if reference is not None and not any(check.name.startswith(GGUF_FORM) for check in checks):
                notes.append(NOT_LOADED)
        write_record(temporary, make_record(checkpoint, meta, form_name, weights_dtype, hashes, checks))
        sync_directory(temporary)
        directory = final if all(check.passed for check in checks) else failed
        os.rename(temporary, directory)
        undo.pop_all()
    sync_directory(directory.parent)
    if pruning is not None and directory is final:
        sizes = " ".join(f"model.args.{key}={size}" for key, size in pruning.describe_args().items())
        start = f"model.build=hf:{final}" if model.get("huggingface") else f"init_from=hf:{final} {sizes}"
        notes.append(
            f"recover the loss: phalanx train RECIPE {start} 'task={{kind: distillation, teacher: {run.path}}}'"
        )
    files = sorted(file.name for file in directory.iterdir())
    return ExportOutcome(checkpoint, directory, files, notes, checks)
