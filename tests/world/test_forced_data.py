"""A run goes on with other data only when it is forced to, and that is written down."""

from pathlib import Path

import pytest

from phalanx.errors import DataError, ExitCode
from phalanx.run.event_types import RunWarning
from train_harness import TrainHarness, random_words


def test_going_on_with_other_data_must_be_forced_and_is_recorded(lab: TrainHarness, tmp_path: Path) -> None:
    folder = lab.create_recipe_dir(tmp_path / "recipes")
    run = lab.train(folder=folder).run
    result = run.result.read_text()
    (folder / "few.txt").write_text(random_words(2, 700))
    with pytest.raises(DataError, match=r"was trained on other data .*; restore the files .*, or use --force"):
        lab.train({"steps": 14}, run=run, folder=folder)
    assert run.result.read_text() == result  # the run is as finished as before
    forced = lab.train({"steps": 14}, run=run, folder=folder, force=True)
    assert forced.code == ExitCode.DONE
    assert [
        event
        for event in forced.events_of_kind(RunWarning)
        if event.text.startswith("forced: the run continues with other")
    ]
