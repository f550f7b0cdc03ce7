"""Writes run directories as the engine would, without an engine: realistic curves, any fault on demand, seeded."""

import json
import math
import random
from pathlib import Path
from typing import Any, Self

from made_events import made
from phalanx.observe.history import read_history
from phalanx.observe.html_report.report import render_report_html
from phalanx.observe.recommendations import find_recommendations
from phalanx.observe.summary import build_summary
from phalanx.observe.text_report import render_report_text
from phalanx.run import Run
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointFailed,
    CheckpointRejected,
    CheckpointSaved,
    EvaluationDone,
    NonFiniteStep,
    RunEnded,
    RunEvent,
    RunWarning,
    StepDone,
    StepPhases,
    WorkerFailure,
    WorkerStarted,
)
from phalanx.run.fields import to_fields

HEALTHY = {
    "data_wait": 0.008,
    "forward": 0.30,
    "backward": 0.59,
    "grad_sync": 0.0,
    "optimizer": 0.06,
    "checkpoint_stall": 0.002,
    "other": 0.04,
}
T0 = 1_790_000_000.0


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "name": "gpt-python",
        "model": {"build": "phalanx.models:transformer", "args": {"layers": 4, "hidden_size": 256, "num_heads": 4}},
        "task": "language-modeling",
        "data": {
            "source": {"text": "${python.stdlib}/**/*.py"},
            "tokenizer": "bytes",
            "seq_len": 256,
        },
        "evaluation": {"every": 50},
        "batch": {"global_size": 16, "micro_size": 8},
        "steps": 300,
        "optimizer": {
            "name": "adamw",
            "lr": 1e-3,
            "max_grad_norm": 1.0,
            "schedule": {"warmup_steps": 20, "decay": "cosine"},
        },
        "precision": "bf16",
        "parallelism": {"replicate": 1},
        "num_threads": 2,
        **changes,
    }


class Maker:
    """Writes events with a clock of its own. `steps(first, last)` writes steps; the rest is named as the events are."""

    def __init__(self, path: Path, *, total: int = 300, seconds: float = 0.4, seed: int = 0, **shape: Any):
        self.path, self.total, self.seconds = path, total, seconds
        self.random = random.Random(seed)
        self.split = {**HEALTHY, **shape.pop("split", {})}
        self.world = shape.pop("world", 1)
        self.mfu = shape.pop("mfu", 0.45)
        self.overfit_from = shape.pop("overfit_from", None)
        self.falling = shape.pop("falling", False)
        self.tokens = shape.pop("tokens", 4096)
        self.matmul = shape.pop("matmul", {"fp32": 0.11, "bf16": 0.374})
        self.t = T0
        self.stall_s = 0.0
        self.attempt = -1
        path.mkdir(parents=True, exist_ok=True)
        (path / "checkpoints").mkdir(exist_ok=True)
        changes = {"steps": total, "parallelism": {"replicate": self.world}, **shape}
        (path / "resolved.yaml").write_text(json.dumps(recipe(**changes)))
        self.precision = changes.get("precision", "bf16")
        self.write_facts()
        (path / "events.jsonl").touch()

    def write_facts(self) -> None:
        rate = self.matmul[self.precision] * 1e12 * self.world
        plan = {
            "trainable_parameters": 3_247_360,
            "flops_per_sample": self.mfu * rate * self.seconds / (self.tokens / 256),
            "flops_rule": "6 x parameters in matmuls + attention 12 x layers x width x sequence, per token",
            "unit": "tokens",
            "units_per_sample": 256,
            "bytes_per_sample": 512,
            "activation_bytes_per_sample": 9_000_000,
            "auto_choices": [
                {"key": "precision", "value": "bf16", "reason": "bf16 matmul is 3.4 x fp32 on this machine"},
                {"key": "batch.micro_size", "value": 8, "reason": "fastest of 4, 8 and 16 in a trial"},
            ],
            "predicted_step_s": self.seconds * 0.96,
        }
        cluster = {
            "host": "node-1",
            "device": "cpu",
            "device_name": "AMD EPYC 9R14",
            "device_count": self.world,
            "physical_cores": 2 * self.world,
            "memory_bytes": 16_000_000_000,
            "measured_matmul_tflops": self.matmul,
            "threads_per_worker": 2,
            "data_sheet_tflops": {"fp32": 0.166, "bf16": 0.666},
            "data_sheet_source": "cores x clock x FLOPs a cycle",
        }
        environment: dict[str, object] = {
            "python": "3.11.7",
            "torch": "2.13.0",
            "phalanx": "0.1.0",
            "platform": "Linux",
        }
        environment["git"] = {"commit": "0123456789abcdef" * 2, "dirty": True, "untracked_files": 0}
        for name, value in {"plan": plan, "cluster": cluster, "environment": environment}.items():
            (self.path / f"{name}.json").write_text(json.dumps(value))

    def event(self, kind: type[RunEvent], **fields: Any) -> Self:
        with open(self.path / "events.jsonl", "a") as file:
            file.write(json.dumps(to_fields(made(kind, time=self.t, **fields))) + "\n")  # type: ignore[arg-type]
        return self

    def start(self, from_step: int = 0) -> Self:
        self.attempt += 1
        for rank in range(self.world):  # workers tell of themselves as soon as they live, before the attempt starts
            self.event(WorkerStarted, pid=1000 + rank, rank=rank, host="node-1", attempt=self.attempt)
        self.event(
            AttemptStarted,
            world_size=self.world,
            attempt=self.attempt,
            start_step=from_step,
            total_steps=self.total,
            device="cpu",
            num_micro_batches=2,
        )
        self.t += 1.2
        return self

    def true_loss(self, step: int) -> float:
        if self.falling:
            return 5.5 - 3.5 * step / self.total
        return 1.4 + 4.15 * math.exp(-9 * step / self.total)

    def step(self, step: int, **changes: Any) -> Self:
        progress = step / self.total
        seconds = self.seconds * self.random.lognormvariate(0, 0.03) * (3.0 if step == 1 else 1.0)
        shares = {part: share * self.random.lognormvariate(0, 0.05) for part, share in self.split.items()}
        total = sum(shares.values())
        parts = {part: share / total * seconds for part, share in shares.items()}
        parts["checkpoint_stall"] += self.stall_s
        seconds, self.stall_s = seconds + self.stall_s, 0.0
        self.t += seconds
        values = {
            "step": step,
            "loss": self.true_loss(step) + self.random.gauss(0, 0.04),
            "grad_norm": 0.4 + 2.5 * math.exp(-12 * progress) + abs(self.random.gauss(0, 0.08)),
            "lr": 1e-3 * min(step / 20, 0.1 + 0.45 * (1 + math.cos(math.pi * progress))),
            "units": self.tokens,
            "duration_s": seconds,
            "breakdown_s": StepPhases(**parts),
        }
        self.event(StepDone, **{**values, **changes})
        return self

    def eval(self, step: int, best: bool = True) -> None:
        held_out = self.true_loss(step) + 0.07 + abs(self.random.gauss(0, 0.004)) * (step < self.total)
        if self.overfit_from is not None and step > self.overfit_from:
            held_out = self.true_loss(self.overfit_from) + 0.07 + 0.004 * (step - self.overfit_from)
            best = False
        self.t += 0.6
        metrics = {"accuracy": max(0.0, 0.8 - held_out / 8), "bits_per_byte": held_out / math.log(2)}
        self.event(
            EvaluationDone,
            step=step,
            loss=held_out,
            metrics=metrics,
            num_samples=512,
            duration_s=0.6,
            is_best=best,
        )

    def checkpoint(self, step: int, stall: float = 0.004) -> Self:
        """Save after `step`; the next step is the one that stalls for it, as in the trainer."""
        if step == self.total:
            self.t += stall
        else:
            self.stall_s += stall
        path = f"checkpoints/step-{step:09d}"
        self.event(CheckpointSaved, step=step, path=path, size_bytes=39_012_352, duration_s=0.31, stall_s=stall)
        return self

    def steps(self, first: int, last: int) -> Self:
        for step in range(first, last + 1):
            self.step(step)
            if step % max(1, self.total // 6) == 0:
                self.eval(step)
                self.checkpoint(step)
        return self

    def end(self, status: str = "done", step: int | None = None, digest: str = "a3f1" * 8) -> Self:
        step = self.total if step is None else step
        self.event(RunEnded, status=status, step=step)
        result = {
            "format": 1,
            "status": status,
            "steps": step,
            "final_loss": 1.41,
            "num_units": step * self.tokens,
            "duration_s": self.t - T0,
            "num_restarts": self.attempt,
            "digest": digest,
        }
        (self.path / "result.json").write_text(json.dumps(result))
        return self


def healthy(path: Path, **shape: Any) -> Path:
    """A run from start to end with nothing to complain of."""
    maker = Maker(path, **shape)
    maker.start().steps(1, maker.total).end()
    return path


def troubled(path: Path, **shape: Any) -> Path:
    """300 steps with a kill at 137, a rejected checkpoint, skipped steps, a rollback, a fault and a warning."""
    maker = Maker(path, world=2, split={"grad_sync": 0.22, "data_wait": 0.31}, **shape).start().steps(1, 137)
    maker.t += 20
    maker.event(WorkerFailure, rank=1, cause="signal", signal="SIGKILL", message="worker 1 was killed by SIGKILL")
    maker.t += 2
    maker.event(
        CheckpointRejected,
        path="checkpoints/step-000000100",
        file="rank-00001.safetensors",
        reason="chunk 3 has another checksum",
    )
    maker.start(from_step=50).steps(51, 209)
    for step in (210, 211, 212):
        maker.step(step, loss=None, skip_reason="non-finite loss")
        action = "rollback" if step == 212 else "skip"
        maker.event(NonFiniteStep, step=step, reason="non-finite loss", action=action, num_skipped=step - 209)
    maker.steps(201, 300)
    maker.event(CheckpointFailed, step=300, reason="no space left on device (39 MB needed, 2 MB free)")
    maker.event(RunWarning, text="the micro-batch of 8 needs 91% of the memory").end()
    return path


def render_pages(path: Path) -> tuple[str, str]:
    """The report of a run as text and as HTML."""
    run = Run(path)
    history = read_history(run.events)
    summary = build_summary(run, history)
    advices = find_recommendations(summary, history)
    return render_report_text(summary, advices), render_report_html(summary, history, advices)
