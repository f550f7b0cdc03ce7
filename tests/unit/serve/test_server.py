"""What is refused before anything is served, and what a server that only reads leaves alone."""

import os
import time
from pathlib import Path

import pytest

from made_events import made
from phalanx.errors import PhalanxError
from phalanx.run import EventLog
from phalanx.run.event_types import AttemptStarted, WorkerFailure, WorkerStarted
from phalanx.serve.run_index import RunIndex
from phalanx.serve.server import ServeOptions, open_fleet, serve


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"nodes_file": Path("nowhere.yaml")}, "nowhere.yaml"),
        ({"cluster": "nosuch"}, "nosuch"),
        ({"backend": "slrum"}, "--on slrum: expected one of"),
        ({"host": "203.0.113.9"}, "203.0.113.9"),
        ({"token": "short"}, "expected 16 or more"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_served(
    tmp_path: Path, options: dict[str, object], problem: str
) -> None:
    def report(address: str) -> None:
        raise AssertionError("it serves")

    with pytest.raises(PhalanxError, match=problem):
        serve(ServeOptions([tmp_path], port=0, **options), report)  # type: ignore[arg-type]


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
    index = RunIndex([tmp_path / "runs"])
    index.update()
    nodes, _, _ = open_fleet(ServeOptions([tmp_path / "runs"], allow_actions=allow_actions), index)()
    assert [(each.name, each.state) for each in nodes] == [(node, "suspect" if allow_actions else "healthy")]
