"""Turn a source into a dataset directory, with all cores and little memory.

Work goes on in `OUT.partial`: first the tokenizer, then shards, one for each piece of the plan, then the manifest; last
the directory takes its name. So OUT is whole or it is not there, and what was finished before an interruption is kept
as long as the plan (files, their sizes and times, tokenizer) is the same.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any, NamedTuple

import phalanx
import phalanx.errors
from phalanx.data.manifest import TOKENIZER, Manifest, ShardEntry, is_dataset, token_dtype
from phalanx.data.packing import check_kind
from phalanx.data.pieces import (
    Job,
    Piece,
    PieceWriter,
    Plan,
    make_plan,
    read_done,
    sample_texts,
    stored_tokenizer,
    weigh,
)
from phalanx.data.tokenizers import describe, load_tokenizer, train_bpe
from phalanx.errors import AWAY, ExitCode, PhalanxError, RecipeError, UsageError
from phalanx.recipe.schema import DataConfig, DataSource
from phalanx.run.directory import sync, write_whole
from phalanx.run.lock import NoLocksError, taken
from phalanx.waits import HELD, LOOK, Wait, resume, stopped

SILENT = 600.0  # seconds in which at least one of the processes that prepare data must have said something
BPE_SAMPLE = 64 << 20  # bytes of text that a BPE is trained on


@dataclass(frozen=True)
class Progress:
    """How far preparing (or verifying) is. `done` and `total` are bytes; `count` is tokens or images written by now."""

    done: int
    total: int
    count: int
    seconds: float
    note: str = ""


def silent(_: Progress) -> None:
    """A progress callback that says nothing."""


def prepare_source(
    source: DataSource,
    data: DataConfig,
    folder: Path,
    out: Path,
    *,
    workers: int | None = None,
    progress: Callable[[Progress], None] = silent,
    clock: Callable[[], float] = time.perf_counter,
) -> Path:
    """Prepare `source` (paths relative to `folder`) as the dataset directory `out` and return it.

    A dataset that is there already stays as it is. Another process preparing `out` is waited for. RecipeError when
    files are missing, DataError when one cannot be read. `workers` is the number of processes, by default one a core;
    the result does not depend on it. Interrupted, it leaves `OUT.partial` and goes on from there next time.
    """
    plan = make_plan(source, data, folder)
    begun = clock()
    tell = Teller(plan.total, progress, lambda: clock() - begun)
    try:
        with _claimed(out, tell) as claim:
            if claim is not None:
                try:
                    _fill(plan, claim, workers or len(os.sched_getaffinity(0)), tell)
                except PhalanxError as error:
                    if error.code != ExitCode.UNFINISHED:  # what mends it makes another plan, with no use for this one
                        shutil.rmtree(claim.folder)
                    raise
                _publish(claim.folder, out)
    except OSError as error:
        if error.errno in AWAY:
            raise
        raise UsageError(f"{out}: cannot be written: {error.strerror or error}") from error
    return out


class Teller:
    """Adds up what workers report and passes it on."""

    def __init__(self, total: int, progress: Callable[[Progress], None], seconds: Callable[[], float]):
        self._total, self._progress, self._seconds = total, progress, seconds
        self._done = self._count = 0

    def add(self, size: int, count: int) -> None:
        """So many bytes and tokens (or images) more are done."""
        self._done += size
        self._count += count
        self.note("")

    def note(self, text: str) -> None:
        """Say something besides numbers."""
        self._progress(Progress(self._done, self._total, self._count, self._seconds(), text))


class _Claim(NamedTuple):
    """A working directory that no other process touches as long as the file `lock` is open anywhere."""

    folder: Path
    lock: int


@contextmanager
def _claimed(out: Path, tell: Teller) -> Iterator[_Claim | None]:
    """The working directory of `out`, locked against other processes; None when `out` is there (by now)."""
    partial = out.with_name(out.name + ".partial")
    if is_dataset(out):
        yield None
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: is there already and is not a dataset; choose another place or remove it")
    partial.mkdir(parents=True, exist_ok=True)
    if any(partial.iterdir()) and not (partial / "lock").is_file():
        raise UsageError(
            f"{partial}: work would go on there, but it holds other files; choose another place than {out}"
        )
    with open(partial / "lock", "w") as lock:
        try:
            taken(lock.fileno(), inf, f"another process, which is preparing {out}", tell.note)
        except NoLocksError as error:
            tell.note(f"{error}: preparing in a folder of its own, which is given up when this is interrupted")
            with tempfile.TemporaryDirectory(
                prefix=f"{partial.name}-", dir=out.parent, ignore_cleanup_errors=True
            ) as own:
                os.chmod(own, partial.stat().st_mode)
                os.unlink(lock.name)
                with suppress(OSError):  # what an interrupted preparation left here before stays
                    partial.rmdir()
                yield _Claim(Path(own), lock.fileno())
            return
        if is_dataset(out):
            # Someone finished it between the two looks: what we locked is theirs, or an empty one of our own.
            shutil.rmtree(partial, ignore_errors=True)
            yield None
        else:
            yield _Claim(partial, lock.fileno())


def _fill(plan: Plan, claim: _Claim, workers: int, tell: Teller) -> None:
    """Write everything that a plan asks for and that is not there yet."""
    folder = claim.folder
    for file in plan.files:
        check_kind(file.path, plan.kind)
    _keep_only(plan.key, folder)
    _provide_tokenizer(plan, folder, tell)
    job = Job.of(plan, folder)
    entries: dict[int, ShardEntry] = {}
    lost: Counter[str] = Counter()
    for number, piece in enumerate(plan.pieces):
        if (done := read_done(folder, number)) is not None:
            entries[number] = done[0]
            lost += done[1]
            tell.add(weigh(piece), done[0].count)
    todo = {number: piece for number, piece in enumerate(plan.pieces) if number not in entries}
    if workers == 1 or len(todo) == 1:
        writer = PieceWriter(job)
        for number, piece in todo.items():
            entries[number] = writer.write(number, piece, tell.add)
            lost += writer.lost
    else:
        written, more = _write_in_processes(job, todo, workers, tell, claim.lock)
        entries.update(written)
        lost += more
    _report(plan, job, lost, tell)
    entries = dict(sorted(entries.items()))
    shards = tuple(entry for entry in entries.values() if entry.count)
    for entry in entries.values():
        if not entry.count:
            (folder / entry.file).unlink(missing_ok=True)
            (folder / entry.sidecar).unlink(missing_ok=True)
    if not shards:
        raise RecipeError(f"data.source: the {len(plan.files)} file(s) found hold no text at all")
    _manifest(plan, shards, folder).write(folder)


def _report(plan: Plan, job: Job, lost: "Counter[str]", tell: Teller) -> None:
    """Warn of what is not as it was in the files. `lost`: what was no UTF-8, by file."""
    if lost:
        (path, times), *others = lost.most_common()
        also = f", and so in {len(others)} more files" if others else ""
        tell.note(
            f"warning: {path}: bytes that are not UTF-8 became U+FFFD in {times} places{also}; convert such files, for "
            "example with iconv"
        )
    if plan.tokenizer not in (None, "bytes") and stored_tokenizer(plan, Path(job.folder)).separator is None:
        tell.note(
            f"warning: {plan.tokenizer} has no token that ends a text, so nothing stands between documents; name one "
            "as eos_token in a tokenizer_config.json in the same folder"
        )


def _keep_only(key: str, folder: Path) -> None:
    """Start anew unless what lies in `folder` was begun for the same plan."""
    mark = folder / "plan"
    if mark.is_file() and mark.read_text() == key:
        return
    for path in folder.iterdir():
        if path.name != "lock":
            path.unlink()
    write_whole(mark, key)


def _provide_tokenizer(plan: Plan, folder: Path, tell: Teller) -> None:
    """Put the plan's tokenizer.json into `folder`: copied, or trained."""
    stored = folder / TOKENIZER
    if plan.tokenizer in (None, "bytes") or stored.exists():
        return
    made = stored.with_suffix(".tmp")
    if plan.tokenizer.startswith("bpe:"):
        tell.note(f"training a tokenizer ({plan.tokenizer})")
        train_bpe(sample_texts(plan, BPE_SAMPLE), int(plan.tokenizer.removeprefix("bpe:")), made)
    else:
        shutil.copyfile(plan.tokenizer, made)
    os.replace(made, stored)


def _manifest(plan: Plan, shards: tuple[ShardEntry, ...], folder: Path) -> Manifest:
    if plan.tokenizer is None:
        return Manifest("images", "<u1", shards, classes=plan.classes, shape=plan.shape, labels=plan.labels)
    if plan.tokenizer == "bytes":
        tokenizer = load_tokenizer("bytes")
    else:
        tokenizer = stored_tokenizer(plan, folder)
    dtype = token_dtype(tokenizer.vocab).str.replace("|", "<")
    return Manifest("tokens", dtype, shards, vocab=tokenizer.vocab, tokenizer=describe(tokenizer, folder))


def _publish(partial: Path, out: Path) -> None:
    """Give the finished directory its name, in such an order that a power cut leaves it whole or unfinished."""
    for path in partial.iterdir():
        # also what a worker that was killed left half-written
        if path.suffix in (".done", ".tmp") or path.name == "plan":
            path.unlink()
    _sync(partial)
    try:
        os.rename(partial, out)  # an empty directory gives way
    except OSError:
        if not is_dataset(out):  # without locks, another process may have been faster
            raise
    (out / "lock").unlink(missing_ok=True)
    _sync(out.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def _write_in_processes(
    job: Job, todo: dict[int, Piece], workers: int, tell: Teller, lock: int
) -> "tuple[dict[int, ShardEntry], Counter[str]]":
    """Write pieces with several worker processes, each led by a thread that hands it one piece after the other."""
    messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
    pieces = iter(list(todo.items()))
    processes = [_start_worker(lock) for _ in range(min(workers, len(todo)))]
    leaders = [
        Thread(target=_lead, args=(process, job, pieces, messages), name=f"data-{number}", daemon=True)
        for number, process in enumerate(processes)
    ]
    entries: dict[int, ShardEntry] = {}
    lost: Counter[str] = Counter()
    try:
        for leader in leaders:
            leader.start()
        while len(entries) < len(todo):
            message = _next(messages, processes, tell)
            if "entry" in message:
                entries[message["number"]] = ShardEntry(**message["entry"])
                lost.update(message["lost"])
            elif "bytes" in message:
                tell.add(message["bytes"], message["count"])
            elif "error" in message:
                raise getattr(phalanx.errors, message["error"])(message["text"])
            else:
                raise _lost(message["status"])
    finally:
        for process in processes:
            process.kill()
        for leader in leaders:
            leader.join()
        for process in processes:
            _close(process)
    return entries, lost


def _lost(status: int) -> Exception:
    """Why a worker that prepares data ended without a word."""
    if status >= 0:
        return RuntimeError(f"a worker that prepares data ended with status {status}")
    killed = " (possibly out of memory)" if -status == signal.SIGKILL else ""
    error = PhalanxError(
        f"a process that prepares data was killed by signal {-status}{killed}; start again with the same "
        "command, which goes on from here"
    )
    error.code = ExitCode.UNFINISHED
    return error


def _next(
    messages: "SimpleQueue[dict[str, Any]]", processes: "Sequence[subprocess.Popen[str]]", tell: Teller
) -> dict[str, Any]:
    """What a worker says next. One that was stopped is continued; where none says anything for too long, this
    ends."""
    wait, looks = Wait("a word of those that prepare data", SILENT, tell.note), 0
    while True:
        try:
            return messages.get(timeout=LOOK)
        except Empty:
            found = stopped(process.pid for process in processes)
            looks = looks + 1 if found else 0
            if looks == HELD:
                resume(found)
                tell.note(f"process {found[0].pid}, which prepares data, was stopped (SIGSTOP): continued it")
                looks = 0
            if wait.over():
                error = PhalanxError(
                    f"the processes that prepare data have said nothing for {SILENT:.0f} s: they hang, or the storage "
                    "of the source or of the cache does; start again with the same command, which goes on from here"
                )
                error.code = ExitCode.UNFINISHED
                raise error from None


def _close(process: "subprocess.Popen[str]") -> None:
    """Wait for a worker that was killed, and close the pipes to it."""
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # what it was told last, which closing would send once more
                pipe.close()


def _start_worker(lock: int) -> subprocess.Popen[str]:
    # A session of its own, so that Ctrl-C reaches only this process, which then ends its workers. And the lock goes
    # with it: should this process be killed, nobody else begins before the last worker has noticed and ended.
    path = os.pathsep.join((str(Path(phalanx.__path__[0]).parent), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "phalanx.data.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        pass_fds=(lock,),
        env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
    )


def _lead(
    process: "subprocess.Popen[str]",
    job: Job,
    pieces: Iterator[tuple[int, Piece]],
    messages: "SimpleQueue[dict[str, Any]]",
) -> None:
    """Hand pieces to a worker until there are none, and pass on what it says."""
    if process.stdin is None or process.stdout is None:
        raise ValueError("a worker needs pipes")
    try:
        _send(process.stdin, asdict(job))
        for number, piece in pieces:
            _send(process.stdin, [number, [asdict(part) for part in piece]])
            for line in process.stdout:
                message = json.loads(line)
                messages.put({**message, "number": number})
                if "entry" in message:
                    break
                if "error" in message:
                    return
            else:  # it ended without an answer
                messages.put({"status": process.wait()})
                return
    except BrokenPipeError:
        messages.put({"status": process.wait()})


def _send(pipe: IO[str], value: Any) -> None:
    pipe.write(json.dumps(value) + "\n")
    pipe.flush()
