"""Options of the pages, and what a server that only reads leaves alone."""

import os
import time
from pathlib import Path

import pytest

from made_events import made
from phalanx.errors import PhalanxError
from phalanx.run import EventLog
from phalanx.run.event_types import AttemptStarted, WorkerFailure, WorkerStarted
from phalanx.serve.access import make_access
from phalanx_fleet.pages import make_pages
from serve_browser import Browser


@pytest.mark.parametrize("options", [{"nodes": Path("nowhere.yaml")}, {"fleet": Path("nowhere.yaml")}])
def test_a_wrong_file_is_refused_before_anything_is_served(options: dict[str, Path]) -> None:
    with pytest.raises(PhalanxError, match=r"nowhere\.yaml"):
        make_pages(**options)


def test_targets_need_a_fleet(tmp_path: Path) -> None:
    with pytest.raises(PhalanxError, match="--targets needs --fleet"):
        make_pages(targets=tmp_path / "targets.yaml")


@pytest.mark.parametrize("allow_actions", [False, True])
def test_evidence_makes_a_node_suspect_only_where_actions_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow_actions: bool
) -> None:
    monkeypatch.setenv("PHALANX_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "runs" / "a").mkdir(parents=True)
    log, now, node = EventLog(tmp_path / "runs/a/events.jsonl"), time.time(), os.uname().nodename
    log.write(made(AttemptStarted, time=now))
    log.write(made(WorkerStarted, host=node, time=now))
    log.write(made(WorkerFailure, rank=0, cause="exit_code", exit_code=77, message="no GPU", time=now))
    log.close()
    browser = Browser(tmp_path / "runs", make_access("127.0.0.1", allow_actions, None), [pages := make_pages()])
    pages.nodes.update()
    assert browser.server.index.is_complete
    assert [(each.name, each.state) for each in pages.nodes.view.nodes] == [
        (node, "suspect" if allow_actions else "healthy")
    ]
