"""Events for tests: whole ones, of which a test names only the fields that it is about."""

from typing import Any, TypeVar

from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointFailed,
    CheckpointRejected,
    CheckpointSaved,
    CheckpointUploaded,
    Compiled,
    EvaluationDone,
    EvaluationProgress,
    HangDetected,
    InMemoryCheckpointSaved,
    InMemoryIntervalChosen,
    InMemoryRestored,
    LogOpened,
    NonFiniteStep,
    RecipeResolved,
    RunEnded,
    RunEvent,
    RunWarning,
    StepDone,
    StepPhases,
    StragglerDetected,
    TasksEvaluated,
    WorkerFailure,
    WorkerStarted,
)

E = TypeVar("E", bound=RunEvent)

USUAL: dict[type[RunEvent], dict[str, Any]] = {
    LogOpened: {"format": 2, "phalanx_version": "0.1.0"},
    WorkerStarted: {"pid": 1, "rank": 0, "host": "n0", "attempt": 0},
    AttemptStarted: {
        "world_size": 1,
        "attempt": 0,
        "start_step": 0,
        "total_steps": 10,
        "device": "cpu",
        "num_micro_batches": 1,
    },
    RecipeResolved: {"duration_s": 3.5},
    Compiled: {"duration_s": 1.0, "num_blocks": 2, "num_graph_breaks": 0},
    StepDone: {
        "step": 1,
        "loss": 2.5,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "units": 8,
        "duration_s": 0.5,
        "breakdown_s": StepPhases(),
    },
    EvaluationProgress: {"step": 1, "num_samples_done": 8, "num_samples": 64},
    EvaluationDone: {"step": 1, "loss": 2.5, "metrics": {}, "num_samples": 8, "duration_s": 0.5, "is_best": False},
    TasksEvaluated: {
        "step": 1,
        "metrics": {"gsm8k/acc": 0.25},
        "standard_errors": {"gsm8k/acc": 0.01},
        "duration_s": 9.5,
    },
    CheckpointSaved: {
        "step": 1,
        "path": "checkpoints/step-000000001",
        "size_bytes": 100,
        "duration_s": 0.5,
        "stall_s": 0.01,
    },
    CheckpointUploaded: {
        "step": 1,
        "url": "s3://bucket/run",
        "sent_bytes": 1000,
        "skipped_bytes": 24,
        "duration_s": 0.5,
        "retries": {"SlowDown": 2},
    },
    CheckpointFailed: {"step": 1, "reason": "no space left on device"},
    CheckpointRejected: {
        "path": "checkpoints/step-000000001",
        "file": "rank-00000.safetensors",
        "reason": "chunk 3 has another checksum",
    },
    InMemoryIntervalChosen: {"step": 1, "interval_steps": 5, "cost_s": 0.01},
    InMemoryCheckpointSaved: {"step": 1, "size_bytes": 100, "duration_s": 0.5, "stall_s": 0.01},
    InMemoryRestored: {"step": 1, "checkpoint_step": 0, "fetched_bytes": 0, "duration_s": 0.5},
    NonFiniteStep: {"step": 1, "reason": "non-finite loss", "action": "skip", "num_skipped": 1},
    HangDetected: {"rank": 0, "host": "n0", "step": 1, "phase": "forward", "silence_s": 6.0, "is_stopped": False},
    StragglerDetected: {
        "rank": 0,
        "host": "n0",
        "slowdown": 1.5,
        "wait_s_per_step": 0.1,
        "wait_fraction": 0.2,
    },
    WorkerFailure: {"rank": 0, "cause": "signal", "signal": "SIGKILL", "message": "worker 0 was killed by SIGKILL"},
    RunWarning: {"text": "little room"},
    RunEnded: {"status": "done", "step": 10},
}


def made(kind: type[E], **fields: Any) -> E:
    """An event of a kind with these fields, and usual ones for the rest."""
    return kind(**{**USUAL[kind], **fields})
