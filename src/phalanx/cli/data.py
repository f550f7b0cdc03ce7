"""`phalanx data`: prepare, verify and inspect dataset directories."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from phalanx import formatting
from phalanx.cli.options import BackendOptionOption, BackendOptionsCommand, JsonOption, TimeLimitOption
from phalanx.errors import ExitCode, UsageError
from phalanx.std_streams import escape_control_chars
from phalanx.storage.url import is_url
from phalanx.text_table import format_facts

if TYPE_CHECKING:
    from phalanx.data import PrepareProgress
    from phalanx.jobs.spec import Job
    from phalanx.recipe.data_schema import DataConfig, DataSource

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Prepare, verify and inspect training data.")

DatasetArgument = Annotated[str, typer.Argument(metavar="DIR|URL", help="Dataset directory, or its URL.")]
_LINE_INTERVAL_S = 5.0  # seconds between progress lines where there is no terminal


@app.command(cls=BackendOptionsCommand)
def prepare(
    out: Annotated[str, typer.Option(metavar="DIR|URL", help="Dataset directory or URL to create.")],
    globs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="['GLOB']...", help="Text files; ** matches any directories; .gz and .xz are read, too."
        ),
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="bytes|FILE|bpe:SIZE", help="Tokenizer: bytes, a tokenizer.json, or a BPE trained on these data."
        ),
    ] = "bytes",
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Read JSON lines; the text is in --text-field.")] = False,
    parquet: Annotated[
        bool, typer.Option("--parquet", help="Read Parquet files; the text is in column --text-field.")
    ] = False,
    arrow: Annotated[
        bool, typer.Option("--arrow", help="Read a directory that `datasets` saved, or Arrow files.")
    ] = False,
    webdataset: Annotated[
        bool, typer.Option("--webdataset", help="Read tar archives: images with --image-size, else texts.")
    ] = False,
    tokens: Annotated[
        Literal["detect", "megatron", "nanogpt", "llm.c"] | None,
        typer.Option(help="Copy token files of this format, made with --tokenizer."),
    ] = None,
    field: Annotated[
        str, typer.Option("--text-field", metavar="NAME", help="Field with the text, such as text or choices[0].text.")
    ] = "text",
    idx: Annotated[
        tuple[str, str] | None, typer.Option(metavar="IMAGES LABELS", help="Read a pair of IDX files, plain or .gz.")
    ] = None,
    images: Annotated[
        str | None, typer.Option(metavar="DIR", help="Read images from one subdirectory per class.")
    ] = None,
    size: Annotated[
        tuple[int, int] | None,
        typer.Option("--image-size", metavar="H W", help="Resize images to this height and width."),
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Exclude files (repeatable).")] = None,
    records: Annotated[
        Literal["chat", "pairs", "labels"] | None,
        typer.Option(help="Records are conversations: for chat, or preferences with pairs or labels."),
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(metavar="FILE", help="With --records: a template other than the tokenizer's.")
    ] = None,
    on_bad_row: Annotated[
        Literal["error", "skip"], typer.Option(help="What to do with a row that cannot be read.")
    ] = "error",
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Processes. The result does not depend on it.", show_default="one per core"
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Prepare the Ith of N parts; the last part to end completes the dataset."),
    ] = None,
    on: Annotated[
        str | None, typer.Option(metavar="BACKEND", help="Submit the parts as jobs: local, slurm, kubernetes or ray.")
    ] = None,
    tasks: Annotated[int | None, typer.Option(min=1, metavar="N", help="Jobs with --on.")] = None,
    time_limit: TimeLimitOption = None,
    backend_option: BackendOptionOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --on: print what would be submitted.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Prepare text or images as checksummed shards. If interrupted, run the same command again to resume."""
    from phalanx.app.data import inspect_dataset, make_prepare_jobs, parse_part, prepare_to

    formats = {"jsonl": jsonl, "parquet": parquet, "arrow": arrow, "webdataset": webdataset, "tokens": bool(tokens)}
    given = [kind for kind, is_given in formats.items() if is_given]
    if len(given) > 1 or (given and not globs):
        options = ", ".join(f"--{kind}" for kind in formats)
        raise UsageError(f"{options} set the format of the globs' files; give one of them, and globs")
    others = [kind for kind, value in (("idx", idx), ("images", images)) if value is not None]
    kind = [*given, *others, "text"][0]
    source = _parse_source(kind, globs, idx, images, size, {"text_field": field, "exclude": exclude or []}, tokens)
    data = _parse_data(tokenizer, on_bad_row, _make_chat_words(records, chat_template))
    if source.has_images and tokenizer != "bytes":
        raise UsageError("--tokenizer is for text, and the source has images: omit it")
    if on is None and (tasks or time_limit or backend_option or dry_run):
        raise UsageError("--tasks, --time-limit, --backend-option and --dry-run are for jobs: give --on BACKEND, too")
    if on is not None:
        if tasks is None or part is not None:
            raise UsageError(f"--on {on}: give the number of jobs as --tasks N, and not --part")
        words = ["--out", out, *([] if workers is None else ["--workers", str(workers)])]
        words += [word for key, value in _make_chat_words(records, chat_template).items() for word in (key, value)]
        words = _format_source(source, tokenizer, on_bad_row, words)
        jobs = make_prepare_jobs(source, data, words, out, tasks, workers, time_limit, backend_option or [])
        _submit_jobs(on, jobs, dry_run)
        return
    try:
        with show_progress() as progress:
            is_complete = prepare_to(out, source, data, workers, progress, None if part is None else parse_part(part))
    except KeyboardInterrupt:
        kept = "the cache" if is_url(out) else f"{out}.partial"
        print(f"interrupted: finished shards are kept in {kept}; run the same command again to resume", file=sys.stderr)
        raise SystemExit(ExitCode.UNFINISHED) from None
    if is_complete:
        _print_dataset(inspect_dataset(out), as_json)
    else:
        print(f"part {part} of {out} is prepared; others are not, yet", file=sys.stderr)


@app.command()
def verify(dataset: DatasetArgument, as_json: JsonOption = False) -> None:
    """Verify every byte against its checksum. Exits with 65 and names the file and block if one is damaged."""
    from phalanx.app.data import verify_dataset

    with show_progress("verifying") as progress:
        verified = verify_dataset(dataset, progress)
    if as_json:
        print(json.dumps(asdict(verified), indent=2))
    else:
        rate = formatting.format_bytes(verified.size_bytes / max(verified.duration_s, 1e-9))
        shards, size = formatting.format_plural(verified.num_shards, "shard"), verified.size_bytes
        print(f"ok  {dataset}: {shards}, {formatting.format_bytes(size)}, {rate}/s")


@app.command()
def inspect(
    dataset: Annotated[str, typer.Argument(metavar="DATASET|RECIPE", help="Dataset directory or URL, or a recipe.")],
    tokens: Annotated[int, typer.Option(min=0, metavar="N", help="Number of tokens to show as text.")] = 200,
    as_json: JsonOption = False,
) -> None:
    """Show what a dataset contains, or the first source of a recipe.

    Prints counts, the vocabulary or classes, and the first tokens; of conversations the first three, with the tokens in
    the loss in green, or between {+ and +}.
    """
    from phalanx.app.data import inspect

    with show_progress() as progress:
        content = inspect(dataset, tokens, progress)
    _print_dataset(content, as_json)


def _format_source(source: "DataSource", tokenizer: str, on_bad_row: str, words: list[str]) -> list[str]:
    """The command-line words of a source, after `words`."""
    words = [*words, "--tokenizer", tokenizer, "--on-bad-row", on_bad_row, "--text-field", source.text_field]
    words += [word for glob in source.exclude for word in ("--exclude", glob)]
    if source.image_size is not None:
        words += ["--image-size", *map(str, source.image_size)]
    if source.idx is not None:
        return [*words, "--idx", source.idx.images, source.idx.labels]
    if source.images is not None:
        return [*words, "--images", source.images]
    if source.kind == "tokens":
        words += ["--tokens", source.format]
    elif source.kind != "text":
        words.append(f"--{source.kind}")
    globs = getattr(source, source.kind)
    return [*words, "--", *([globs] if isinstance(globs, str) else globs)]


def _submit_jobs(on: str, jobs: "Sequence[Job]", dry_run: bool) -> None:
    from phalanx.app.submit import submit_jobs
    from phalanx.jobs.backends.base import open_backend

    backend = open_backend(on)
    requests = backend.render_array(jobs)
    if dry_run:
        print("\n\n".join(map(str, requests)))
    else:
        submit_jobs(backend, requests, sys.stdout)


def _parse_source(
    kind: str,
    globs: list[str] | None,
    idx: tuple[str, str] | None,
    images: str | None,
    size: tuple[int, int] | None,
    text_options: dict[str, object],
    token_format: str | None,
) -> "DataSource":
    """Return the source that the options name. Raises UsageError unless it is exactly one."""
    from phalanx.recipe.checks import SOURCES_WITH
    from phalanx.recipe.data_schema import DataSource

    if sum((bool(globs), idx is not None, images is not None)) != 1:
        raise UsageError("give one source: text files ('docs/**/*.txt'), --idx IMAGES LABELS, or --images DIR")
    if images is not None and (size is None or min(size) < 1):
        given = "" if size is None else f"--image-size {size[0]} {size[1]}: "
        problem = f"{given}--images needs the common size of the images, at least 1 pixel a side"
        raise UsageError(f"{problem}, for instance --image-size 224 224")
    values = {**text_options, "image_size": size, "format": token_format}
    defaults: dict[str, object] = {"text_field": "text", "exclude": [], "image_size": None, "format": None}
    for key, kinds in SOURCES_WITH.items():
        if values[key] != defaults[key] and kind not in kinds:
            option = key.replace("_", "-")
            raise UsageError(f"--{option} is for {', '.join(kinds)}, and the source is {kind}: omit it")
    pair = None if idx is None else {"images": idx[0], "labels": idx[1]}
    chosen = {key: value for key, value in values.items() if value is not None}
    return DataSource.model_validate({kind: globs or pair or images, **chosen})


def _make_chat_words(records: str | None, template: str | None) -> dict[str, str]:
    """The options of conversations that were given. Raises UsageError for a template without conversations."""
    if template is not None and records is None:
        raise UsageError(f"--chat-template {template}: is for conversations; give --records chat, pairs or labels, too")
    given = {"--records": records, "--chat-template": template}
    return {option: value for option, value in given.items() if value is not None}


def _parse_data(tokenizer: str, on_bad_row: str, chat_words: dict[str, str]) -> "DataConfig":
    from pydantic import ValidationError

    from phalanx.recipe.data_schema import MAX_BPE_TOKENS, DataConfig

    is_bpe = tokenizer.startswith("bpe:")
    value = {"bpe": tokenizer.removeprefix("bpe:")} if is_bpe else tokenizer
    try:
        values: dict[str, Any] = {"tokenizer": value, "on_bad_row": on_bad_row}
        if chat_words:
            chat = {"records": chat_words["--records"], "template": chat_words.get("--chat-template")}
            values |= {"packing": "whole", "document_masking": True, "chat": chat}
        return DataConfig.model_validate(values)
    except ValidationError:
        message = f"--tokenizer {tokenizer[:60]}: a BPE has 257 to {MAX_BPE_TOKENS:,} tokens, for instance bpe:8192"
        raise UsageError(message) from None


@contextmanager
def show_progress(verb: str = "preparing") -> "Iterator[Callable[[PrepareProgress], None]]":
    """Yield a progress callback for standard error: a bar on a terminal, else a line every few seconds."""
    if not sys.stderr.isatty():
        yield _ProgressLines(verb)
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.TextColumn("{task.fields[amount]}"),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(verb, total=None, amount="")

        def show(now: "PrepareProgress") -> None:
            if now.note.startswith("warning: "):  # stays when the bar goes
                bar.console.print(escape_control_chars(now.note), markup=False, highlight=False)
                return
            amount = _format_progress(now) if now.bytes_total else ""
            note = escape_control_chars(now.note) or verb
            bar.update(task, total=now.bytes_total, completed=now.bytes_done, amount=amount, description=note)

        yield show


class _ProgressLines:
    """Prints progress as lines, at most one every few seconds of the work's own clock."""

    def __init__(self, verb: str):
        self._verb = verb
        self._last_line_s = 0.0

    def __call__(self, now: "PrepareProgress") -> None:
        if now.note:
            print(escape_control_chars(now.note), file=sys.stderr, flush=True)
        elif now.elapsed_s - self._last_line_s >= _LINE_INTERVAL_S:
            self._last_line_s = now.elapsed_s
            print(f"{self._verb}  {_format_progress(now)}", file=sys.stderr, flush=True)


def _format_progress(now: "PrepareProgress") -> str:
    rate = now.bytes_done / now.elapsed_s if now.elapsed_s else 0.0
    done, total, speed = map(formatting.format_bytes, (now.bytes_done, now.bytes_total, rate))
    return f"{done} of {total}  {now.count:,} done  {speed}/s"


def _print_dataset(facts: dict[str, Any], as_json: bool) -> None:
    """Print facts in two columns, and below them the first tokens of text."""
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    sample_text = facts.pop("begins", None)
    conversations = facts.pop("conversations", ())
    facts["size_bytes"] = formatting.format_bytes(facts["size_bytes"])
    labels = {name: name.removeprefix("num_").removesuffix("_bytes").replace("_", " ") for name in facts}
    texts = {name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in facts.items()}
    shown = ((labels[name], texts[name]) for name, value in facts.items() if value is not None)
    print(*format_facts(shown, label_width=12), sep="\n")
    if sample_text:
        print(f"\n{sample_text}")
    begin, end = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("{+", "+}")
    for number, pieces in enumerate(conversations, 1):
        shown_pieces = ((escape_control_chars(text), in_loss) for text, in_loss in pieces)
        marked = (f"{begin}{text}{end}" if in_loss else text for text, in_loss in shown_pieces)
        print(f"\n--- {number}", "".join(marked), sep="\n")
