"""`exchange: auto` in whole runs whose exchanges are slow: under `exact: no` it goes on to fewer bytes, and a run that
was killed goes on with what was decided; where bits are promised it changes nothing."""

from pathlib import Path
from typing import Any

import pytest

from lab import FAULTS, Ended, Lab, fault
from phalanx.train.checkpoint import list_checkpoints, read_manifest
from phalanx.train.residuals import PREFIX

DECIDED, KILLED, STEPS = 30, 43, 46
"""Steps; a checkpoint is made every 4, and may not be there yet when the next is due."""


@pytest.fixture(scope="module")
def folder(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of recipes whose callbacks may be slow links."""
    folder = lab.furnish(tmp_path_factory.mktemp("slow") / "recipes")
    (folder / "slow_links.py").write_text(Path(__file__).parents[1].joinpath("slow_links.py").read_text())
    return folder


def changes_of(exact: str, slow: bool = True, steps: int = STEPS) -> dict[str, Any]:
    callbacks = [FAULTS, *(["slow_links:SlowLinks"] if slow else [])]
    few = {"evaluate": {"every": None}, "batch": {"micro": 6}}
    return {"steps": steps, "exchange": {"exact": exact}, "callbacks": callbacks, **few}


def decisions(ended: Ended) -> list[tuple[int, str, bool]]:
    return [(event["step"], event["strategy"], event["settled"]) for event in ended.kind("exchange")]


def test_a_killed_run_goes_on_with_what_was_decided_and_ends_with_the_same_bits(lab: Lab, folder: Path) -> None:
    decided = [(10, "bf16", False), (20, "int8", False), (DECIDED, "int8", True)]
    straight = lab.train(changes_of("no"), 2, folder=folder)
    killed = lab.train(changes_of("no"), 2, folder=folder, faults=[fault(KILLED, ranks=[1])])
    assert decisions(straight) == decisions(killed) == decided
    first, again = (event["from_step"] for event in killed.kind("start"))
    assert first == 0 < DECIDED < again < KILLED
    assert killed.digest == straight.digest
    manifest = read_manifest(list_checkpoints(killed.run.checkpoints)[0])
    assert (manifest.meta["step"], manifest.meta["exchange"]["strategy"]) == (STEPS, "int8")
    assert any(name.startswith(PREFIX) for name in manifest.tensors)


@pytest.mark.slow
def test_replicas_that_tensor_ranks_cut_choose_as_well(lab: Lab, folder: Path) -> None:
    layout = {"layout": {"replicate": 2, "tensor": 2}}
    ended = lab.train({**changes_of("no", steps=DECIDED + 2), **layout}, 4, folder=folder)
    assert decisions(ended) == [(10, "bf16", False), (20, "int8", False), (DECIDED, "int8", True)]


def test_a_run_goes_on_alone_with_what_two_workers_held_back(lab: Lab, folder: Path) -> None:
    run = lab.place()
    lab.lose(changes_of("no"), 2, run, [fault(KILLED, ranks=[1])], folder)
    ended = lab.train(changes_of("no"), 1, run, folder=folder)
    assert DECIDED < ended.kind("start")[-1]["from_step"] < KILLED
    manifest = read_manifest(list_checkpoints(run.checkpoints)[0])
    assert manifest.meta["step"] == STEPS
    assert not any(name.startswith(PREFIX) for name in manifest.tensors)


@pytest.mark.parametrize(("exact", "name"), [("world", "allreduce"), ("replicas", "fixed tree")])
def test_where_bits_are_promised_slow_exchanges_change_nothing(lab: Lab, folder: Path, exact: str, name: str) -> None:
    ended = lab.train(changes_of(exact, steps=12), 2, folder=folder)
    ((step, strategy, settled),) = decisions(ended)
    assert (step, strategy, settled) == (10, name, True)
    assert "exact: no would allow int8" in ended.kind("exchange")[0]["why"]
    assert ended.digest == lab.train(changes_of(exact, slow=False, steps=12), 2, folder=folder).digest
