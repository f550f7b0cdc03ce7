"""Work for the processes of a layout: read a run's checkpoint and write it again, without a step between."""

import os
from pathlib import Path
from typing import Any

from phalanx.data import open_data
from phalanx.recipe import load_recipe
from phalanx.run import Run
from phalanx.run.messages import WorkerFinishing
from phalanx.train.ends import resume
from phalanx.train.place import from_environment, join, leave
from phalanx.train.reporter import reporter
from phalanx.train.saving import Saving
from phalanx.train.state import held_state
from phalanx.train.stop import StopRequest
from phalanx.train.worker import assemble


def work(payload: dict[str, Any]) -> None:
    """Load `run`'s newest checkpoint under the layout of `recipe` and save it into the run `out`."""
    place, run, out = from_environment(), Run(Path(payload["run"])), Run(Path(payload["out"]))
    recipe = load_recipe(Path(payload["recipe"])).recipe
    join(place)
    data = open_data(recipe.data, recipe.evaluation, recipe.seed)
    report = reporter(out, place.leads, os.environ["PHALANX_EVENTS_FD"])
    parts, _ = assemble(run, recipe, Path(payload["folder"]), place, data, report, StopRequest())
    progress = resume(parts, data.fingerprint, force=False)
    saving = Saving(out, place, parts.divided.mesh, 3, {}, lambda event: None, lambda: None)
    saving.start(progress, held_state(parts.divided, parts.optimizer, parts.scale), [], best=False)
    saving.wait_copied()
    saving.close()
    leave()
    if place.leads:
        report.result({"status": "done"})
    report.say(WorkerFinishing(rank=place.rank, exit_code=0))
