"""What `phalanx train` says before the first step."""

from pathlib import Path

import pytest

from phalanx.app.prepare_run import PreparedRun
from phalanx.cli.train_local import format_introduction
from phalanx.run import Run
from resolved_recipes import resolved_recipe


@pytest.mark.parametrize(("every", "when"), [(None, "at the end only"), (50, "when a checkpoint saves them")])
def test_trackers_that_hold_steps_back_say_when_their_charts_get_them(every: int | None, when: str) -> None:
    recipe = resolved_recipe(trackers=["tensorboard", "mlflow", "wandb"], checkpoint={"every": every})
    text = format_introduction(PreparedRun(Run(Path("run")), recipe, Path(), {}, {}, [], 0))
    assert f"trackers charts of mlflow, wandb get steps {when}" in text
