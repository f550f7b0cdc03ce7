"""Translate a job's resources and backend options to options of sbatch and srun, with the Slurm version that each
needs. Validated here; `batch_script.py` renders them."""

import math
import re
from dataclasses import dataclass, fields
from difflib import get_close_matches

from phalanx.errors import UsageError
from phalanx.jobs.backends.options import backend_option, option_names
from phalanx.jobs.spec import Job

Version = tuple[int, ...]


@dataclass(frozen=True)
class SlurmOptions:
    """Options of a job on Slurm. `since`: of one that sbatch takes by the same name, the first version that does; the
    others become something else."""

    partition: str | None = backend_option("Partition.", "NAME", since=(0,))
    account: str | None = backend_option("Account that is charged.", "NAME", since=(0,))
    qos: str | None = backend_option("Quality of service.", "NAME", since=(0,))
    reservation: str | None = backend_option("Reservation.", "NAME", since=(0,))
    constraint: str | None = backend_option("Features of the nodes.", "FEATURES", since=(0,))
    exclude: str | None = backend_option("Nodes to avoid.", "NODES", since=(0,))
    nodelist: str | None = backend_option("Nodes to include.", "NODES", since=(0,))
    gres: str | None = backend_option("Generic resources of a node.", "LIST", since=(0,))
    switches: str | None = backend_option(
        "Maximum number of leaf switches, and how long to wait for them.", "COUNT[@TIME]", since=(0,)
    )
    segment: str | None = backend_option("Nodes of a block segment, from Slurm 24.05 on.", "NUMBER", since=(24, 5))
    comment: str | None = backend_option("Comment.", "TEXT", since=(0,))
    dependency: str | None = backend_option("Jobs to wait for, such as afterok:12.", "LIST", since=(0,))
    exclusive: str = backend_option("Whole nodes; user: shared with jobs of the same user.", "yes|no|user", "no")
    container_image: str | None = backend_option("Container image, by pyxis.", "IMAGE")
    container_mounts: str | None = backend_option("Mounts of that container.", "SRC:DST,...")
    apptainer_image: str | None = backend_option("Container image, by Apptainer.", "IMAGE")
    max_requeues: int = backend_option("Maximum number of requeues.", "NUMBER", 100)


PASSTHROUGH_OPTIONS: dict[str, Version] = {
    each.name: each.metadata["since"] for each in fields(SlurmOptions) if "since" in each.metadata
}
MAX_WARNING_S = 65535
"""Seconds, of --signal."""
LIMIT_CHECK_INTERVAL_S, MAX_SCRIPT_START_S = 30, 15
"""Seconds between Slurm's looks at limits, by which it may warn early; and until a job's script runs on a slow node."""
EXPORTED_VARIABLES = (
    "HOME",
    "LANG",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "PATH",
    "SHELL",
    "TMPDIR",
    "USER",
)
"""Variables of the submitter's environment that a job gets in addition to those that it names."""


@dataclass(frozen=True)
class SbatchOptions:
    """A job's options, checked. `sbatch_options`: those of sbatch."""

    sbatch_options: tuple[str, ...]
    srun_options: tuple[str, ...] = ()
    """Options of srun."""
    apptainer_image: str | None = None
    max_requeues: int = SlurmOptions.max_requeues


def parse_options(job: Job, version: Version) -> SbatchOptions:
    """Parse the backend options. Raises UsageError with the first invalid option and the expected value."""
    for name, text in job.backend_options.items():
        _check_option(job, name, text, version)
    given = job.backend_options
    if "container-mounts" in given and "container-image" not in given:
        raise UsageError(f"job {job.name}: option container-mounts needs container-image")
    if "container-image" in given and "apptainer-image" in given:
        raise UsageError(f"job {job.name}: options container-image and apptainer-image exclude each other; give one")
    exclusive = _exclusive_option(job)
    header = [
        f"--job-name={job.name}",
        f"--nodes={job.num_nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        *([f"--cpus-per-task={job.cpus_per_node}"] if job.cpus_per_node else []),
        *_memory_option(job, exclusive),
        *_time_options(job),
        *([f"--nice={-job.priority}"] if job.priority else []),
        *([exclusive] if exclusive else []),
        "--requeue",
        "--open-mode=append",
        f"--export={','.join(EXPORTED_VARIABLES)}",  # and those of the job, by the scripts
        *(f"--{name}={given[name]}" for name in PASSTHROUGH_OPTIONS if name in given),
    ]
    requeues = given.get("max-requeues", str(SlurmOptions.max_requeues))
    if not re.fullmatch(r"[0-9]{1,6}", requeues):
        raise UsageError(f"job {job.name}: option max-requeues={requeues}: expected a whole number, 0 or more")
    step = [f"--cpus-per-task={job.cpus_per_node}"] if job.cpus_per_node else []
    if image := given.get("container-image"):
        step.append(f"--container-image={image}")
    return SbatchOptions(tuple(header), tuple(step), given.get("apptainer-image"), int(requeues))


def _check_option(job: Job, name: str, text: str, version: Version) -> None:
    known = option_names(SlurmOptions)
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise UsageError(f"job {job.name}: slurm has no option {name!r}; {hint}")
    if name != "exclusive" and not text.strip():
        raise UsageError(f"job {job.name}: option {name} is empty; expected a value")
    if not text.isprintable() and text:
        raise UsageError(f"job {job.name}: option {name}={text!r}: a line break or control character cannot be in it")
    needed = PASSTHROUGH_OPTIONS.get(name, (0,))
    if version < needed:
        raise UsageError(
            f"job {job.name}: option {name} needs Slurm {format_version(needed)}; here is {format_version(version)}"
        )


def format_version(version: Version) -> str:
    """Format a version as Slurm does: 24.05, 22.05.8."""
    return ".".join([f"{version[0]}", *(f"{number:02}" for number in version[1:2]), *map(str, version[2:])])


def _exclusive_option(job: Job) -> str | None:
    wanted = job.backend_options.get("exclusive", SlurmOptions.exclusive)
    meaning = {"": "--exclusive", "yes": "--exclusive", "true": "--exclusive", "user": "--exclusive=user"}
    if wanted in ("no", "false"):
        return None
    if wanted not in meaning:
        raise UsageError(f"job {job.name}: option exclusive={wanted}: expected yes, no or user")
    return meaning[wanted]


def _memory_option(job: Job, exclusive: str | None) -> list[str]:
    if job.memory_bytes is not None and exclusive != "--exclusive":
        return [f"--mem={math.ceil(job.memory_bytes / 2**20)}M"]
    return ["--mem=0"] if exclusive == "--exclusive" else []


def _time_options(job: Job) -> list[str]:
    """Slurm counts limits in whole minutes, and sends the signal at the last look at which it is not late yet. In a
    short job one that came at the start would let it do nothing at all; one that comes before the script runs is lost,
    since Slurm sends it once."""
    if job.time_limit_s is None:
        return [f"--signal=B:USR1@{_round_warning(job.warning_s)}"]
    minutes = math.ceil(job.time_limit_s / 60)
    warning = min(job.warning_s, job.time_limit_s / 2, 60 * minutes - LIMIT_CHECK_INTERVAL_S - MAX_SCRIPT_START_S)
    return [f"--time={minutes}", f"--signal=B:USR1@{_round_warning(warning)}"]


def _round_warning(warning: float) -> int:
    return min(math.ceil(warning), MAX_WARNING_S)
