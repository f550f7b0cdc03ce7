"""Training on a source that is prepared meanwhile: the samples and the digest are those of the prepared source."""

import random
from pathlib import Path

import pytest

from phalanx.errors import ExitCode
from run_nodes import make_nodes
from train_harness import TrainHarness, Values, merge_recipes, plan_fault

STREAM: Values = {
    "data": {"source": {"text": "stream-*.txt"}, "prepare": "stream", "stream_window": 2},
    "evaluation": {"every": 6, "max_samples": 6},
    "determinism": "elastic",
}


@pytest.fixture(scope="module")
def streamed(lab: TrainHarness) -> TrainHarness:
    """Files of five pieces."""
    for number in range(5):
        letters = random.Random(number).choices("abcdefgh \n", k=4_500_000)
        (lab.folder / f"stream-{number}.txt").write_text("".join(letters))
    return lab


def test_a_killed_stream_ends_on_another_world_in_the_digest_of_the_finished_source(streamed: TrainHarness) -> None:
    killed = streamed.train(STREAM, 2, faults=[plan_fault(7)])
    assert streamed.train(STREAM, 1).digest == killed.digest


def test_a_source_that_cannot_be_read_ends_the_run_with_its_reason(streamed: TrainHarness) -> None:
    for number in range(3):
        line = '{"text": "' + "abcdefgh " * 400_000 + '"}\n'
        (streamed.folder / f"broken-{number}.jsonl").write_text(line + ("not JSON\n" if number == 1 else ""))
    data = {"source": {"text": None, "jsonl": "broken-*.jsonl"}, "prepare": "stream", "stream_window": 2}
    recipe = streamed.recipe_file({**STREAM, "data": data})
    ended = streamed.command("train", recipe, "--run", streamed.new_run().path)
    assert ended.returncode == ExitCode.DATA, ended.stderr
    assert "broken-1.jsonl" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_killed_curriculum_of_streams_ends_on_another_world_in_the_same_digest(streamed: TrainHarness) -> None:
    sources = [{"text": ["stream-0.txt", "stream-1.txt"]}, {"text": ["stream-2.txt", "stream-3.txt"], "weight": 0}]
    stages = [{"from_step": 4, "weights": [1, 1]}, {"from_step": 9, "weights": [0, 1]}]
    mixture = merge_recipes(STREAM, {"data": {"source": sources, "curriculum": stages}})
    killed = streamed.train(mixture, 2, faults=[plan_fault(7)])
    assert streamed.train(mixture, 1).digest == killed.digest


def test_nodes_with_own_caches_end_in_the_digest_of_one_machine(streamed: TrainHarness, tmp_path: Path) -> None:
    nodes = make_nodes(streamed, tmp_path)
    with nodes.stack:
        nodes.changes = STREAM
        caches = [tmp_path / "cache-0", tmp_path / "cache-1"]
        other = nodes.start(1, PHALANX_CACHE_DIR=str(caches[1]))
        ended = nodes.end(nodes.start(0, PHALANX_CACHE_DIR=str(caches[0])), other)
    assert ended.code == 0, ended.message
    assert all(list(cache.glob("data/*.stream/shard-*.bin")) for cache in caches)
    assert ended.digest == streamed.train(STREAM, 1).digest
