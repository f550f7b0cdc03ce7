"""A recipe planned on a cluster, from Python: what is chosen, what is left as it was, and what cannot be."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.autoconfig.plan import (
    RunPlan,
    describe_slowdown,
    list_chosen_keys,
    load_sized_cluster,
    plan_run,
    render_recipe,
)
from phalanx.errors import RecipeError, UsageError
from phalanx.formatting import BYTES_PER_GIB
from phalanx.planner.memory import USABLE_MEMORY_FRACTION
from phalanx.planner.step_time import StepBreakdown
from phalanx.recipe import load_recipe
from phalanx.recipe.load import LoadedRecipe
from phalanx.recipe.schema import Parallelism

TEXT = """\
name: small
model: {build: "phalanx.models:transformer", args: {layers: 4, hidden_size: 256, num_heads: 4}}
data: {source: {text: "*.txt"}, tokenizer: bytes, seq_len: 256}
batch: {global_size: 1024}
steps: 100
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text, and a cache of our own."""
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("To be, or not to be, that is the question.\n" * 2000)
    (tmp_path / "recipe.yaml").write_text(TEXT)
    return tmp_path


def loaded(folder: Path, *overrides: str) -> LoadedRecipe:
    return load_recipe(folder / "recipe.yaml", list(overrides))


def planned(folder: Path, *overrides: str, cluster: str = "h100:64", gpus: int | None = None) -> RunPlan:
    return plan_run(loaded(folder, *overrides), cluster, gpus)


def test_the_best_uses_all_devices_fits_and_is_no_slower_than_the_others(folder: Path) -> None:
    found = planned(folder)
    assert found.num_devices == found.best.scenario.parallelism.world == 64
    assert found.best.peak_bytes <= USABLE_MEMORY_FRACTION * 80 * BYTES_PER_GIB
    assert found.best.step_s <= 1.005 * min(option.step_s for option in found.alternatives)
    assert found.low_s < found.best.step_s < found.high_s
    assert 0 < found.mfu < 1


def test_everything_that_the_recipe_leaves_open_is_chosen(folder: Path) -> None:
    keys = {"parallelism", "batch.micro_size", "memory.activation_checkpointing", "precision"}
    assert set(list_chosen_keys(planned(folder))) == keys


def test_what_the_recipe_gives_is_kept(folder: Path) -> None:
    layout = ("parallelism.replicate=32", "parallelism.tensor=2", "batch.micro_size=2")
    found = planned(folder, *layout, "memory.activation_checkpointing=full", "precision=bf16", "grad_sync.bucket_mib=5")
    setup = found.best.scenario
    assert (setup.parallelism.replicate, setup.parallelism.tensor, setup.parallelism.shard) == (32, 2, 1)
    assert (setup.micro_size, setup.checkpointing, setup.precision) == (2, "full", "bf16")
    assert list_chosen_keys(found) == {}


def test_an_interleaved_pipeline_is_written_in_the_recipes_keys(folder: Path) -> None:
    given = loaded(folder)
    found = plan_run(given, "h100:64")
    layout = Parallelism(replicate=32, pipeline=2, pipeline_schedule="interleaved")
    chosen = replace(found.best.scenario, parallelism=layout, virtual_stages=2, micro_size=1)
    found = replace(found, best=replace(found.best, scenario=chosen))
    (folder / "planned.yaml").write_text(render_recipe(given, [], found))
    again = load_recipe(folder / "planned.yaml", []).recipe.parallelism
    assert again == layout.model_copy(update={"layers_per_stage": [1, 1, 1, 1]})


def test_stages_that_the_recipe_gives_are_kept(folder: Path) -> None:
    found = planned(folder, "parallelism.replicate=32", "parallelism.pipeline=2", "parallelism.layers_per_stage=[1,3]")
    assert found.best.scenario.parallelism.layers_per_stage == [1, 3]


def test_whole_replicas_are_kept_where_exactness_asks_for_them(folder: Path) -> None:
    assert planned(folder, "determinism=elastic").best.scenario.parallelism.replicate == 64


def test_workers_that_train_apart_are_whole_replicas(folder: Path) -> None:
    found = planned(folder, "determinism=off", "local_sgd.method=average", "local_sgd.sync_every=10")
    assert found.best.scenario.parallelism.replicate == 64
    assert found.best.scenario.transport.wire_ratio == 1 / 10


def test_the_planned_text_is_a_recipe_with_the_choice(folder: Path) -> None:
    given = loaded(folder, "steps=7")
    found = plan_run(given, "h100:64")
    (folder / "planned.yaml").write_text(render_recipe(given, ["steps=7"], found))
    again = load_recipe(folder / "planned.yaml", []).recipe
    assert again.parallelism != "auto"
    assert again.parallelism.world == 64  # type: ignore[union-attr]
    assert (again.steps, again.batch.micro_size) == (7, found.best.scenario.micro_size)


def test_a_second_plan_remembers_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned(folder)

    def follow(*_: Any) -> Any:
        raise AssertionError("followed twice")

    monkeypatch.setattr("phalanx.autoconfig.model_profile._trace_model", follow)
    assert planned(folder).best == first.best


def test_a_named_cluster_has_as_many_nodes_as_devices_need() -> None:
    assert load_sized_cluster("dgx-h100", 100).devices == 104
    assert load_sized_cluster("h100:64", None).devices == 64
    assert load_sized_cluster("h100:64", 16).devices == 64  # of which 16 are used


@pytest.mark.parametrize("gpus", [0, -3])
def test_fewer_than_one_device_is_refused(gpus: int) -> None:
    with pytest.raises(UsageError, match=f"--num-gpus {gpus}: expected a number of devices"):
        load_sized_cluster("h100", gpus)


def test_more_devices_than_a_counted_cluster_has_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--num-gpus 128: .* has 64 devices"):
        load_sized_cluster("h100:64", 128)


def test_a_batch_that_cannot_be_divided_says_what_can(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"batch.global_size: 7 samples .* a multiple of 64"):
        planned(folder, "batch.global_size=7", "determinism=elastic")


def test_a_layout_of_another_size_is_refused(folder: Path) -> None:
    with pytest.raises(RecipeError, match="parallelism: takes 8"):
        planned(folder, "parallelism.replicate=8")


def test_a_model_that_fits_nowhere_says_by_how_much(folder: Path) -> None:
    huge = ("model.args.layers=200", "model.args.hidden_size=16384", "model.args.num_heads=128", "batch.global_size=8")
    with pytest.raises(RecipeError, match=r"nothing fits: of [\d,]+ layouts for 8 x .* [\d.]+ GiB"):
        planned(folder, *huge, cluster="h100:8")


EIGHT_BILLION = (
    "model.args.layers=40",
    "model.args.hidden_size=4096",
    "model.args.num_heads=32",
    "batch.global_size=16",
)


def test_a_model_of_eight_billion_parameters_is_tuned_with_adapters_on_one_device(folder: Path) -> None:
    tuned = planned(folder, *EIGHT_BILLION, "adapter={rank: 8}", cluster="h100:1")
    assert tuned.best.peak_bytes == tuned.footprint.total <= 76 * BYTES_PER_GIB
    with pytest.raises(RecipeError, match=r"which is [1-9][\d.]* GiB above .* It needs .* too many"):
        planned(folder, *EIGHT_BILLION, cluster="h100:1")


def test_sgd_without_momentum_has_no_state(folder: Path) -> None:
    with_it, without = (planned(folder, "optimizer.name=sgd", f"optimizer.momentum={each}") for each in (0.9, 0))
    assert with_it.footprint.optimizer_state > 0
    assert without.footprint.optimizer_state == 0


def test_a_precision_that_the_device_lacks_is_refused(folder: Path) -> None:
    with pytest.raises(RecipeError, match="precision: fp8 is not among"):
        planned(folder, "precision=fp8", cluster="a100:64")


def test_a_model_that_cannot_be_followed_is_named(folder: Path) -> None:
    (folder / "odd.py").write_text(
        "from torch import nn\n\n\nclass Odd(nn.Module):\n"
        "    def __init__(self, vocab_size):\n        super().__init__()\n        self.map = nn.Embedding(vocab_size, "
        "vocab_size)\n\n"
        "    def forward(self, x):\n        return self.map(x) * self.map.weight.sum().item()\n"
    )
    with pytest.raises(RecipeError, match="odd:Odd cannot be traced on the meta device"):
        planned(folder, "model={build: 'odd:Odd'}")


def test_a_model_that_has_not_what_the_loss_of_plan_needs_is_refused_with_its_own_task(folder: Path) -> None:
    (folder / "own.py").write_text(
        "from torch import nn\n\n\nclass Own(nn.Module):\n"
        "    def __init__(self, vocab_size):\n        super().__init__()\n        self.map = nn.Embedding(vocab_size, "
        "vocab_size)\n\n"
        "    def forward(self, x):\n        return {'embedding': self.map(x)}\n\n\nclass Task:\n"
        "    def inputs(self, batch):\n        pass\n\n    def loss(self, output, batch):\n        pass\n"
    )
    with pytest.raises(RecipeError, match=r"KeyError: 'logits'.* does not follow own:Task: `phalanx train --dry-run`"):
        planned(folder, "model={build: 'own:Own'}", "task=own:Task")


def test_more_replicas_are_less_efficient_and_never_slower(folder: Path) -> None:
    curve = planned(folder, "parallelism.replicate=64").scaling
    assert [world for world, _ in curve] == [1, 2, 4, 8, 16, 32, 64]
    speeds = [speed for _, speed in curve]
    assert speeds == sorted(speeds)
    assert speeds[-1] <= 64 * speeds[0]


def test_what_another_choice_spends_more_on_is_told() -> None:
    best = StepBreakdown(gemm=1.0)
    assert describe_slowdown(best, StepBreakdown(gemm=1.1, pipeline_bubble=0.25)) == "pipeline bubble: +25%"
    assert describe_slowdown(best, best) == "as fast"


ROOM = """\
name: room
nodes: 8
node: dgx-h100
storage: {read_gbps: 40, write_gbps: 40}
reliability: {failures_per_1000_node_days: 6.5}
"""


def room(folder: Path) -> str:
    path = folder / "room.yaml"
    path.write_text(ROOM)
    return str(path)


def test_a_share_of_the_checkpoints_is_in_the_step(folder: Path) -> None:
    found = planned(folder, cluster=room(folder))
    assert found.best.breakdown.checkpoint_stall > 0


def test_a_batch_for_each_worker_is_that_of_all_devices(folder: Path) -> None:
    found = planned(folder, "batch.global_size=4", "batch.scale_with_workers=true", gpus=64)
    assert found.recipe.batch.global_size == found.best.scenario.global_batch == 256


EIGHT_BILLION_WIDE = (
    "layers: 6, hidden_size: 4096, num_heads: 32, num_kv_heads: 8, ffn_hidden_size: 14336, activation: swiglu, "
    "tie_embeddings: false, vocab_size: 128256"
)


@pytest.mark.parametrize(
    ("args", "sequence", "micro", "cluster", "seconds", "memory"),
    [
        (
            "layers: 12, hidden_size: 768, num_heads: 12, ffn_hidden_size: 3072, activation: relu2, vocab_size: 50304",
            1024,
            32,
            "h200:1",
            0.241,
            20.0,
        ),
        (
            "layers: 24, hidden_size: 2048, num_heads: 16, ffn_hidden_size: 8192, activation: relu2, vocab_size: 50304",
            2048,
            8,
            "h100:1",
            1.046,
            56.2,
        ),
        (EIGHT_BILLION_WIDE, 4096, 2, "h100:1", 0.707, 53.2),
    ],
    ids=["gpt2", "1.3b", "8b"],
)
def test_steps_and_memory_that_were_measured_on_one_gpu_are_predicted_within_15_percent(
    folder: Path, args: str, sequence: int, micro: int, cluster: str, seconds: float, memory: float
) -> None:
    """docs/benchmarks/gpu.md: medians of steps of four micro-batches in bf16, compiled, and the most GB allocated."""
    batch = [f"batch.global_size={4 * micro}", f"batch.micro_size={micro}", f"data.seq_len={sequence}"]
    kinds = [
        "memory={activation_checkpointing: none, chunked_loss: false}",
        "precision=bf16",
        "determinism=off",
        "compile=true",
    ]
    found = planned(folder, f"model.args={{{args}}}", *batch, *kinds, cluster=cluster)
    assert found.best.step_s == pytest.approx(seconds, rel=0.15)
    allocated = found.footprint.total - found.footprint.fragmentation - found.footprint.context
    assert allocated == pytest.approx(memory * 1e9, rel=0.15)
