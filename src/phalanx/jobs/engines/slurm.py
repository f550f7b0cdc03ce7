"""Jobs on Slurm: sbatch sends a script, whose srun starts the command once on each node. It needs no accounting
database, but a file system that all nodes share: of $PHALANX_STATE_DIR, and of the folder that a job starts in unless
its code travels, which is then put below $PHALANX_STATE_DIR.

Each job has a folder there with its scripts, its log and what they leave (slurm_script). The scripts queue a job again
that is not finished; keeping it off unfit nodes is only possible from outside, and is done by whoever polls it.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.jobs.code import unpack
from phalanx.jobs.engine import Reader, Request, no_such_job
from phalanx.jobs.engines.slurm_options import Version
from phalanx.jobs.engines.slurm_script import (
    BATCH,
    CANCELLED,
    CODE,
    LOG,
    RESULT,
    RUN,
    SECRETS,
    UNFIT,
    array_scripts,
    scripts,
    secret_file,
)
from phalanx.jobs.engines.slurm_status import Result, fields, live_status, past_status, read_result
from phalanx.jobs.log_stream import printed_lines
from phalanx.jobs.spec import Job, State, Status
from phalanx.run.lock import NoLocksError, alone_here, taken
from phalanx.run.private import state_root

Call = Callable[[Sequence[str]], tuple[int, str, str]]
"""Runs a program; its exit code (127: there is none), what it printed, and its errors."""

ID = "id"
SUBMITTING = 300.0
"""Seconds for which another command may be submitting."""
ASKING = 600.0
"""Seconds in which one of Slurm's programs must have answered: they try for a while to reach a controller."""
NOT_NOW = "Requested node configuration is not available"
"""What Slurm answers to more nodes than there are, and to more than are in service."""


def call(argv: Sequence[str]) -> tuple[int, str, str]:
    """Run a program here."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=ASKING
        )
    except FileNotFoundError:
        return 127, "", f"{argv[0]}: not found"
    except subprocess.TimeoutExpired:
        return 1, "", f"{argv[0]} did not answer within {ASKING:.0f} s"
    return done.returncode, done.stdout, done.stderr


class Slurm:
    """The engine. `run` runs Slurm's programs; `folder` is where jobs have their folders."""

    name = "slurm"

    def __init__(
        self,
        run: Call = call,
        folder: Path | None = None,
        environ: Mapping[str, str] = os.environ,
    ):
        self._run, self._environ = run, environ
        self.folder = (folder or state_root(environ) / "slurm").absolute()
        self._version: Version | None = None

    def render(self, job: Job) -> Request:
        """Both scripts, and how they are sent. Values of secrets are not in them."""
        folder = self._new_folder(job.name)
        return self._request((job,), folder, scripts(job, self.version(), folder))

    def render_array(self, jobs: Sequence[Job]) -> Request:
        """The scripts of a job array."""
        folder = self._new_folder(jobs[0].array or jobs[0].name)
        request = self._request(jobs, folder, array_scripts(jobs, self.version(), folder))
        return replace(request, members=tuple(jobs))

    def submit(self, request: Request) -> str:
        """Write the job's folder, ask Slurm whether it could run the job, and send it."""
        (id,) = self._send(request, request.job.name, {"": request.job})
        return id

    def submit_array(self, request: Request) -> list[str]:
        """Send a job array. The members' ids are ARRAY_INDEX."""
        job = request.job
        members = {str(index): member for index, member in enumerate(request.members)}
        return self._send(request, job.array or job.name, members)

    def poll(self, job: str) -> Status:
        """What Slurm knows of a job or, when it has forgotten it, what the job left."""
        return self._status(job, self._find(job))

    def jobs(self) -> list[Status]:
        """The jobs that have a folder here."""
        folders = self._folders()
        if not folders:
            return []
        known = set(self._ask(["squeue", "--me", "--array", "--noheader", "--states=all", "--format=%i"]).split())
        ordered = sorted(folders, key=lambda id: [int(number) for number in id.split("_")])
        return [self._status(id, folders[id], id in known) for id in ordered]

    def release(self, job: str) -> bool:
        """Keep a job that is held because nodes were unfit off them from now on, and let it go on. Nothing happens to
        any other."""
        folder = self._find(job)
        marker = folder / UNFIT
        if not marker.exists():
            return False
        found = self._show(job, folder)
        if found is None or found.get("JobState") != "PENDING":
            return False  # its script is still at its end
        unfit = [*found.get("ExcNodeList", "").split(), *marker.read_text().split()]
        self._ask(["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(unfit)}"], f"job {job}")
        self._ask(["scontrol", "release", job], f"job {job}")
        marker.unlink(missing_ok=True)
        return True

    def signal(self, job: str, number: int) -> None:
        """Send a signal to every process of the step; the batch script does not get it."""
        status = self.poll(job)
        if status.state is not State.RUNNING:
            raise UsageError(f"{job} ({status.name}) does not run, it is {status.state}")
        self._ask(["scancel", f"--signal={number}", f"{job}.0"], f"{job} ({status.name}) does not run at this moment")

    def logs(self, job: str) -> Iterator[str]:
        """What all its nodes have printed, in the order in which it came, of all attempts."""
        log = self._find(job) / LOG
        if log.exists():
            with open(log, errors="replace", newline="\n") as lines:
                for line in lines:
                    yield line.rstrip("\n")

    def follow_logs(self, job: str) -> Reader:
        """What all its nodes print."""
        return printed_lines(self._find(job) / LOG)

    def cancel(self, job: str) -> None:
        """End a job for good, wherever it is in its life."""
        folder = self._find(job)
        if self._status(job, folder).state.over:
            return
        (folder / CANCELLED).touch()  # first: its script must not queue it again
        self._ask(["scancel", job], f"job {job}")
        (folder / SECRETS).unlink(missing_ok=True)

    def version(self) -> Version:
        """Slurm's version, such as (22, 5, 8)."""
        if self._version is None:
            code, out, err = self._run(["sbatch", "--version"])
            if code == 127:
                raise UsageError(
                    "slurm: sbatch is not installed here, or not in PATH; submit from one of its login nodes"
                )
            found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", out)
            if code or not found:
                raise UsageError(f"slurm: sbatch --version says {(err or out).strip()!r}; expected a version")
            self._version = tuple(int(number) for number in found.groups() if number is not None)
        return self._version

    def _request(self, jobs: Sequence[Job], folder: Path, texts: Mapping[str, str]) -> Request:
        job, script = jobs[0], str(folder / BATCH)
        if "container-image" in job.options and "--container-image" not in self._ask(["srun", "--help"]):
            raise UsageError(f"job {job.name}: option container-image needs pyxis, which this Slurm does not have")
        files = {str(folder / name): text for name, text in texts.items()}
        return Request(self.name, job, files, (("sbatch", "--test-only", script), ("sbatch", "--parsable", script)))

    def _send(self, request: Request, name: str, jobs: Mapping[str, Job]) -> list[str]:
        """Send a job, or the jobs of an array, each by the name of its own folder in the whole's; returns their ids."""
        values = self._secrets(request.job)
        for job in jobs.values():
            if job.code is None and not job.folder.is_dir():
                raise UsageError(f"job {job.name}: its folder {job.folder} is not there")
        test, send = request.commands
        folder = Path(send[-1]).parent
        with self._locked():
            self._check_name(name)
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                raise UsageError(f"job {name}: another one took {folder} meanwhile; submit it once more") from None
            try:
                for own, job in jobs.items():
                    _furnish(folder / own, job, values)
                for path, text in request.files.items():
                    _write(Path(path), text)
                self._test(request.job, test)
                id = self._ask(send, f"job {name}").strip().partition(";")[0]
            except BaseException:
                shutil.rmtree(folder)
                raise
            ids = {own: f"{id}_{own}" if own else id for own in jobs}
            try:
                for own, each in ids.items():
                    _write(folder / own / ID, f"{each}\n")
            except BaseException:
                self._run(["scancel", id])  # nobody would know of it
                raise
        return list(ids.values())

    def _status(self, id: str, folder: Path, known: bool = True) -> Status:
        name = self._whole(folder).name.rpartition("-")[0]
        name = name if folder.parent == self.folder else f"{name}.{folder.name}"
        found = self._show(id, folder) if known else None
        result = _result(folder)
        submitted = (folder / ID).stat().st_mtime
        run = (folder / RUN).read_text().removesuffix("\n") if (folder / RUN).exists() else None
        if found is None:
            return replace(past_status(id, name, (folder / CANCELLED).exists(), submitted, result), run=run)
        nodes = found.get("NodeList", "")
        if set("[,") & set(nodes):
            nodes = self._ask(["scontrol", "show", "hostnames", nodes])
        status = live_status(id, name, found, tuple(nodes.split()), submitted, result)
        if status.state is State.QUEUED and (folder / UNFIT).exists():
            unfit = ", ".join((folder / UNFIT).read_text().split())
            told = (
                f"is held, since {unfit} did not fit it: `phalanx jobs release {id} --on slurm` lets it go on elsewhere"
            )
            status = replace(status, reason=told)
        return replace(status, run=run)

    def _show(self, id: str, folder: Path) -> dict[str, str] | None:
        """Slurm's fields of a job; None when it has forgotten it, or another one has the number now."""
        code, out, err = self._run(["scontrol", "show", "job", id])
        if code and "Invalid job id" in err:
            return None
        if code:
            raise UsageError(f"slurm does not answer: {_words(err)}")
        found = fields(out)
        return found if found.get("Command", "").endswith(f"/{self._whole(folder).name}/{BATCH}") else None

    def _test(self, job: Job, test: Sequence[str]) -> None:
        """Whether Slurm could ever run a job. That nodes are out of service for now is no reason to refuse it."""
        code, _, err = self._run(test)
        if code == 0:
            return
        where = job.options.get("partition")
        nodes = self._nodes(where) if NOT_NOW in err else {}
        if nodes and job.nodes > len(nodes):
            there = f"{len(nodes)} nodes" if len(nodes) > 1 else "1 node"
            raise UsageError(
                f"job {job.name}: it needs {job.nodes} nodes, and {where or 'the default partition'} has {there}: "
                f"{_words(err)}"
            )
        if not any(state.startswith(("down", "drain", "fail", "maint", "unk")) for state in nodes.values()):
            raise UsageError(f"job {job.name}: {_words(err)}")

    def _nodes(self, partition: str | None) -> dict[str, str]:
        """The states of a partition's nodes; without one, of the default's."""
        listed = self._ask(["sinfo", "--noheader", "--Node", "--format=%N %P %T"])
        rows = [line.split() for line in listed.splitlines()]
        return {row[0]: row[2] for row in rows if (row[1].rstrip("*") == partition if partition else row[1][-1] == "*")}

    def _ask(self, argv: Sequence[str], what: str = "slurm") -> str:
        code, out, err = self._run(argv)
        if code:
            raise UsageError(f"{what}: {_words(err)}")
        return out

    def _secrets(self, job: Job) -> dict[str, str]:
        missing = [name for name in job.secrets if name not in self._environ]
        if missing:
            raise UsageError(f"job {job.name}: the secret {missing[0]} is not set in the environment")
        return {name: self._environ[name] for name in job.secrets}

    def _check_name(self, name: str) -> None:
        for id, folder in self._folders().items():
            if self._whole(folder).name.rpartition("-")[0] == name:
                status = self._status(id, folder)
                if not status.state.over:
                    raise UsageError(f"job {name}: there is one of this name already, {id}, and it is {status.state}")

    def _new_folder(self, name: str) -> Path:
        """The first that no job of this name has had."""
        taken = [found.name.rpartition("-") for found in self.folder.glob(f"{name}-*")]
        numbers = [int(number) for before, _, number in taken if before == name and number.isdecimal()]
        return self.folder / f"{name}-{max(numbers, default=0) + 1}"

    def _whole(self, folder: Path) -> Path:
        """The folder of the array that a job's folder belongs to; else that itself."""
        return folder if folder.parent == self.folder else folder.parent

    def _find(self, job: str) -> Path:
        found = self._folders().get(job)
        if found is None:
            raise no_such_job(self.name, job)
        return found

    def _folders(self) -> dict[str, Path]:
        """The jobs' folders by id; of two with one id, as after a new start of Slurm's numbers, the later one."""
        found = [*self.folder.glob(f"*/{ID}"), *self.folder.glob(f"*/[0-9]*/{ID}")]
        files = sorted(found, key=lambda file: file.stat().st_mtime)
        return {file.read_text().strip(): file.parent for file in files}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else submits here meanwhile."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as lock, ExitStack() as stack:
            what = f"another command, which is submitting to Slurm in {self.folder}"
            try:
                mine = taken(lock.fileno(), SUBMITTING, what)
            except NoLocksError:
                mine = stack.enter_context(alone_here(lock.fileno(), SUBMITTING, what))
            if not mine:
                raise UsageError(
                    f"{self.folder}: another command has been submitting there for {SUBMITTING:.0f} s; "
                    "`ps -ef | grep phalanx` shows it: end it if it hangs, and submit again"
                )
            yield


def _furnish(folder: Path, job: Job, secrets: dict[str, str]) -> None:
    """What a job finds in its folder besides its scripts."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if secrets:
        _write(folder / SECRETS, secret_file(secrets))
    if job.run is not None:
        _write(folder / RUN, f"{job.run}\n")
    if job.code is not None:
        unpack(job.code.tar, folder / CODE)


def _write(path: Path, text: str) -> None:
    """A file that only its owner can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", errors="surrogateescape") as file:
        file.write(text)


def _result(folder: Path) -> Result | None:
    path = folder / RESULT
    return read_result(path.read_text()) if path.exists() else None


def _words(err: str) -> str:
    """Slurm's words, in one line, without what it puts before them."""
    lines = [re.sub(r"^(\w+: )?(error: )?", "", line).strip() for line in err.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) or "it failed without a word"
