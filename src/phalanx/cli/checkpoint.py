"""`phalanx checkpoint`: look at the checkpoints of a run, verify them, take their digest, export their weights."""

import json
import re
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx import formatting
from phalanx.errors import DataError, ExitCode, UsageError
from phalanx.std_streams import escape_control_chars

app = typer.Typer(add_completion=False, no_args_is_help=True, help="List, verify, digest and export checkpoints.")

PathArgument = Annotated[
    Path, typer.Argument(metavar="RUN|CHECKPOINT", help="Run directory, or one of its checkpoints.")
]
StepOption = Annotated[
    int | None, typer.Option("--step", min=0, max=10**10, help="Step of the checkpoint; default: the newest.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class ExportFormat(StrEnum):
    """What an export is for."""

    HF = "hf"


@app.command("ls")
def list_command(path: PathArgument, as_json: JsonOption = False) -> None:
    """List checkpoints, newest first.

    To check their data, use `verify`."""
    found = _find_checkpoints(path)
    best = _read_best_step(found[0].parent)
    rows = [_describe_checkpoint(checkpoint, best) for checkpoint in found]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'step':>9}  {'written':19}  {'size':>10}  {'samples':>12}  {'tensors':>7}")
    for row in rows:
        if row["damaged"]:
            print(f"{row['step']:>9}  {row['written']:19}  damaged: {row['damaged']}")
        else:
            mark = "  best" if row["best"] else ""
            size = formatting.format_bytes(row["bytes"])
            samples = "" if row["samples"] is None else f"{row['samples']:,}"
            print(f"{row['step']:>9}  {row['written']:19}  {size:>10}  {samples:>12}  {row['tensors']:>7}{mark}")


@app.command()
def verify(path: PathArgument, step: StepOption = None, as_json: JsonOption = False) -> None:
    """Verify every byte of a checkpoint against its checksums.

    Exits with 65 and names the file if one is damaged."""
    from phalanx.train.checkpoint import CorruptCheckpointError
    from phalanx.train.checkpoint import verify_checkpoint as read_all

    checkpoint = _choose_checkpoint(path, step)
    began = time.perf_counter()
    try:
        manifest = read_all(checkpoint)
    except CorruptCheckpointError as error:
        if not as_json:
            raise
        print(json.dumps({"path": str(checkpoint), "ok": False, "file": error.file.name, "reason": error.reason}))
        raise typer.Exit(ExitCode.DATA) from None
    seconds = time.perf_counter() - began
    if as_json:
        print(json.dumps({"path": str(checkpoint), "ok": True, "bytes": manifest.nbytes, "seconds": seconds}))
    else:
        files = formatting.format_plural(len(manifest.files), "file")
        print(
            f"ok  {checkpoint}: {formatting.format_bytes(manifest.nbytes)} in {files}, "
            f"{formatting.format_duration(seconds)}"
        )


@app.command()
def digest(path: PathArgument, step: StepOption = None, as_json: JsonOption = False) -> None:
    """Print the digest of a checkpoint's state.

    Two runs are bit-identical if their digests are equal."""
    from phalanx.train.checkpoint import digest_checkpoint

    checkpoint = _choose_checkpoint(path, step)
    value = digest_checkpoint(checkpoint)
    print(json.dumps({"path": str(checkpoint), "digest": value}) if as_json else value)


@app.command()
def export(
    path: PathArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to create.")],
    step: StepOption = None,
    to: Annotated[ExportFormat, typer.Option("--to", help="Format; hf: a Hugging Face directory.")] = ExportFormat.HF,
    as_json: JsonOption = False,
) -> None:
    """Export the weights for other tools.

    Writes a Hugging Face directory, readable with the safetensors library. A model that was loaded with hf:PATH is also
    readable with `from_pretrained`: original tensor names, LoRA adapters merged, tokenizer included."""
    from phalanx.train.checkpoint import export_huggingface

    write = {ExportFormat.HF: export_huggingface}[to]
    checkpoint = _choose_checkpoint(path, step)
    notes: list[str] = []
    files = sorted(file.name for file in write(checkpoint, out, notes=notes.append).iterdir())
    if as_json:
        print(json.dumps({"path": str(checkpoint), "out": str(out), "files": files, "notes": notes}))
    else:
        print(f"{out}: {', '.join(files)} from {checkpoint.name}")
        for note in notes:
            print(note)


def _find_checkpoints(path: Path) -> list[Path]:
    """The checkpoints that a path means, newest first: of a run, of a directory of checkpoints, or the one itself."""
    from phalanx.train.checkpoint import list_checkpoints

    if re.fullmatch(r"step-\d+", path.absolute().name) and path.is_dir():
        return [path]
    found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not found:
        raise UsageError(f"{path}: no checkpoint here; name a run directory or a checkpoint such as step-000000060")
    return found


def _choose_checkpoint(path: Path, step: int | None) -> Path:
    from phalanx.train.checkpoint import parse_step

    found = _find_checkpoints(path)
    if step is None:
        return found[0]
    steps = {parse_step(checkpoint.absolute()): checkpoint for checkpoint in found}
    if step not in steps:
        raise UsageError(f"{path}: no checkpoint of step {step}; there are {', '.join(map(str, sorted(steps)))}")
    return steps[step]


def _read_best_step(directory: Path) -> int | None:
    from phalanx.run import Run

    try:
        best = Run(directory.parent).read_json(directory / "best.json")
    except DataError as error:
        print(
            f"warning: {escape_control_chars(str(error))}; which checkpoint is the best is not known", file=sys.stderr
        )
        return None
    return best.get("step") if best else None


def _describe_checkpoint(checkpoint: Path, best: int | None) -> dict[str, Any]:
    from phalanx.train.checkpoint import CorruptCheckpointError, parse_step, read_manifest

    step = parse_step(checkpoint.absolute())
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.stat().st_mtime))
    facts = {"step": step, "path": str(checkpoint), "written": written, "best": step == best, "damaged": None}
    try:
        manifest = read_manifest(checkpoint)
    except CorruptCheckpointError as error:
        return {**facts, "damaged": f"{error.file.name}: {error.reason}"}
    return {
        **facts,
        "bytes": manifest.nbytes,
        "samples": manifest.meta.get("samples_consumed"),
        "tensors": len(manifest.tensors),
        "files": len(manifest.files),
    }
