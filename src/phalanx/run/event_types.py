"""The events of a run: one frozen dataclass for each kind of line in events.jsonl.

A field that has its default is left out of the line. Times are unix seconds, durations and waits seconds, ranks global
ranks, steps numbered from 1 (0: before the first). Floats are finite: a value that is not finite is None, which is null
in the file.
"""

from dataclasses import dataclass, field
from typing import Literal

from phalanx.run.boot_clock import unix_now
from phalanx.run.fields import TypedMessage

FORMAT_VERSION = 2
"""Format version of events.jsonl: a reader refuses any other."""

RunStatus = Literal["done", "interrupted", "failed"]
"""How a run ended: it reached its last step, it saved and left before (start it again), or it gave up."""
SkipReason = Literal["non-finite loss", "non-finite gradient"]
"""Why a step left the weights as they were."""
FailureCause = Literal[
    "signal",
    "exit_code",
    "hang",
    "peer_disconnected",
    "node_lost",
    "fork_server_died",
    "store_died",
    "storage_failed",
    "gpu_failed",
]
"""What ended a worker. `store`: the process through which workers find each other."""


class RunEvent(TypedMessage):
    """What every event has. `time`: unix seconds, from a clock that is read when the process starts and never set after
    it."""

    time: float = field(default_factory=unix_now)


class LogOpened(RunEvent):
    """The first line of events.jsonl. `format` is the version of the file's format."""

    format: int
    phalanx_version: str


class WorkerStarted(RunEvent):
    """A worker process of `attempt` has started."""

    pid: int
    rank: int
    host: str
    attempt: int


class AttemptStarted(RunEvent):
    """Training begins, or resumes, after `start_step` of `total_steps` steps. A global batch has
    `num_micro_batches`."""

    world_size: int
    attempt: int
    start_step: int
    total_steps: int
    device: str
    num_micro_batches: int


class RecipeResolved(RunEvent):
    """The data are prepared and every `auto` is resolved, before the first attempt of a command. This took
    `duration_s`: `load_s` of it to import torch and the recipe's code, `trace_s` to trace the model, `trials_s` in
    other trials, and most of the rest to prepare data. Cached results take no time."""

    duration_s: float
    load_s: float = 0.0
    trace_s: float = 0.0
    trials_s: float = 0.0


class Compiled(RunEvent):
    """torch.compile has compiled the blocks, before the first step."""

    duration_s: float
    num_blocks: int
    num_graph_breaks: int


@dataclass(frozen=True, kw_only=True)
class StepPhases:
    """Where the time of a step went, in seconds; the phases sum to the step's `duration_s`."""

    data_wait: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    grad_sync: float = 0.0
    optimizer: float = 0.0
    checkpoint_stall: float = 0.0
    other: float = 0.0


class StepDone(RunEvent, kind="step"):
    """A training step is done. `loss` is the mean over the terms of the global batch, `grad_norm` the norm before
    clipping, both None where they are not finite; `units` the tokens of the global batch, or its samples where the task
    has no tokens (`unit` of plan.json). `skip_reason`: why the step changed no weights. `noise_scale_samples`: the
    gradient noise scale, in samples, where this step added to the estimate."""

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    units: int
    duration_s: float
    breakdown_s: StepPhases
    skip_reason: SkipReason | None = None
    noise_scale_samples: float | None = None


class EvaluationProgress(RunEvent):
    """The validation set is being scored after `step`, and this takes long: `num_samples_done` of `num_samples`."""

    step: int
    num_samples_done: int
    num_samples: int


class EvaluationDone(RunEvent, kind="evaluation"):
    """`num_samples` of the validation set were scored after `step`. `loss` and `metrics` are None where they are not
    finite; with several sources `metrics` have the loss of each. `is_best`: the lowest loss so far."""

    step: int
    loss: float | None
    metrics: dict[str, float | None]
    num_samples: int
    duration_s: float
    is_best: bool


class TasksEvaluated(RunEvent):
    """The checkpoint of `step` was scored on `evaluation.tasks` by another process, which took `duration_s`. `metrics`
    are TASK/METRIC, None where they are not finite; `standard_errors` of those that have one."""

    step: int
    metrics: dict[str, float | None]
    standard_errors: dict[str, float]
    duration_s: float


class CheckpointSaved(RunEvent):
    """A checkpoint is complete on disk. `path` is relative to the run directory. The save took `duration_s` in the
    background; training waited for `stall_s` of it."""

    step: int
    path: str
    size_bytes: int
    duration_s: float
    stall_s: float


class CheckpointUploaded(RunEvent):
    """The checkpoint of `step` is whole in the store at `url`. Blocks of `skipped_bytes` were there already. Of
    `requests` some were tried again, as often as `retries` says, by reason."""

    step: int
    url: str
    sent_bytes: int
    skipped_bytes: int
    duration_s: float
    retries: dict[str, int]
    requests: int | None = None


class CheckpointFailed(RunEvent):
    """The checkpoint of `step` could not be written; training continues."""

    step: int
    reason: str


class CheckpointRejected(RunEvent):
    """A checkpoint is damaged and is not used. `path` is relative to the run directory, absolute for an in-memory
    checkpoint; `file` is the damaged file in it."""

    path: str
    file: str
    reason: str


class InMemoryIntervalChosen(RunEvent, kind="in_memory_interval"):
    """From `step` on, an in-memory checkpoint is saved every `interval_steps` (None: never). One slows training by
    `cost_s`."""

    step: int
    interval_steps: int | None
    cost_s: float


class InMemoryCheckpointSaved(RunEvent):
    """An in-memory checkpoint is complete. Sizes and times are as in `checkpoint_saved`."""

    step: int
    size_bytes: int
    duration_s: float
    stall_s: float


class InMemoryRestored(RunEvent):
    """The state of `step` was restored from memory. The newest checkpoint on disk is that of `checkpoint_step`;
    `fetched_bytes` came from other nodes."""

    step: int
    checkpoint_step: int
    fetched_bytes: int
    duration_s: float


class NonFiniteStep(RunEvent, kind="nonfinite_step"):
    """A step was skipped because its loss or gradient was not finite. `action`: `skip` it, `rescale` (lower the loss
    scale of fp16), or `rollback` to the last checkpoint. `num_skipped`: skipped steps of the run so far."""

    step: int
    reason: SkipReason
    action: Literal["skip", "rescale", "rollback"]
    num_skipped: int


class HangDetected(RunEvent, kind="hang"):
    """All workers wait for one that has made no progress for `silence_s`. `phase`: what it was doing. `is_stopped`: by
    SIGSTOP or a debugger. `stack`: stacks of its threads, None if it did not print them."""

    rank: int
    host: str | None = None
    step: int
    phase: str
    silence_s: float
    is_stopped: bool
    stack: str | None = None


class StragglerDetected(RunEvent, kind="straggler"):
    """A worker takes `slowdown` times as long as its peers. They wait `wait_s_per_step` for it, which is
    `wait_fraction` of the time."""

    rank: int
    host: str | None = None
    slowdown: float
    wait_s_per_step: float
    wait_fraction: float


class WorkerFailure(RunEvent, kind="failure"):
    """A worker, or what it needs, has failed. `signal` is set if `cause` is `signal`, `exit_code` if it is `exit_code`,
    `host` for a lost node, an unfit node (exit code 77) and a fork server. `message` describes the failure in words."""

    rank: int
    cause: FailureCause
    message: str
    signal: str | None = None
    exit_code: int | None = None
    host: str | None = None

    @property
    def what(self) -> str:
        """The cause in a word or two: the signal's name, `exit 1`, `node lost`."""
        if self.cause == "signal":
            return self.signal or "a signal"
        return f"exit {self.exit_code}" if self.cause == "exit_code" else self.cause.replace("_", " ")


class RunWarning(RunEvent, kind="warning"):
    """A message for the user: one or two sentences."""

    text: str


class RunEnded(RunEvent):
    """The run has ended after `step`; before the recipe's last for a `reason`."""

    status: RunStatus
    step: int
    reason: str | None = None


Event = (
    LogOpened
    | WorkerStarted
    | RecipeResolved
    | AttemptStarted
    | Compiled
    | StepDone
    | EvaluationProgress
    | EvaluationDone
    | TasksEvaluated
    | CheckpointSaved
    | CheckpointUploaded
    | CheckpointFailed
    | CheckpointRejected
    | InMemoryIntervalChosen
    | InMemoryCheckpointSaved
    | InMemoryRestored
    | NonFiniteStep
    | HangDetected
    | StragglerDetected
    | WorkerFailure
    | RunWarning
    | RunEnded
)
