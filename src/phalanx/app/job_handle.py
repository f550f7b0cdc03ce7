"""Submit a training job from Python, and handle it. `phalanx.submit` is here."""

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.app.job_logs import iter_log_lines
from phalanx.app.submit import default_gpus, format_status, make_recipe_job, parse_duration, poll_until_final
from phalanx.app.train_arguments import TrainArguments
from phalanx.errors import DataError, ExitCode, GaveUpError
from phalanx.jobs.backends.base import Backend, open_backend, restart_dead_daemon
from phalanx.jobs.spec import JobState, JobStatus
from phalanx.run import Run
from phalanx.run.directory import describe_unfinished

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobHandle:
    """A submitted job that trains a run."""

    id: str
    backend: Backend
    run: Run

    def status(self) -> JobStatus:
        """Return the state of the job, as `phalanx jobs status` does."""
        restart_dead_daemon(self.backend)
        return self.backend.poll(self.id)

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait until the job ends, and return its last status.

        A job that is held because a node was unfit is released. A backend that does not answer is asked again for 10
        minutes.

        Raises:
            TimeoutError: the job has not ended after `timeout_s`; it keeps running.
            UsageError: the backend does not answer.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s

        def sleep(seconds: float) -> None:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"job {self.id} has not ended after {timeout_s:g} s")
            time.sleep(min(seconds, left_s))

        *_, status = poll_until_final(self.backend, self.id, logger.warning, sleep)
        return status

    def logs(self, follow: bool = False) -> Iterator[str]:
        """Yield the lines of the log, as `phalanx jobs logs` prints them; with `follow` until the job ends."""
        return iter_log_lines(self.backend, self.id, follow, raw=False)

    def cancel(self) -> None:
        """Cancel the job. It saves a checkpoint first, so that the run can be resumed. An ended job is not changed."""
        self.backend.cancel(self.id)

    def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait until the job ends, and return the content of `result.json`.

        Raises:
            GaveUpError: the job did not end as done; `code` is its exit code, if the command line has it.
            DataError: the run directory is on no file system of this machine.
            TimeoutError: as `wait`.
        """
        status = self.wait(timeout_s)
        if status.state is not JobState.DONE:
            raise _make_error(
                f"{format_status(status)}; see `phalanx jobs logs {self.id} --on {self.backend.name}`", status.exit_code
            )
        if not self.run.path.is_dir():
            raise DataError(f"{self.run.path}: not on this machine, and job {self.id} is done")
        if (problem := describe_unfinished(self.run)) is not None:
            raise GaveUpError(problem)
        return self.run.read_json(self.run.result) or {}


def submit(
    recipe: "str | os.PathLike[str]",
    overrides: Sequence[str] = (),
    *,
    on: str = "local",
    nodes: int = 1,
    nproc_per_node: int | None = None,
    gpus: int | None = None,
    run: "str | os.PathLike[str] | None" = None,
    time_limit: str | None = None,
    backend_options: Mapping[str, str] | None = None,
    snapshot: str | None = None,
    force: bool = False,
) -> JobHandle:
    """Submit a job that trains a recipe, as `phalanx jobs submit` does.

    The backend restarts the job until it is done. The recipe is checked before the job is sent. The parameters are the
    options of the command.

    Args:
        recipe: a recipe file, or a script that calls `phalanx.session`.
        overrides: `key=value` of the recipe, or arguments of the script.
        on: backend: local, slurm, kubernetes or ray.
        nodes: number of nodes.
        nproc_per_node: workers on each node; default: as the recipe's parallelism requires, else one per GPU, else 1.
        gpus: GPUs on each node; default: in the local queue one per worker, or all.
        run: run directory; default: `runs/<name>`. It must be on a file system that all nodes share.
        time_limit: time limit of each attempt, such as `2h`.
        backend_options: options of the backend, such as `{"partition": "gpu"}`.
        snapshot: `workdir` or a git revision: train a copy of the recipe's directory.
        force: resume although the recipe or the data changed.

    Raises:
        RecipeError: the recipe is wrong.
        UsageError: the backend is not installed, does not answer, or cannot run the job.
    """
    job = make_recipe_job(
        TrainArguments(Path(recipe), overrides, None if run is None else Path(run), nproc_per_node, force),
        snapshot=snapshot,
        num_nodes=nodes,
        gpus_per_node=gpus,
        default_gpus=default_gpus(on, nproc_per_node) if gpus is None else None,
        time_limit_s=parse_duration(time_limit),
        backend_options=dict(backend_options or {}),
    )
    assert job.run_dir is not None
    backend = open_backend(on)
    return JobHandle(backend.submit(backend.render(job)), backend, Run(job.run_dir))


def _make_error(message: str, exit_code: int | None) -> GaveUpError:
    error = GaveUpError(message)
    if exit_code in set(ExitCode) - {ExitCode.DONE}:
        error.code = ExitCode(exit_code)
    return error
