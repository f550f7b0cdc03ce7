"""What Slurm is asked for: a job's sizes and options as options of sbatch and srun, with the version that each needs.
Checked here; written in slurm_script."""

import math
import re
from dataclasses import dataclass
from difflib import get_close_matches

from phalanx.errors import UsageError
from phalanx.jobs.spec import Job

Version = tuple[int, ...]

PLAIN: dict[str, Version] = {
    "partition": (0,),
    "account": (0,),
    "qos": (0,),
    "reservation": (0,),
    "constraint": (0,),
    "exclude": (0,),
    "nodelist": (0,),
    "gres": (0,),
    "switches": (0,),
    "segment": (24, 5),
    "comment": (0,),
    "dependency": (0,),
}
"""Options that sbatch takes by the same name, and the first version that does."""
OWN = ("exclusive", "container-image", "container-mounts", "apptainer-image", "max-requeues")
"""Options that become something else than one option of sbatch."""
LONGEST_WARNING = 65535
"""Seconds, of --signal."""
LOOKS, STARTS = 30, 15
"""Seconds between Slurm's looks at limits, by which it may warn early; and until a job's script runs on a slow node."""
PASSED_ON = ("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TMPDIR", "USER")
"""What a job gets of the environment of who submits, besides what it names."""


@dataclass(frozen=True)
class Options:
    """A job's options, checked. `header`: those of sbatch."""

    header: tuple[str, ...]
    step: tuple[str, ...] = ()
    """Those of srun."""
    apptainer: str | None = None
    max_requeues: int = 100


def options_of(job: Job, version: Version) -> Options:
    """What to ask Slurm for; UsageError names the first option that is wrong, and what would be right."""
    for name, text in job.options.items():
        _check(job, name, text, version)
    given = job.options
    if "container-mounts" in given and "container-image" not in given:
        raise UsageError(f"job {job.name}: option container-mounts needs container-image")
    if "container-image" in given and "apptainer-image" in given:
        raise UsageError(f"job {job.name}: options container-image and apptainer-image exclude each other; give one")
    exclusive = _exclusive(job)
    header = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.devices}"] if job.devices else []),
        *([f"--cpus-per-task={job.cores}"] if job.cores else []),
        *_memory(job, exclusive),
        *_limits(job),
        *([f"--nice={-job.priority}"] if job.priority else []),
        *([exclusive] if exclusive else []),
        "--requeue",
        "--open-mode=append",
        f"--export={','.join(PASSED_ON)}",
        *(f"--{name}={given[name]}" for name in PLAIN if name in given),
    ]
    requeues = given.get("max-requeues", "100")
    if not re.fullmatch(r"[0-9]{1,6}", requeues):
        raise UsageError(f"job {job.name}: option max-requeues={requeues}: expected a whole number, 0 or more")
    step = [f"--cpus-per-task={job.cores}"] if job.cores else []
    if image := given.get("container-image"):
        step.append(f"--container-image={image}")
    return Options(tuple(header), tuple(step), given.get("apptainer-image"), int(requeues))


def _check(job: Job, name: str, text: str, version: Version) -> None:
    known = (*PLAIN, *OWN)
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise UsageError(f"job {job.name}: slurm has no option {name!r}; {hint}")
    if name != "exclusive" and not text.strip():
        raise UsageError(f"job {job.name}: option {name} is empty; expected a value")
    if not text.isprintable() and text:
        raise UsageError(f"job {job.name}: option {name}={text!r}: a line break or control character cannot be in it")
    needed = PLAIN.get(name, (0,))
    if version < needed:
        raise UsageError(f"job {job.name}: option {name} needs Slurm {words(needed)}; here is {words(version)}")


def words(version: Version) -> str:
    """As Slurm writes versions: 24.05, 22.05.8."""
    return ".".join([f"{version[0]}", *(f"{number:02}" for number in version[1:2]), *map(str, version[2:])])


def _exclusive(job: Job) -> str | None:
    wanted = job.options.get("exclusive", "no")
    meaning = {"": "--exclusive", "yes": "--exclusive", "true": "--exclusive", "user": "--exclusive=user"}
    if wanted in ("no", "false"):
        return None
    if wanted not in meaning:
        raise UsageError(f"job {job.name}: option exclusive={wanted}: expected yes, no or user")
    return meaning[wanted]


def _memory(job: Job, exclusive: str | None) -> list[str]:
    if job.memory is not None:
        return [f"--mem={math.ceil(job.memory / 2**20)}M"]
    return ["--mem=0"] if exclusive == "--exclusive" else []


def _limits(job: Job) -> list[str]:
    """Slurm counts limits in whole minutes, and sends the signal at the last look at which it is not late yet. In a
    short job one that came at the start would let it do nothing at all; one that comes before the script runs is lost,
    since Slurm sends it once."""
    if job.limit is None:
        return [f"--signal=B:USR1@{_whole(job.warning)}"]
    minutes = math.ceil(job.limit / 60)
    warning = min(job.warning, job.limit / 2, 60 * minutes - LOOKS - STARTS)
    return [f"--time={minutes}", f"--signal=B:USR1@{_whole(warning)}"]


def _whole(warning: float) -> int:
    return min(math.ceil(warning), LONGEST_WARNING)
