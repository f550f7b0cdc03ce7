"""What an export says about itself: `export.json` for programs, and a model card, README.md, for people."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx import __version__
from phalanx.recipe.imports import huggingface_location
from phalanx.run import Run
from phalanx.run.companions import LICENSE_FILES, MODEL_CARD_FILE, read_contained
from phalanx.run.directory import write_synced
from phalanx.train.checkpoint.digest import digest_checkpoint
from phalanx.train.checkpoint.gguf import GGUF_FILE, GGUF_FORM
from phalanx.train.hf.reload import ProofCheck

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
