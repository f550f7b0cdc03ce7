"""How a run is divided among the nodes that are there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.app.nodes import open_node_group
from phalanx.app.resume import ElasticWorld, restore_full_division
from phalanx.errors import RecipeError
from phalanx.jobs.agent.node_agent import LEADER_TIMEOUT_S
from phalanx.recipe import Recipe, ResolvedRecipe, load_resolved_recipe
from phalanx.recipe.load import dump_recipe
from phalanx.recipe.schema import Parallelism
from phalanx.run import Run
from phalanx.run.node_env import NodeEnv
from resolved_recipes import resolved_recipe


def world(
    tmp_path: Path,
    batch: dict[str, object],
    parallelism: dict[str, int],
    num_nodes: int,
    min_nodes: int,
    determinism: str = "fixed-world",
) -> tuple[ElasticWorld, Run]:
    run = Run(tmp_path)
    given = Recipe.model_validate({"batch": batch})
    micro_size = 8 if batch.get("micro_size", "auto") == "auto" else batch["micro_size"]
    full = resolved_recipe(
        num_nodes, batch={**batch, "micro_size": micro_size}, parallelism=parallelism, determinism=determinism
    )
    run.resolved.write_text(dump_recipe(Recipe.model_validate(full.model_dump())))
    return ElasticWorld(run, given, full, num_nodes, min_nodes), run


def written(run: Run) -> ResolvedRecipe:
    return load_resolved_recipe(run.resolved)


def test_numbers_of_nodes_that_do_not_divide_the_batch_are_left_out(tmp_path: Path) -> None:
    elastic, _ = world(tmp_path, {"global_size": 8}, {"replicate": 4}, 4, 1)
    assert [elastic.find_num_nodes(present) for present in (0, 1, 2, 3, 4)] == [0, 1, 2, 2, 4]


def test_a_batch_that_the_least_number_of_nodes_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="8 samples cannot be divided among 3 workers"):
        world(tmp_path, {"global_size": 8}, {"replicate": 4}, 4, 3)


def test_the_batch_stays_and_a_micro_batch_that_is_auto_becomes_smaller(tmp_path: Path) -> None:
    elastic, run = world(tmp_path, {"global_size": 24}, {"replicate": 3}, 3, 1)
    elastic.divide(2)
    batch = written(run).batch
    assert (batch.global_size, batch.micro_size, written(run).parallelism) == (24, 6, Parallelism(replicate=2))
    elastic.divide(3)
    assert (written(run).batch.micro_size, written(run).parallelism) == (8, Parallelism(replicate=3))


def shrink(run: Run, micro_size: int) -> None:
    """Write a smaller micro-batch, as where memory ran out."""
    smaller = written(run).model_dump()
    smaller["batch"]["micro_size"] = micro_size
    run.resolved.write_text(dump_recipe(Recipe.model_validate(smaller)))


def test_a_micro_batch_that_ran_out_of_memory_stays_smaller_on_other_numbers_of_nodes(tmp_path: Path) -> None:
    elastic, run = world(tmp_path, {"global_size": 24}, {"replicate": 3}, 3, 1)
    shrink(run, 2)
    elastic.divide(1)
    assert written(run).batch.micro_size == 2


def test_a_micro_batch_that_shrank_on_fewer_nodes_divides_the_batch_of_all_nodes_too(tmp_path: Path) -> None:
    elastic, run = world(tmp_path, {"global_size": 60}, {"replicate": 4}, 4, 2)
    elastic.divide(2)
    shrink(run, 10)
    elastic.divide(4)
    batch = written(run).batch
    assert (batch.global_size % (4 * batch.micro_size), batch.micro_size) == (0, 5)


def test_numbers_of_nodes_that_a_pinned_micro_batch_does_not_divide_after_a_shrink_are_left_out(tmp_path: Path) -> None:
    elastic, run = world(tmp_path, {"global_size": 24}, {"replicate": 2}, 2, 1, determinism="elastic")
    shrink(run, 3)
    assert elastic.divide(2)[0] == 2
    shrink(run, 8)
    assert [elastic.divide(present)[0] for present in (1, 2)] == [1, 1]


def test_the_division_among_all_nodes_outlasts_one_among_fewer(tmp_path: Path) -> None:
    elastic, run = world(tmp_path, {"global_size": 24}, {"replicate": 2, "shard": 2}, 4, 1)
    elastic.divide(3)
    assert written(run).parallelism == Parallelism(shard=3)
    assert restore_full_division(run, written(run)).parallelism == Parallelism(replicate=2, shard=2)


def test_a_change_of_shards_under_elastic_determinism_is_noted(tmp_path: Path) -> None:
    elastic, _ = world(
        tmp_path, {"global_size": 24, "micro_size": 2}, {"replicate": 2, "shard": 2}, 4, 1, determinism="elastic"
    )
    assert elastic.divide(2)[1] == []
    (note,) = elastic.divide(3)[1]
    assert note.startswith("the parallelism of a replica changed: the digest will differ by rounding")


def test_a_node_that_took_over_waits_for_nodes_that_notice_the_lost_leader_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", "0123456789abcdef" * 2)
    fork_server: Any = SimpleNamespace(control=None, events=None, heartbeat_table=None)
    node_env = NodeEnv(1, 3, ("127.0.0.1", 0), min_nodes=1, num_expected=2, took_over=True)
    with open_node_group(fork_server, node_env, last_call_s=1.0) as group:
        assert group.last_call_s > LEADER_TIMEOUT_S
