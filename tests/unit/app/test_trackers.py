"""What is checked before a run is sent to trackers."""

from pathlib import Path

import pytest

from fake_tracker import GrowingRun
from phalanx.app import trackers
from phalanx.app.trackers import check_trackers, send_run
from phalanx.errors import DataError, UsageError
from phalanx.observe.trackers import tracker
from phalanx.recipe import Recipe
from phalanx.recipe.load import LoadedRecipe


def loaded(names_: list[str]) -> LoadedRecipe:
    return LoadedRecipe(Recipe.model_validate({"trackers": names_}), None, Path(), {})


def test_a_missing_package_is_refused_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs the `wandb` package: pip install 'phalanx\[wandb\]'"):
        check_trackers(loaded(["wandb"]))


def test_mlflow_without_a_server_and_a_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(tracker, "find_spec", lambda name: None if name == "sqlalchemy" else object())
    with pytest.raises(UsageError, match="MLFLOW_TRACKING_URI is not set"):
        check_trackers(loaded(["mlflow"]))


def test_an_unknown_tracker_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--to mlflw: expected one of .*; did you mean mlflow"):
        send_run(GrowingRun(tmp_path / "run").run, "mlflw")


def test_nothing_is_written_through_a_link_in_a_run_directory(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "run").run
    (tmp_path / "elsewhere").mkdir()
    run.trackers.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="found a link"):
        send_run(run, "tensorboard")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_process_that_died_is_named_at_the_end_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = GrowingRun(tmp_path / "run").run
    monkeypatch.setattr(trackers.sys, "executable", "/bin/false")
    with trackers.feed_trackers(run, ["tensorboard"]):
        pass
    assert f"tensorboard: its process ended with 1, see {run.logs / 'tracker-tensorboard.log'}; send" in caplog.text


def test_a_tracker_that_cannot_be_started_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = GrowingRun(tmp_path / "run").run
    monkeypatch.setattr(trackers.sys, "executable", "/no/python")
    with trackers.feed_trackers(run, ["tensorboard"]):
        pass
    assert "tensorboard: cannot be started, training continues without it" in caplog.text
