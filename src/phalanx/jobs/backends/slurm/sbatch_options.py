"""Validate a job's resources and backend options, and translate them to options of sbatch and srun."""

import math
from dataclasses import dataclass, fields

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import backend_option, parse_backend_options, parse_count
from phalanx.jobs.spec import Job

Version = tuple[int, ...]


@dataclass(frozen=True)
class SlurmOptions:
    """Options of a job on Slurm. `is_passed`: sbatch takes it by the same name; the others become something else."""

    partition: str | None = backend_option("Partition.", "NAME", is_passed=True)
    account: str | None = backend_option("Account that is charged.", "NAME", is_passed=True)
    qos: str | None = backend_option("Quality of service.", "NAME", is_passed=True)
    reservation: str | None = backend_option("Reservation.", "NAME", is_passed=True)
    constraint: str | None = backend_option("Features of the nodes.", "FEATURES", is_passed=True)
    exclude: str | None = backend_option("Nodes to avoid.", "NODES", is_passed=True)
    nodelist: str | None = backend_option("Nodes to include.", "NODES", is_passed=True)
    gres: str | None = backend_option("Generic resources of a node.", "LIST", is_passed=True)
    switches: str | None = backend_option(
        "Maximum number of leaf switches, and how long to wait for them.", "COUNT[@TIME]", is_passed=True
    )
    segment: str | None = backend_option("Nodes of a block segment, from Slurm 24.05 on.", "NUMBER", is_passed=True)
    comment: str | None = backend_option("Comment.", "TEXT", is_passed=True)
    dependency: str | None = backend_option("Jobs to wait for, such as afterok:12.", "LIST", is_passed=True)
    exclusive: str = backend_option("Whole nodes; user: shared with jobs of the same user.", "yes|no|user", "no")
    container_image: str | None = backend_option("Container image, by pyxis.", "IMAGE")
    container_mounts: str | None = backend_option("Mounts of that container.", "SRC:DST,...")
    apptainer_image: str | None = backend_option("Container image, by Apptainer.", "IMAGE")
    max_requeues: int = backend_option("Maximum number of requeues.", "NUMBER", 100, parse=parse_count)


PASSTHROUGH_OPTIONS = tuple(each.name for each in fields(SlurmOptions) if "is_passed" in each.metadata)
EXPEDITE_VERSION: Version = (25, 11)
"""The first Slurm that starts a requeued job before all others, and without the usual two minutes of waiting."""
MAX_WARNING_S = 65535
"""Seconds, of --signal."""
LIMIT_CHECK_INTERVAL_S, MAX_SCRIPT_START_S = 30, 15
"""Seconds between Slurm's looks at limits, by which it may warn early; and until a job's script runs on a slow node."""
EXPORTED_VARIABLES = ("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TMPDIR", "USER")
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
    options: SlurmOptions = parse_backend_options(job, "slurm", SlurmOptions)
    for name, text in job.backend_options.items():
        _check_option(job, name, text)
    given = job.backend_options
    if "container-mounts" in given and "container-image" not in given:
        raise UsageError(f"job {job.name}: option container-mounts needs container-image")
    if "container-image" in given and "apptainer-image" in given:
        raise UsageError(f"job {job.name}: options container-image and apptainer-image exclude each other; give one")
    exclusive = _exclusive_option(job)
    memory = None if job.memory_bytes is None else f"{math.ceil(job.memory_bytes / 2**20)}M"
    memory = "0" if exclusive == "--exclusive" else memory
    header = [
        f"--job-name={job.name}",
        f"--nodes={job.num_nodes}" if job.min_nodes is None else f"--nodes={job.min_nodes}-{job.num_nodes}",
        # with a number of tasks Slurm grants the least number of nodes; --no-kill: the job outlives a lost node
        *(["--ntasks-per-node=1"] if job.min_nodes is None else ["--no-kill"]),
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        *([f"--cpus-per-task={job.cpus_per_node}"] if job.cpus_per_node else []),
        *([f"--mem={memory}"] if memory else []),
        *_time_options(job),
        *([f"--nice={-job.priority}"] if job.priority else []),
        *([exclusive] if exclusive else []),
        "--requeue=expedite" if job.min_nodes is not None and version >= EXPEDITE_VERSION else "--requeue",
        "--open-mode=append",
        f"--export={','.join(EXPORTED_VARIABLES)}",  # and those of the job, by the scripts
        *(f"--{name}={given[name]}" for name in PASSTHROUGH_OPTIONS if name in given),
    ]
    step = [f"--cpus-per-task={job.cpus_per_node}"] if job.cpus_per_node else []
    if job.min_nodes is not None:  # later options override those that the script gives
        step += ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
    if options.container_image is not None:
        step.append(f"--container-image={options.container_image}")
    return SbatchOptions(tuple(header), tuple(step), options.apptainer_image, options.max_requeues)


def _check_option(job: Job, name: str, text: str) -> None:
    if name != "exclusive" and not text.strip():
        raise UsageError(f"job {job.name}: option {name} is empty; expected a value")
    if not text.isprintable() and text:
        raise UsageError(f"job {job.name}: option {name}={text!r}: a line break or control character cannot be in it")


def _exclusive_option(job: Job) -> str | None:
    wanted = job.backend_options.get("exclusive", SlurmOptions.exclusive)
    meaning = {"": "--exclusive", "yes": "--exclusive", "true": "--exclusive", "user": "--exclusive=user"}
    if wanted in ("no", "false"):
        return None
    if wanted not in meaning:
        raise UsageError(f"job {job.name}: option exclusive={wanted}: expected yes, no or user")
    return meaning[wanted]


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
