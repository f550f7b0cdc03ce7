"""The directories of jobs on Slurm, and their scripts: one that Slurm starts on the first node, and one that srun
starts on each node. `backend.py` submits them.

A job, or a member of an array below the directory of the array, writes all files to its directory, on a file system
that all nodes share: `log`, `token.<attempt>`, `code.<attempt>.<node>`, `result`, `deaths` (consecutive ones), and
`unfit` with the nodes to exclude. The snapshot is unpacked in `code`.
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.backends.slurm.sbatch_options import SbatchOptions, Version, parse_options
from phalanx.jobs.snapshot import unpack_snapshot
from phalanx.jobs.spec import MAX_KILLS_IN_A_ROW, MIN_PROGRESS_S, Job, with_unpacked_snapshot
from phalanx.run.lock import LocksUnsupportedError, acquire_lock, lock_on_this_machine
from phalanx.run.node_env import EXPECTED_VARIABLE
from phalanx.run.private_files import make_state_dir

ID_FILE = "id"
LOCK_TIMEOUT_S = 300.0
"""Seconds to wait for another process that submits."""
BATCH_FILE, NODE_FILE, SECRETS_FILE, SNAPSHOT_DIR = "batch.sh", "node.sh", "secrets.sh", "code"
TOKEN_FILE = "token.{attempt}"
"""Exists when the script of an attempt handles signals."""
LOG_FILE, RESULT_FILE, UNFIT_FILE, CANCELLED_FILE, RUN_FILE = "log", "result", "unfit", "cancelled", "run"


class SlurmJobDirs:
    """The directories of jobs in `root`."""

    def __init__(self, root: Path):
        self.root = root

    def job_name(self, folder: Path) -> str:
        """The name of a job; that of an array's member ends with its index."""
        name = self.find_array_dir(folder).name.rpartition("-")[0]
        return name if folder.parent == self.root else f"{name}.{folder.name}"

    def make_new_path(self, name: str) -> Path:
        """The first path that no job of this name has had."""
        used = [found.name.rpartition("-") for found in self.root.glob(f"{name}-*")]
        numbers = [int(number) for before, _, number in used if before == name and number.isdecimal()]
        return self.root / f"{name}-{max(numbers, default=0) + 1}"

    def find_array_dir(self, folder: Path) -> Path:
        """The directory of the array that a job belongs to, or its own."""
        return folder if folder.parent == self.root else folder.parent

    def script_suffix(self, folder: Path) -> str:
        """How the path of a job's batch script ends."""
        return f"/{self.find_array_dir(folder).name}/{BATCH_FILE}"

    def list_all(self) -> dict[str, Path]:
        """The jobs' directories by id; of two with one id, as after a new start of Slurm's numbers, the later one."""
        found = [*self.root.glob(f"*/{ID_FILE}"), *self.root.glob(f"*/[0-9]*/{ID_FILE}")]
        files = sorted(found, key=lambda file: file.stat().st_mtime)
        return {file.read_text().strip(): file.parent for file in files}

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Prevent other processes from submitting here during the block."""
        make_state_dir(self.root)
        with open(self.root / ".lock", "w") as lock, ExitStack() as stack:
            what = f"another command, which is submitting to Slurm in {self.root}"
            try:
                acquired = acquire_lock(lock.fileno(), LOCK_TIMEOUT_S, what)
            except LocksUnsupportedError:
                acquired = stack.enter_context(lock_on_this_machine(lock.fileno(), LOCK_TIMEOUT_S, what))
            if not acquired:
                raise UsageError(
                    f"{self.root}: another command has been submitting there for {LOCK_TIMEOUT_S:.0f} s; "
                    "`ps -ef | grep phalanx` shows it: end it if it hangs, and submit again"
                )
            yield


def write_job_dir(folder: Path, job: Job, secrets: dict[str, str]) -> None:
    """Write the files of a job's directory other than its scripts."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if secrets:
        write_private_file(folder / SECRETS_FILE, render_secret_file(secrets))
    if job.run_dir is not None:
        write_private_file(folder / RUN_FILE, f"{job.run_dir}\n")
    if job.snapshot is not None:
        unpack_snapshot(job.snapshot.tar, folder / SNAPSHOT_DIR)


def write_private_file(path: Path, text: str) -> None:
    """A file that only its owner can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", errors="surrogateescape") as file:
        file.write(text)


@dataclass(frozen=True)
class SlurmResult:
    """Result file of the batch script at the end of an attempt."""

    exit_code: int
    attempt: int
    nodes: tuple[str, ...]
    ended: float


def read_result_file(folder: Path) -> SlurmResult | None:
    """Read what the last attempt of a job left behind, if there is any."""
    path = folder / RESULT_FILE
    if not path.exists():
        return None
    found = dict(line.split(" ", 1) for line in path.read_text().splitlines())
    return SlurmResult(int(found["code"]), int(found["attempt"]), tuple(found["nodes"].split()), float(found["ended"]))


def render_scripts(job: Job, version: Version, folder: Path) -> dict[str, str]:
    """Both scripts, by name. UsageError for what this version of Slurm cannot do."""
    options = parse_options(job, version)
    job = with_unpacked_snapshot(job, folder / SNAPSHOT_DIR)
    _check_folders(job, folder)
    return {BATCH_FILE: render_batch_script(job, options, folder), NODE_FILE: render_node_script(job, options, folder)}


def render_array_scripts(jobs: Sequence[Job], version: Version, folder: Path) -> dict[str, str]:
    """Render the scripts of a job array: one batch script, and a node script for each member in a directory named by
    its index. Members differ only in their commands, not in options for Slurm. Raises UsageError like
    `render_scripts`."""
    texts = {}
    for index, job in enumerate(jobs):
        member_dir = folder / str(index)
        job = with_unpacked_snapshot(job, member_dir / SNAPSHOT_DIR)
        _check_folders(job, member_dir)
        texts[f"{index}/{NODE_FILE}"] = render_node_script(job, parse_options(job, version), member_dir)
    array_job = replace(jobs[0], name=jobs[0].array_name or jobs[0].name, working_dir=folder)
    start_dirs = tuple(
        with_unpacked_snapshot(job, folder / str(index) / SNAPSHOT_DIR).working_dir for index, job in enumerate(jobs)
    )
    return {BATCH_FILE: render_batch_script(array_job, parse_options(array_job, version), folder, start_dirs), **texts}


def _check_folders(job: Job, folder: Path) -> None:
    for path in (folder, job.working_dir):
        if not str(path).isprintable():
            raise UsageError(f"job {job.name}: the folder {str(path)!r} has a control character in its name")
    if "\\" in str(folder):
        raise UsageError(f"the jobs folder {folder} has a backslash in its name, which Slurm takes for something else")


def render_batch_script(job: Job, options: SbatchOptions, folder: Path, member_dirs: Sequence[Path] = ()) -> str:
    """Render the script of the first node: it starts the step, forwards the warning signal, and evaluates the end.
    `member_dirs`: working directories of the members of an array; each member has a directory in `folder`."""
    num_granted = "${#nodes[@]}"
    output = str(folder).replace("%", "%%")  # Slurm puts numbers and names in for %j and the like
    output = f"{output}/%a/{LOG_FILE}" if member_dirs else f"{output}/{LOG_FILE}"
    parallel_suffix = f"%{job.max_parallel}" if job.max_parallel else ""
    header = [*options.sbatch_options, *([f"--array=0-{len(member_dirs) - 1}{parallel_suffix}"] if member_dirs else [])]
    header += [f"--chdir={job.working_dir}", f"--output={output}"]
    return BATCH_TEMPLATE.format(
        header="\n".join(f"#SBATCH {quote_directive(option)}" for option in header),
        name=job.name,
        folder=shlex.quote(str(folder)) + ("/$SLURM_ARRAY_TASK_ID" if member_dirs else ""),
        # $SLURM_JOB_ID would work for all members but one: there it is the id of the whole array
        id="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if member_dirs else "$SLURM_JOB_ID",
        cores=f"export SRUN_CPUS_PER_TASK={job.cpus_per_node}\n" if job.cpus_per_node else "",
        step=" ".join(
            shlex.quote(word)
            for word in (*options.srun_options, *_container_options(job, (folder, job.working_dir, *member_dirs)))
        ),
        grace=SIGNAL_GRACE_S,
        num_nodes=num_granted if job.min_nodes is None else f"{job.nodes_variable} {EXPECTED_VARIABLE}={num_granted}",
        elastic_note="" if job.min_nodes is None else ". Another node leads where the first is lost: 0 of any is done",
        or_done="" if job.min_nodes is None else " || $one == 0",
        requeues=options.max_requeues,
        unfinished=int(ExitCode.UNFINISHED),
        unfit=int(ExitCode.UNFIT_NODE),
        deaths=MAX_KILLS_IN_A_ROW,
        progress=int(MIN_PROGRESS_S),
    )


def render_node_script(job: Job, options: SbatchOptions, folder: Path) -> str:
    """Render the script of each node: it runs the command and records the exit code."""
    words = job.command
    if options.apptainer_image is not None:
        binds = [f"--bind={path}:{path}" for path in (folder, job.working_dir)]
        nvidia = ["--nv"] if job.gpus_per_node else []
        words = ("apptainer", "exec", *nvidia, *binds, f"--pwd={job.working_dir}", options.apptainer_image, *words)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    return NODE_TEMPLATE.format(
        name=job.name,
        folder=shlex.quote(str(folder)),
        start=shlex.quote(str(job.working_dir)),
        environment="".join(f"{line}\n" for line in exports),
        secrets=f'. "$folder/{SECRETS_FILE}"\n' if job.secrets else "",
        command=shlex.join(words),
        unfinished=int(ExitCode.UNFINISHED),
        unfit=int(ExitCode.UNFIT_NODE),
    )


def render_secret_file(values: dict[str, str]) -> str:
    """Render the file from which `node.sh` reads the secrets."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


def quote_directive(option: str) -> str:
    """Quote an option for a line with #SBATCH, which sbatch parses, not a shell."""
    if all(letter.isalnum() or letter in "-_=.,:/@+" for letter in option):
        return option
    return '"' + option.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _container_options(job: Job, folders: Sequence[Path]) -> list[str]:
    """Return the container options: given mounts, and the job's directories at the same paths."""
    if "container-image" not in job.backend_options:
        return []
    own = [f"{path}:{path}" for path in dict.fromkeys(folders)]
    given = job.backend_options.get("container-mounts")
    return [
        f"--container-mounts={','.join([*([given] if given else []), *own])}",
        f"--container-workdir={job.working_dir}",
    ]


SIGNAL_GRACE_S = 5
"""Seconds after its start in which a step may not handle signals yet."""
BATCH_TEMPLATE = r"""#!/bin/bash
{header}
# Job {name}, one attempt: Slurm starts this on the first of its nodes.
set -o pipefail
trap : TERM # a request to stop the job must not end this script, which records the result
warned=
trap 'warned=1' USR1 # the step has not started yet

# shellcheck disable=SC2016 # names are meant as they stand
folder={folder} options=({step})
attempt=${{SLURM_RESTART_COUNT:-0}}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# below the kernel's ephemeral ports; a different one for each attempt
port=$((20000 + (SLURM_JOB_ID + attempt) % 10000))
while (: <"/dev/tcp/${{nodes[0]}}/$port") 2>/dev/null; do port=$((port + 1)); done

# a new name for each attempt: no node can have old contents in its cache
rm -f "$folder"/token.* "$folder"/code.*
token=$folder/token.$attempt
(umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$token")

export PHALANX_NUM_NODES={num_nodes} PHALANX_LEADER_ADDR=${{nodes[0]}}:$port PHALANX_TOKEN_FILE=$token
{cores}
srun --input=none --export=ALL --kill-on-bad-exit=1 --wait=60 \
  --nodes="${{#nodes[@]}}" --ntasks="${{#nodes[@]}}" --ntasks-per-node=1 "${{options[@]}}" \
  bash "$folder/node.sh" "$attempt" &
step=$!

# The warning signal reaches only this shell. Forward it when the step has started and its command handles signals;
# before that the signal would end it.
begun=$EPOCHSECONDS
# shellcheck disable=SC2317 # the trap calls it
running() {{ kill -0 "$step" 2>/dev/null; }}
# shellcheck disable=SC2317
warn() {{
  while running && ! scontrol show step "$SLURM_JOB_ID.0" >/dev/null 2>&1; do sleep 1 && begun=$EPOCHSECONDS; done
  while running && ((EPOCHSECONDS - begun < {grace})); do sleep 1; done
  while running && ! scancel --signal=USR1 "{id}.0" 2>/dev/null; do sleep 1; done
}}
trap warn USR1
if [[ -n $warned ]]; then warn; fi

while running; do wait "$step"; done # a signal ends `wait`, too
wait "$step"
code=$?

# The exit code of the job is that of the first node, the leader. If it was killed because another node failed, take
# that node's code{elastic_note}.
leader=
unfit=()
others=
for node in "${{nodes[@]}}"; do
  read -r one 2>/dev/null <"$folder/code.$attempt.$node" || one=
  [[ $node == "${{nodes[0]}}"{or_done} ]] && leader=$one
  [[ $one == {unfit} ]] && unfit+=("$node")
  [[ -z $others && -n $one && $one != 0 && $one != {unfinished} && $one -lt 128 ]] && others=$one
done
if [[ -n $leader ]]; then code=$leader; elif [[ $code == 0 ]]; then code={unfinished}; fi # a finished leader records 0
if ((${{#unfit[@]}} > 0 && (code >= 128 || code == {unfinished}))); then code={unfit}; fi
if [[ -n $others && $code -ge 128 ]]; then code=$others; fi

# A killed job is restarted, but only a few times in a row, since it may need more memory. An srun that cannot start the
# step, as right after a node came back, may end with a code above 192.
deaths=0
if ((code > 128 && code <= 192)) || [[ -z $leader$others && $code -gt 192 ]]; then
  if ((EPOCHSECONDS - begun < {progress})); then read -r deaths 2>/dev/null <"$folder/deaths" || deaths=0; fi
  deaths=$((deaths + 1))
fi
printf '%s\n' "$deaths" >"$folder/deaths"

printf 'code %s\nattempt %s\nnodes %s\nended %s\n' "$code" "$attempt" "${{nodes[*]}}" "$EPOCHSECONDS" \
  >"$folder/result.new"
mv "$folder/result.new" "$folder/result"

cancelled() {{
  [[ -e $folder/cancelled ]] || scontrol show job "{id}" | grep '^ *JobState=CANCELLED' >/dev/null
}}
ask() {{
  local up
  for _ in {{1..60}}; do # the controller may be restarting
    up=$(scontrol ping | grep -cw UP)
    scontrol "$1" "{id}" && exit "$code"
    if ((up > 0)); then break; fi
    sleep 5
  done
}}
if ((deaths >= {deaths})); then
  echo "killed $deaths times in a row (exit code $code): not restarted; it may need more memory"
elif [[ $code == {unfinished} || $code == {unfit} || $deaths != 0 ]] && ((attempt < {requeues})) && ! cancelled; then
  if [[ $code != {unfit} ]]; then
    ask requeue
  else
    # the process that polls the job excludes these nodes and releases it; a running job cannot exclude nodes
    printf '%s\n' "${{unfit[@]}}" >"$folder/unfit"
    ask requeuehold
  fi
fi
rm -f "$folder"/token.* "$folder/secrets.sh"
exit "$code"
"""

NODE_TEMPLATE = r"""#!/bin/bash
# Job {name}: srun starts this once on each node, with the number of the attempt.
trap : HUP INT QUIT USR1 USR2 ALRM TERM # the command handles them, and this script records its exit code

# shellcheck disable=SC2016 # names are meant as they stand
folder={folder} start={start}
export PHALANX_NODE_RANK=$SLURM_PROCID

finish() {{
  # only with builtins: a signal to the step at this moment would end any program that this shell starts
  printf '%s\n' "$1" >"$folder/code.$2.$SLURMD_NODENAME" || exit "$1"
  # report success to srun, which would otherwise kill the other nodes while they save
  if [[ $1 == {unfinished} ]]; then exit 0; fi
  exit "$1"
}}

if ! cd -- "$start"; then
  echo "$SLURMD_NODENAME does not see the job's folder; is it on a file system that all nodes share?" >&2
  finish {unfit} "$1"
fi
# the words are quoted already
# shellcheck disable=all
(
{secrets}{environment}exec -- {command}
)
finish $? "$1"
"""
