"""Work for the processes of a layout: read a run's checkpoint and write it again, without a step between."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.data import open_data
from phalanx.recipe import load_recipe
from phalanx.recipe.schema import CheckpointConfig
from phalanx.run import Run
from phalanx.run.process_messages import WorkerFinishing
from phalanx.train.builder import build_context
from phalanx.train.checkpoint.checkpointer import Checkpointer, LiveState
from phalanx.train.checkpoint.save import SaveContext
from phalanx.train.distributed.environment import dist_env_from_environment
from phalanx.train.distributed.process_group import init_process_group, shut_down_process_group
from phalanx.train.reporter import make_reporter
from phalanx.train.resume import resume_training
from phalanx.train.train_context import WorkerProcess


def work(payload: dict[str, Any]) -> None:
    """Load `run`'s newest checkpoint under the layout of `recipe` and save it into the run `out`."""
    place, run, out = dist_env_from_environment(), Run(Path(payload["run"])), Run(Path(payload["out"]))
    recipe = load_recipe(Path(payload["recipe"])).recipe
    init_process_group(place)
    data = open_data(recipe.data, recipe.evaluation, recipe.seed)
    report = make_reporter(out, place.is_rank_zero, os.environ["PHALANX_EVENTS_FD"])
    parts = build_context(WorkerProcess(run, Path(payload["folder"]), place, report), recipe, data)
    progress = resume_training(parts, data.fingerprint, force=False)
    saving = Checkpointer(
        SaveContext(out, place, parts.parallel_model.mesh, {}, lambda event: None),
        CheckpointConfig(every=None, in_memory_every=None),
        progress.step,
        LiveState(parts.app_state),
        replace(progress, last_saved_step=0),
    )
    saving.start_save()
    saving.wait_snapshot_copied()
    saving.close()
    shut_down_process_group()
    if place.is_rank_zero:
        report.report_result({"status": "done"})
    report.send_control(WorkerFinishing(rank=place.rank, exit_code=0))
