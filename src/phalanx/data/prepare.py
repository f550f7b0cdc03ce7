"""Turn a source into a dataset directory, with all cores and little memory.

Work is done in `OUT.partial`: first the tokenizer, then shards, one for each piece of the plan, then the manifest; at
the end the directory is renamed. So OUT is complete or does not exist, and finished shards survive an interruption as
long as the plan (files, their sizes and times, tokenizer) is the same.
"""

import logging
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from phalanx.cluster.discovery import count_free_cores
from phalanx.data import prepare_plan
from phalanx.data.chat import ChatPlan
from phalanx.data.file_format import check_file_format
from phalanx.data.manifest import (
    TOKEN_MASK,
    TOKENIZER_FILE,
    DatasetManifest,
    ShardEntry,
    is_dataset,
    narrowest_token_dtype,
)
from phalanx.data.rows import BadRows, describe_skipped, write_skipped
from phalanx.data.stream import LOCK_FILE, StreamDescription, forget_stream_error
from phalanx.data.tokenizers import describe_tokenizer, load_tokenizer, train_bpe_tokenizer
from phalanx.deadline import POLL_INTERVAL_S, Deadline
from phalanx.errors import RETRYABLE_STORAGE_ERRNOS, ExitCode, PhalanxError, RecipeError, UsageError
from phalanx.formatting import format_exit_status
from phalanx.recipe.data_schema import DataConfig, DataSource
from phalanx.run.cache import CACHE_ADVICE, cache_root
from phalanx.run.call_process import CallProcess, report_progress, value_of
from phalanx.run.directory import sync_directory, write_atomic
from phalanx.run.event_loop import EventLoop
from phalanx.run.lock import LocksUnsupportedError, acquire_lock
from phalanx.run.process_messages import CallProgress, CallReply

logger = logging.getLogger(__name__)

_FORMAT_CHECK_THREADS = 16
_PLAN_FILE = "plan"
_PARTS_LOCK_FILE = "lock.parts"
"""Locked by a part while it checks the plan and makes the tokenizer; `lock` is shared by the parts."""
BPE_SAMPLE_BYTES = 64 << 20  # bytes of text that a BPE is trained on


def prepare_source(
    source: DataSource,
    data: DataConfig,
    recipe_dir: Path,
    dataset_dir: Path,
    *,
    num_workers: int | None = None,
    report_progress: Callable[[prepare_plan.PrepareProgress], None] = prepare_plan.ignore_progress,
    clock: Callable[[], float] = time.perf_counter,
) -> Path:
    """Prepare `source` (paths relative to `folder`) as the dataset directory `dataset_dir` and return it.

    An existing dataset is left as it is. If another process is preparing `dataset_dir`, wait for it. Raises RecipeError
    when files are missing, DataError when one cannot be read. `num_workers` is the number of processes, by default one
    a core; the result does not depend on it. An interruption leaves `OUT.partial`, from which the next call continues.
    """
    plan = prepare_plan.make_prepare_plan(source, data, recipe_dir)
    started = clock()
    reporter = prepare_plan.ProgressReporter(plan.total_bytes, report_progress, lambda: clock() - started)
    with _naming_directory(dataset_dir), _lock_working_dir(dataset_dir, reporter) as claim:
        logger.info("%s %s", "preparing" if claim is not None else "found", dataset_dir)
        if claim is not None:
            try:
                _write_dataset(plan, claim, num_workers or count_free_cores(), reporter, data.prepare == "stream")
            except PhalanxError as error:
                if error.code != ExitCode.UNFINISHED:  # the fix makes another plan, with no use for this work
                    shutil.rmtree(claim.working_dir)
                raise
            _commit_dataset(claim.working_dir, dataset_dir)
    return dataset_dir


@contextmanager
def _naming_directory(dataset_dir: Path) -> Iterator[None]:
    """Raise UsageError for a directory that cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno in RETRYABLE_STORAGE_ERRNOS:
            raise
        advice = f"; {CACHE_ADVICE}" if dataset_dir.is_relative_to(cache_root()) else ""
        raise UsageError(f"{dataset_dir}: cannot be written: {error.strerror or error}{advice}") from error


@dataclass(frozen=True)
class DatasetPart:
    """One of the parts into which the preparation of a dataset is divided: 0 .. num_parts - 1."""

    index: int
    num_parts: int


WHOLE_DATASET = DatasetPart(0, 1)


class _WorkingDir(NamedTuple):
    """A working directory that no other process touches as long as the file `lock_fd` is open anywhere."""

    working_dir: Path
    lock_fd: int


@contextmanager
def _lock_working_dir(dataset_dir: Path, reporter: prepare_plan.ProgressReporter) -> Iterator[_WorkingDir | None]:
    """The working directory of `dataset_dir`, locked against other processes; None when `dataset_dir` is there (by
    now)."""
    if is_dataset(dataset_dir):
        yield None
        return
    partial = _make_partial(dataset_dir)
    with open(partial / LOCK_FILE, "w") as lock:
        try:
            acquire_lock(lock.fileno(), inf, f"another process, which is preparing {dataset_dir}", reporter.report_note)
        except LocksUnsupportedError as error:
            reporter.report_note(f"{error}: preparing in a temporary folder, which is discarded if this is interrupted")
            with tempfile.TemporaryDirectory(
                prefix=f"{partial.name}-", dir=dataset_dir.parent, ignore_cleanup_errors=True
            ) as private_dir:
                os.chmod(private_dir, partial.stat().st_mode)
                os.unlink(lock.name)
                with suppress(OSError):  # what an interrupted preparation left here before stays
                    partial.rmdir()
                yield _WorkingDir(Path(private_dir), lock.fileno())
            return
        if is_dataset(dataset_dir):
            # Someone finished it between the two looks: what we locked is theirs, or an empty one of our own.
            shutil.rmtree(partial, ignore_errors=True)
            yield None
        else:
            yield _WorkingDir(partial, lock.fileno())


def prepare_part(
    source: DataSource,
    data: DataConfig,
    recipe_dir: Path,
    dataset_dir: Path,
    part: DatasetPart,
    *,
    num_workers: int | None = None,
    report_progress: Callable[[prepare_plan.PrepareProgress], None] = prepare_plan.ignore_progress,
    clock: Callable[[], float] = time.perf_counter,
) -> bool:
    """Prepare one of several parts of `dataset_dir`, which other processes, also on other machines with the same file
    system, may prepare at the same time. Returns whether the dataset is complete: the last part to end completes it.
    """
    plan = prepare_plan.make_prepare_plan(source, data, recipe_dir)
    numbers = range(len(plan.pieces))
    own = numbers[part.index :: part.num_parts]
    started = clock()
    own_bytes = sum(prepare_plan.piece_bytes(plan.pieces[number]) for number in own)
    reporter = prepare_plan.ProgressReporter(own_bytes, report_progress, lambda: clock() - started)
    if is_dataset(dataset_dir):
        return True
    with _naming_directory(dataset_dir):
        partial = _make_partial(dataset_dir)
    with open(partial / LOCK_FILE, "w+") as lock:  # a shared lock on NFS needs a readable file
        with open(partial / _PARTS_LOCK_FILE, "w") as parts_lock:
            acquire_lock(parts_lock.fileno(), inf, f"another part of {dataset_dir}, which begins", reporter.report_note)
            is_same_plan = _has_plan(plan, partial)
            what = f"another process, which is preparing {dataset_dir}"
            acquire_lock(lock.fileno(), inf, what, reporter.report_note, is_shared=is_same_plan)
            if is_dataset(dataset_dir):  # completed between the two looks, and what we locked is an empty directory
                shutil.rmtree(partial, ignore_errors=True)
                return True
            _begin_dataset(plan, partial, reporter)
            acquire_lock(lock.fileno(), inf, what, reporter.report_note, is_shared=True)
        job = prepare_plan.PrepareJob.from_plan(plan, partial)
        _write_pieces(plan, job, own, num_workers or count_free_cores(), reporter, lock.fileno())
        is_complete = all(prepare_plan.read_done_file(partial, number) for number in numbers)
    if is_complete:
        prepare_source(source, data, recipe_dir, dataset_dir, report_progress=report_progress)
    return is_complete


def _make_partial(dataset_dir: Path) -> Path:
    """Make the working directory of `dataset_dir`. Raises UsageError where something else is in the way."""
    partial = dataset_dir.with_name(dataset_dir.name + ".partial")
    if dataset_dir.exists() and (not dataset_dir.is_dir() or any(dataset_dir.iterdir())):
        raise UsageError(f"{dataset_dir}: exists and is not a dataset; choose another place or remove it")
    partial.mkdir(parents=True, exist_ok=True)
    if any(partial.iterdir()) and not (partial / LOCK_FILE).is_file():
        raise UsageError(
            f"{partial}: preparing would write there, but it holds other files; choose another place than {dataset_dir}"
        )
    return partial


def prepare_stream(
    source: DataSource, data: DataConfig, recipe_dir: Path, directory: Path, first_pieces: Sequence[int]
) -> None:
    """Prepare `source` in `directory`, in which others read finished shards at once: `first_pieces` of the plan before
    others. Waits while another process does so."""
    plan = prepare_plan.make_prepare_plan(source, data, recipe_dir)
    reporter = prepare_plan.ProgressReporter(plan.total_bytes, prepare_plan.ignore_progress, lambda: 0.0)
    with open(directory / LOCK_FILE, "w") as lock:
        acquire_lock(lock.fileno(), inf, "")
        forget_stream_error(directory)
        working_dir = _WorkingDir(directory, lock.fileno())
        _write_dataset(plan, working_dir, count_free_cores(), reporter, True, first_pieces)


def _write_dataset(
    plan: prepare_plan.PreparePlan,
    working_dir: _WorkingDir,
    num_workers: int,
    reporter: prepare_plan.ProgressReporter,
    is_stream: bool = False,
    first_pieces: Sequence[int] = (),
) -> None:
    """Write everything that a plan asks for and that is not there yet."""
    folder = working_dir.working_dir
    _begin_dataset(plan, folder, reporter)
    if is_stream and not is_dataset(folder):
        StreamDescription.from_plan(plan).write(folder)
        _build_manifest(plan, (), folder).write(folder)
    job = prepare_plan.PrepareJob.from_plan(plan, folder)
    numbers = dict.fromkeys([*first_pieces, *range(len(plan.pieces))])
    _write_pieces(plan, job, list(numbers), num_workers, reporter, working_dir.lock_fd)
    shards, lost_bytes, rows = [], Counter[str](), BadRows(is_skipping=True)
    rows.merge(plan.skipped)
    for entry, lost, skipped in filter(
        None, (prepare_plan.read_done_file(folder, number) for number in range(len(plan.pieces)))
    ):
        lost_bytes += lost
        rows.merge(skipped)
        if entry.count:
            shards.append(entry)
        else:
            (folder / entry.file).unlink(missing_ok=True)
            (folder / entry.sidecar).unlink(missing_ok=True)
    _report_warnings(plan, job, lost_bytes, reporter)
    content = "images" if plan.tokenizer is None else "text"
    if rows.skipped:
        text = describe_skipped(rows.skipped)
        if not shards:
            raise RecipeError(f"data.source: the {len(plan.files)} file(s) found contain no {content}; {text}")
        reporter.report_note(f"warning: {text}")
        logger.warning("%s", text)
        write_skipped(folder, rows.skipped)
    if not shards:
        raise RecipeError(f"data.source: the {len(plan.files)} file(s) found contain no {content}")
    _build_manifest(plan, tuple(shards), folder).write(folder)


def _begin_dataset(plan: prepare_plan.PreparePlan, folder: Path, reporter: prepare_plan.ProgressReporter) -> None:
    """Check the files of a plan, and put into `folder` what the pieces need: the plan and the tokenizer."""
    with ThreadPoolExecutor(_FORMAT_CHECK_THREADS) as pool:
        for done in pool.map(lambda file: check_file_format(file.path, plan.kind), plan.files):
            assert done is None
    _discard_other_plan(plan, folder)
    _write_tokenizer(plan, folder, reporter)


def _write_pieces(
    plan: prepare_plan.PreparePlan,
    job: prepare_plan.PrepareJob,
    numbers: Sequence[int],
    num_workers: int,
    reporter: prepare_plan.ProgressReporter,
    lock_fd: int,
) -> None:
    """Write these pieces in this order, without those that are there."""
    folder = Path(job.dataset_dir)

    def iterate_missing() -> Iterator[int]:
        for number in numbers:  # another node may have given a piece meanwhile
            if (done := prepare_plan.read_done_file(folder, number)) is None:
                yield number
            else:
                reporter.add_progress(prepare_plan.piece_bytes(plan.pieces[number]), done.entry.count)

    num_missing = sum(prepare_plan.read_done_file(folder, number) is None for number in numbers)
    if num_workers == 1 or num_missing == 1:
        writer = prepare_plan.PieceWriter(job)
        for number in iterate_missing():
            writer.write_piece(number, plan.pieces[number], reporter.add_progress)
    else:
        missing = ((number, plan.pieces[number]) for number in iterate_missing())
        write_with_workers(job, missing, min(num_workers, num_missing), reporter, lock_fd)


def _report_warnings(
    plan: prepare_plan.PreparePlan,
    job: prepare_plan.PrepareJob,
    lost_bytes: "Counter[str]",
    reporter: prepare_plan.ProgressReporter,
) -> None:
    """Warn of what is not as it was in the files. `lost_bytes`: what was no UTF-8 or, for `bytes`, 0, by file."""
    if lost_bytes:
        (path, times), *others = lost_bytes.most_common()
        also = f", and so in {len(others)} more files" if others else ""
        what, cure = "bytes that are not UTF-8 became U+FFFD", "convert such files, for example with iconv"
        if plan.tokenizer == "bytes":
            what = "byte 0, which ends a document for the tokenizer bytes, is part of the text"
            cure = "remove it, for example with tr -d '\\000', or use another tokenizer"
        reporter.report_note(f"warning: {path}: {what} in {times} places{also}; {cure}")
    if (
        plan.tokenizer not in (None, "bytes")
        and plan.kind != "tokens"
        and prepare_plan.load_plan_tokenizer(plan, Path(job.dataset_dir)).separator_token is None
    ):
        reporter.report_note(
            f"warning: {plan.tokenizer} has no token that ends a text, so nothing stands between documents; name one "
            "as eos_token in a tokenizer_config.json in the same folder"
        )


def _discard_other_plan(plan: prepare_plan.PreparePlan, folder: Path) -> None:
    """Discard the contents of `folder` unless they belong to the same plan."""
    if _has_plan(plan, folder):
        return
    for path in folder.iterdir():
        if path.name not in (LOCK_FILE, _PARTS_LOCK_FILE):
            path.unlink()
    write_atomic(folder / _PLAN_FILE, plan.cache_key)


def _has_plan(plan: prepare_plan.PreparePlan, folder: Path) -> bool:
    """Whether the contents of `folder` belong to this plan."""
    return (folder / _PLAN_FILE).is_file() and (folder / _PLAN_FILE).read_text() == plan.cache_key


def _write_tokenizer(plan: prepare_plan.PreparePlan, folder: Path, reporter: prepare_plan.ProgressReporter) -> None:
    """Put the plan's tokenizer.json into `folder`: copied, or trained."""
    stored = folder / TOKENIZER_FILE
    if plan.tokenizer in (None, "bytes") or stored.exists():
        return
    made = stored.with_suffix(".tmp")
    if plan.tokenizer.startswith("bpe:"):
        reporter.report_note(f"training a tokenizer ({plan.tokenizer})")
        vocab_size = int(plan.tokenizer.removeprefix("bpe:"))
        train_bpe_tokenizer(prepare_plan.iterate_sample_texts(plan, BPE_SAMPLE_BYTES), vocab_size, made)
    else:
        shutil.copyfile(plan.tokenizer, made)
    os.replace(made, stored)


def _build_manifest(plan: prepare_plan.PreparePlan, shards: tuple[ShardEntry, ...], folder: Path) -> DatasetManifest:
    if plan.tokenizer is None:
        return DatasetManifest(
            "images", "<u1", shards, classes=plan.num_classes, shape=plan.image_shape, labels=plan.class_names
        )
    if plan.tokenizer == "bytes":
        tokenizer = load_tokenizer("bytes")
    else:
        tokenizer = prepare_plan.load_plan_tokenizer(plan, folder)
    chat = None if plan.chat is None else ChatPlan.from_json(plan.chat)
    classes = None if chat is None or chat.config.classes is None else tuple(chat.config.classes)
    dtype = narrowest_token_dtype(tokenizer.vocab_size if chat is None else TOKEN_MASK).str.replace("|", "<")
    return DatasetManifest(
        "tokens",
        dtype,
        shards,
        vocab=tokenizer.vocab_size,
        tokenizer=describe_tokenizer(tokenizer, folder),
        records=None if chat is None else chat.config.records,
        classes=None if classes is None else len(classes),
        labels=classes,
        processor=None if chat is None or chat.processor is None else dict(chat.processor),
    )


def _commit_dataset(partial: Path, dataset_dir: Path) -> None:
    """Give the finished directory its name, in such an order that a power cut leaves it whole or unfinished."""
    for path in partial.iterdir():
        # also what a worker that was killed left half-written
        if path.suffix in (".done", ".piece", ".tmp") or path.name in (_PLAN_FILE, _PARTS_LOCK_FILE):
            path.unlink()
    sync_directory(partial)
    try:
        os.rename(partial, dataset_dir)  # an empty directory gives way
    except OSError:
        if not is_dataset(dataset_dir):  # without locks, another process may have been faster
            raise
    (dataset_dir / LOCK_FILE).unlink(missing_ok=True)
    sync_directory(dataset_dir.parent)


SILENCE_TIMEOUT_S = 600.0
"""Seconds in which at least one of the processes that prepare data must have said something."""


def write_with_workers(
    job: prepare_plan.PrepareJob,
    missing: Iterator[tuple[int, prepare_plan.PreparePiece]],
    num_workers: int,
    reporter: prepare_plan.ProgressReporter,
    lock: int,
) -> None:
    """Write pieces with several processes. Each inherits the `lock`: if this process is killed, no other process begins
    before the last of them has ended."""
    num_busy = 0
    workers = [CallProcess(lock) for _ in range(num_workers)]

    def send_next(worker: CallProcess) -> None:
        nonlocal num_busy
        for number, piece in missing:
            prepare_plan.write_piece_file(Path(job.dataset_dir), number, piece)
            worker.send_call(f"{__name__}:write_piece", {"job": asdict(job), "number": number})
            num_busy += 1
            return

    def receive(worker: CallProcess) -> None:
        nonlocal num_busy
        if (messages := worker.receive()) is None:
            raise _death_error(worker.process.wait())
        for message in messages:
            if isinstance(message, CallProgress):
                reporter.add_progress(message.num_bytes, message.count)
            elif isinstance(message, CallReply):
                value_of(message)
                num_busy -= 1
                send_next(worker)

    try:
        with EventLoop() as loop:
            for worker in workers:
                loop.add_reader(worker.socket, partial(receive, worker))
                send_next(worker)
            deadline = _start_deadline(reporter)
            while num_busy:
                if loop.run_once(POLL_INTERVAL_S):
                    deadline = _start_deadline(reporter)
                elif deadline.check_expired():
                    raise PhalanxError(
                        f"the processes that prepare data have reported nothing for {SILENCE_TIMEOUT_S:.0f} s: they "
                        "hang, or the storage of the source or of the cache does; run the same command again to "
                        "continue from here",
                        ExitCode.UNFINISHED,
                    )
    finally:
        for worker in workers:
            worker.kill()


def _start_deadline(reporter: prepare_plan.ProgressReporter) -> Deadline:
    return Deadline("the processes that prepare data", SILENCE_TIMEOUT_S, reporter.report_note)


def _death_error(status: int) -> Exception:
    """Return the error for a process that ended without a word."""
    if status >= 0:
        return RuntimeError(f"a worker that prepares data ended with status {status}")
    killed = " (possibly out of memory)" if -status == signal.SIGKILL else ""
    text = f"a process that prepares data was killed by {format_exit_status(status)}{killed}"
    return PhalanxError(f"{text}; run the same command again to continue from here", ExitCode.UNFINISHED)


def write_piece(payload: dict[str, Any]) -> None:
    """Write one piece: what the process does in a call."""
    job = TypeAdapter(prepare_plan.PrepareJob).validate_python(payload["job"])
    try:
        piece = prepare_plan.read_piece_file(Path(job.dataset_dir), payload["number"])
        _open_writer(job).write_piece(payload["number"], piece, report_progress)
    except OSError as error:  # a full disk, as a rule; source files that cannot be read are a PhalanxError
        raise UsageError(f"{error.filename or 'the dataset'}: cannot be written: {error.strerror}") from error


@cache
def _open_writer(job: prepare_plan.PrepareJob) -> prepare_plan.PieceWriter:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    return prepare_plan.PieceWriter(job)
