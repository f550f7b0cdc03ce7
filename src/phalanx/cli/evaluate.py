"""`phalanx evaluate`: evaluate a run's checkpoint on the validation set."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli import options
from phalanx.text_table import Column, format_facts, format_table

if TYPE_CHECKING:
    from phalanx.app.lm_eval import TaskScore

TASKS_WITH_PERPLEXITY = ("language-modeling", "chat", "distillation")
"""Tasks that are scored by the mean cross-entropy of tokens."""


def evaluate(
    run: options.ModelArgument,
    samples: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Evaluate at most N validation samples.", show_default="all")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]", help="Evaluate on these tasks of lm-eval instead.", show_default="validation set"
        ),
    ] = None,
    lm_eval: Annotated[
        str | None,
        typer.Option(
            metavar="PYTHON",
            help="Python of an environment with lm-eval, for --tasks. Also as PHALANX_LM_EVAL.",
            show_default="lm_eval on the PATH",
        ),
    ] = None,
    step: options.StepOption = None,
    best: options.BestOption = False,
    trust_code: options.TrustCodeOption = False,
    device: options.DeviceOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Evaluate a run's checkpoint on the validation set: loss and the task's metrics.

    With --tasks evaluate it, or a Hugging Face directory, on tasks of lm-eval.
    """
    from phalanx.app.evaluate import CheckpointSelection, evaluate_run
    from phalanx.run import Run

    selection = CheckpointSelection(step, best, trust_code)
    if tasks is not None:
        from phalanx.app.lm_eval import evaluate_tasks, find_lm_eval

        command = find_lm_eval(lm_eval)
        _print_tasks(evaluate_tasks(run, selection, tasks, command, device, samples, options.print_warning), as_json)
        return
    scores = evaluate_run(Run.open_existing(run), selection, device, samples, options.print_warning)
    result = scores.result
    facts = {"checkpoint": scores.checkpoint, "loss": result.loss, **result.metrics, "num_samples": result.num_samples}
    if as_json:
        typer.echo(json.dumps({**facts, "duration_s": result.duration_s}))
        return
    if scores.task in TASKS_WITH_PERPLEXITY:
        facts["perplexity"] = math.exp(result.loss)
    texts = {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in facts.items()}
    typer.echo("\n".join(format_facts((name.removeprefix("num_"), text) for name, text in texts.items())))


def _print_tasks(scores: "Sequence[TaskScore]", as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([asdict(score) for score in scores]))
        return
    numbers = ([score.value, score.standard_error] for score in scores)
    texts = (["" if number is None else f"{number:.4f}" for number in pair] for pair in numbers)
    rows = ([score.task, score.metric, *pair] for score, pair in zip(scores, texts, strict=True))
    columns = [Column("task"), Column("metric"), Column("value", True), Column("standard error", True)]
    typer.echo("\n".join(format_table(columns, rows)))
