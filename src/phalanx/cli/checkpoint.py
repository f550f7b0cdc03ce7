"""`phalanx checkpoint`: list, verify, digest, copy, remove and export checkpoints."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from phalanx import formatting
from phalanx.cli.options import JsonOption, StepOption, TrustCodeOption, print_warning
from phalanx.errors import DataError, ExitCode
from phalanx.text_table import Column, format_table

if TYPE_CHECKING:
    from phalanx.app.export import ExportOutcome

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="List, verify, digest, copy, remove and export checkpoints."
)

PathArgument = Annotated[
    str, typer.Argument(metavar="RUN|CHECKPOINT", help="Run directory or URL, or one of its checkpoints.")
]


@app.command("ls")
def list_command(path: PathArgument, as_json: JsonOption = False) -> None:
    """List checkpoints, newest first.

    To check their data, use `verify`."""
    from phalanx.app.checkpoint import describe_checkpoints

    rows = describe_checkpoints(path, print_warning)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    numbers = (Column(title, is_number=True) for title in ("size", "samples", "tensors"))
    columns = [Column("step", is_number=True), Column("written"), *numbers, Column()]
    print(*format_table(columns, map(_to_cells, rows)), sep="\n")


def _to_cells(row: dict[str, Any]) -> tuple[str, ...]:
    start = (str(row["step"]), time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["written_at"])))
    if row["damaged"]:
        return (*start, "", "", "", f"damaged: {row['damaged']}")
    samples = "" if row["num_samples"] is None else f"{row['num_samples']:,}"
    mark = "best" if row["best"] else ""
    return (*start, formatting.format_bytes(row["size_bytes"]), samples, str(row["num_tensors"]), mark)


@app.command()
def verify(path: PathArgument, step: StepOption = None, as_json: JsonOption = False) -> None:
    """Verify every byte of a checkpoint against its checksums.

    Exits with 65 and names the file if one is damaged."""
    from phalanx.app.checkpoint import CorruptCheckpointError, verify_at

    began = time.perf_counter()
    try:
        checkpoint, manifest = verify_at(path, step)
    except CorruptCheckpointError as error:
        if not as_json:
            raise
        where = str(error.file.parent)
        print(json.dumps({"path": where, "ok": False, "file": error.file.name, "reason": error.reason}))
        raise typer.Exit(ExitCode.DATA) from None
    duration_s = time.perf_counter() - began
    facts = {"path": checkpoint, "ok": True, "size_bytes": manifest.nbytes, "duration_s": duration_s}
    if as_json:
        print(json.dumps(facts))
    else:
        size, files = formatting.format_bytes(manifest.nbytes), formatting.format_plural(len(manifest.files), "file")
        print(f"ok  {checkpoint}: {size} in {files}, {formatting.format_duration(duration_s)}")


@app.command()
def digest(path: PathArgument, step: StepOption = None, as_json: JsonOption = False) -> None:
    """Print the digest of a checkpoint's state.

    Two runs are bit-identical if their digests are equal."""
    from phalanx.app.checkpoint import digest_checkpoint, select_checkpoint

    checkpoint = select_checkpoint(path, step)
    value = digest_checkpoint(checkpoint)
    print(json.dumps({"path": str(checkpoint), "digest": value}) if as_json else value)


@app.command("cp")
def copy_command(
    path: PathArgument,
    to: Annotated[str, typer.Argument(metavar="RUN", help="Run directory or URL to copy it to.")],
    step: StepOption = None,
) -> None:
    """Copy a checkpoint to another run directory or URL.

    What is already there is not sent again, so an interrupted copy continues."""
    from phalanx.app.checkpoint import copy_checkpoint

    print(copy_checkpoint(path, to, step))


@app.command("rm")
def remove_command(path: PathArgument, step: StepOption = None) -> None:
    """Remove a checkpoint.

    Name it by --step, or by its own path or URL."""
    from phalanx.app.checkpoint import remove_checkpoint

    print(f"removed {remove_checkpoint(path, step)}")


@app.command()
def export(
    path: PathArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to create.")],
    step: StepOption = None,
    form: Annotated[
        Literal["safetensors", "fp8", "int4", "gguf", "peft"],
        typer.Option(
            help="Plain weights; linear layers quantized (compressed-tensors: vLLM, transformers); a file for "
            "llama.cpp, by its converter (PHALANX_GGUF_CONVERTER); or the adapter alone, in PEFT's format."
        ),
    ] = "safetensors",
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="Dtype of the weights that are not quantized.", show_default="that of the original"),
    ] = None,
    weights: Annotated[
        Literal["model", "ema"] | None,
        typer.Option(help="The model's weights, or their moving average.", show_default="evaluation.weights"),
    ] = None,
    verify: Annotated[bool, typer.Option(help="Reload the export and compare it with the checkpoint.")] = True,
    trust_code: TrustCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Export the weights, and prove that they compute the same.

    Writes a Hugging Face directory, readable with the safetensors library. A model that was loaded with hf:PATH is also
    readable with `from_pretrained`: original tensor names, adapters merged, tokenizer included. If a check fails,
    the files are kept as OUT.failed, and the exit code is 65."""
    from phalanx.app.export import export_checkpoint

    _print_export(export_checkpoint(path, out, step, form, dtype, verify, trust_code, weights), out, as_json)


@app.command()
def prune(
    path: PathArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to create.")],
    intermediate: Annotated[
        float | None, typer.Option(help="Share of the inner channels of each feed-forward to keep, such as 0.5.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Number of blocks to keep.")] = None,
    step: StepOption = None,
    trust_code: TrustCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Export a smaller model, without what matters least.

    Writes and proves what `export` does. Train from OUT with the task `distillation` to recover the loss. For
    phalanx.models:transformer, Llama, Mistral, Qwen2, Qwen3 and GPT-2."""
    from phalanx.app.export import PruningRequest, export_checkpoint

    request = PruningRequest(intermediate, layers)
    _print_export(export_checkpoint(path, out, step, trust_code=trust_code, request=request), out, as_json)


def _print_export(outcome: "ExportOutcome", out: Path, as_json: bool) -> None:
    """Print what was exported and proved. Raises DataError if a check failed."""
    failed = ", ".join(check.name for check in outcome.checks if not check.passed)
    if as_json:
        facts = {"path": str(outcome.checkpoint), "out": str(outcome.directory), "files": outcome.files}
        print(json.dumps({**facts, "notes": outcome.notes, "checks": [asdict(check) for check in outcome.checks]}))
    else:
        rows = [(check.name, "PASS" if check.passed else "FAIL", check.found) for check in outcome.checks]
        table = format_table([Column("check"), Column("result"), Column("found")], rows) if rows else []
        print(f"{out}: {', '.join(outcome.files)} from {outcome.checkpoint.name}", *outcome.notes, *table, sep="\n")
    if failed:
        raise DataError(f"{out}: failed the proof: {failed}; what was written is kept as {outcome.directory}")
