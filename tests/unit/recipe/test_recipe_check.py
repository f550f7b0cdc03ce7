"""Checks between keys and workers, changes between recipes, import paths, and the schema's own pages."""

import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import RecipeError
from phalanx.recipe import (
    Recipe,
    RecipeDifference,
    check_recipe,
    diff_recipes,
    import_object,
    incompatible_changes,
    is_free_on_resume,
    json_schema,
    load_recipe,
    num_workers_for,
    render_recipe_reference,
)
from phalanx.recipe.device_checks import FP8_VARIABLE


def recipe(*overrides: str) -> Recipe:
    return load_recipe(None, overrides).recipe


@pytest.mark.parametrize(("micro", "workers"), [("auto", 4), (4, 4), (16, 1), (1, 16), (8, 2)])
def test_a_batch_that_divides_passes(micro: int | str, workers: int, tmp_path: Path) -> None:
    check_recipe(recipe(f"batch.micro_size={micro}"), tmp_path, workers)


def test_a_layout_says_how_many_workers_a_run_has() -> None:
    assert num_workers_for(recipe("parallelism.shard=2", "parallelism.tensor=3"), default=8) == 6
    assert num_workers_for(recipe("parallelism=auto"), default=8) == 8


@pytest.mark.parametrize(
    ("overrides", "workers", "expected"),
    [
        (
            ["batch.micro_size=5"],
            1,
            "batch.micro_size: 5 x 1 worker = 5 does not divide batch.global_size = 16; .* is 4$",
        ),
        (
            ["batch.micro_size=8"],
            4,
            "batch.micro_size: 8 x 4 workers = 32 does not divide batch.global_size = 16; .* is 4$",
        ),
        ([], 3, "batch.global_size: 16 samples cannot be divided among 3 workers; 15 or 18 can$"),
        ([], 32, "batch.global_size: 16 samples cannot be divided among 32 workers; 32 can$"),
        (
            ["parallelism.replicate=4"],
            2,
            r"parallelism: takes 4 workers \(replicate 4\), but the run has 2: use --nproc-per-node 4 or ",
        ),
        (
            ["parallelism.shard=2", "parallelism.async_tp=true"],
            2,
            "parallelism.async_tp: affects communication between tensor ranks only",
        ),
        (
            ["parallelism.expert=1"],
            2,
            r"parallelism: takes 1 workers \(one of each\), but the run has 2: use --nproc-per-node 1",
        ),
        (
            ["parallelism.shard=2", "parallelism.tensor=3", "data.seq_len=240"],
            4,
            r"parallelism: takes 6 workers \(shard 2 x tensor 3\), but the run has 4: use --nproc-per-node 6 or "
            r"parallelism=auto",
        ),
        (
            ["parallelism.shard=2", "parallelism.context=2", "parallelism.expert=3"],
            4,
            "parallelism.expert: found 3, which must divide shard x context = 4$",
        ),
        (
            ["parallelism.tensor=2", "determinism=elastic"],
            2,
            "parallelism: determinism: elastic goes with replicate and shard only: give these, or "
            "determinism: fixed-world",
        ),
        (
            ["parallelism.shard=2", "parallelism.expert=2", "determinism=elastic"],
            2,
            "parallelism: determinism: elastic goes with replicate and shard only",
        ),
        (
            ["parallelism.tensor=2", "optimizer.name=muon"],
            2,
            "parallelism.tensor: muon works on whole matrices, .*; use parallelism.shard",
        ),
        (["parallelism.tensor=2", "task=classification"], 2, "parallelism.tensor: is for models of sequences; "),
        (["parallelism.context=2", "task=classification"], 2, "parallelism.context: is for models of sequences; "),
        (
            ["parallelism.tensor=2", "optimizer.state_dtype=int8"],
            2,
            "parallelism.tensor: optimizer.state_dtype = int8 keeps blocks of whole rows, which would be cut; use "
            "bf16$",
        ),
        (
            ["parallelism.shard=2", "parallelism.expert=2", "optimizer.state_dtype=int8"],
            2,
            "parallelism.expert: optimizer.state_dtype = int8 keeps blocks of whole rows, which would be cut; use "
            "bf16$",
        ),
        (
            ["parallelism.shard=2", "compile=cuda-graphs"],
            2,
            "compile: cuda-graphs cannot hold the communication of a divided model: give "
            "parallelism.replicate only, or true$",
        ),
        (
            ["parallelism.pipeline=2", "parallelism.pipeline_schedule=zero-bubble", "compile=true"],
            2,
            "compile: blocks of a zero-bubble pipeline cannot be compiled; use false, or "
            "parallelism.pipeline_schedule=1f1b$",
        ),
        (
            [
                "parallelism.pipeline=2",
                "parallelism.pipeline_schedule=zero-bubble",
                "memory.activation_checkpointing=selective",
            ],
            2,
            "memory.activation_checkpointing: a zero-bubble pipeline's backward comes in two parts, of which "
            "selective repeats one; use full or none, or parallelism.pipeline_schedule=1f1b$",
        ),
        (
            ["grad_sync.compression=int8"],
            2,
            "grad_sync.compression: int8 rounds what it sends, which determinism: fixed-world forbids: use",
        ),
        (
            ["grad_sync.compression=bf16", "determinism=elastic"],
            2,
            "grad_sync.compression: found bf16, but determinism: elastic has an order of addition of its own: use "
            "none, or determinism: off",
        ),
        (
            ["grad_sync.compression=bf16", "determinism=off", "parallelism.shard=2"],
            2,
            "grad_sync.compression: bf16 is for replicas, and there are none: give parallelism.replicate, or use none",
        ),
        (
            ["grad_sync.compression=bf16", "determinism=off", "parallelism.replicate=2", "parallelism.context=2"],
            4,
            "grad_sync.compression: bf16 goes with replicate and shard, or replicate and tensor: give these, or use "
            "none",
        ),
        (
            ["grad_sync.compression=int8", "determinism=off", "precision=fp16"],
            2,
            "grad_sync.compression: int8 keeps what it could not send, but the loss scale of fp16 changes: use bf16",
        ),
        (
            ["grad_sync.compression=powersgd", "determinism=off", "parallelism.replicate=2", "parallelism.shard=2"],
            4,
            "grad_sync.compression: powersgd projects whole gradients: give parallelism.replicate only, or use int8",
        ),
        (
            ["grad_sync.compression=powersgd"],
            2,
            "grad_sync.compression: powersgd rounds what it sends, which determinism: fixed-world forbids: use",
        ),
        (
            ["local_sgd.method=average"],
            2,
            "local_sgd: workers take local steps, which determinism: fixed-world forbids: use local_sgd: null, "
            "or determinism: off",
        ),
        (
            ["local_sgd.method=diloco", "determinism=elastic"],
            2,
            "local_sgd: workers take local steps, which determinism: elastic forbids: use local_sgd: null",
        ),
        (
            ["local_sgd.method=diloco", "determinism=off", "parallelism.replicate=2", "parallelism.shard=2"],
            4,
            "local_sgd: is for workers that hold the whole model: give parallelism.replicate only, or",
        ),
        (
            ["local_sgd.method=average", "determinism=off", "local_sgd.outer_optimizer.lr=0.5"],
            2,
            "local_sgd.outer_optimizer: is for method: diloco, and average takes the plain mean: leave it out, or use "
            "diloco",
        ),
        (
            ["local_sgd.method=average", "determinism=off", "optimizer.state_dtype=int8"],
            2,
            "optimizer.state_dtype: int8 state has no mean over workers, which local_sgd may have to take: use bf16",
        ),
        (
            ["local_sgd.sync_every=50"],
            2,
            "local_sgd: workers take local steps, which determinism: fixed-world forbids",
        ),
        (
            ["grad_sync.compression=int8", "determinism=off", "local_sgd.sync_dtype=bf16"],
            2,
            "grad_sync.compression: int8 is for gradients, and local_sgd sends weights: use none, or local_sgd: null",
        ),
        (
            ["grad_sync.algorithm=ring", "determinism=off", "local_sgd.method=average"],
            2,
            "grad_sync.algorithm: ring is for gradients, and local_sgd sends weights: use all-reduce, or local_sgd: "
            "null",
        ),
        (
            ["grad_sync.algorithm=ring", "determinism=off", "grad_sync.compression=int8"],
            2,
            "grad_sync.compression: int8 goes with algorithm: auto or all-reduce, and the algorithm is ring: use one "
            "of these, or compression: none",
        ),
        (
            ["grad_sync.warmup_steps=7"],
            2,
            "grad_sync.warmup_steps: is for compression: powersgd, and the compression is none: leave it out",
        ),
        (
            ["grad_sync.algorithm=ring", "determinism=elastic"],
            2,
            "grad_sync.algorithm: found ring, but determinism: elastic has an order of addition of its own: use "
            "all-reduce, or determinism: fixed-world",
        ),
        (
            ["local_sgd.method=diloco", "determinism=off", "local_sgd.sync_every=3", "local_sgd.num_fragments=4"],
            2,
            "local_sgd.num_fragments: found 4, but at most one leaves after a step: at most sync_every = 3",
        ),
        (
            ["local_sgd.method=diloco", "determinism=off", "local_sgd.num_fragments=4", "local_sgd.sync_delay=6"],
            2,
            "local_sgd.sync_delay: found 6, but the next fragment leaves after 6: at most 5",
        ),
        (["parallelism.context=3"], 3, "parallelism.context: found 3, which must divide data.seq_len = 256$"),
        (["parallelism.shard=3"], 3, "batch.global_size: 16 samples cannot be divided among 3 workers; 15 or 18 can$"),
        (["task=clasification"], 1, "task: found 'clasification', .*; did you mean classification\\?"),
        (["init_from=nowhere"], 1, "init_from: there is no checkpoint or run at .*nowhere"),
    ],
)
def test_what_cannot_run_is_told_with_its_numbers(
    overrides: list[str], workers: int, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=f"(?m)^{expected}"):
        check_recipe(recipe(*overrides), tmp_path, workers)


@pytest.mark.parametrize(
    ("overrides", "workers"),
    [
        (["parallelism.shard=4"], 4),
        (["parallelism.replicate=2", "parallelism.shard=2"], 4),
        (["parallelism.tensor=2", "batch.micro_size=16"], 2),  # tensor ranks have the same samples
        (["parallelism.context=4", "batch.micro_size=16"], 4),
        (["parallelism.shard=2", "parallelism.context=2", "parallelism.expert=4"], 4),
        (["parallelism.shard=2", "optimizer.name=muon"], 2),
        (["parallelism.replicate=4", "determinism=elastic"], 4),
        (["parallelism.replicate=2", "parallelism.shard=2", "determinism=elastic"], 4),
        (["parallelism.shard=2", "task=classification"], 2),
        (["parallelism.tensor=3"], 3),  # hidden states stay whole where the sequence does not divide
        (["parallelism.shard=2", "optimizer.state_dtype=int8"], 2),
        (["parallelism.replicate=2", "compile=cuda-graphs"], 2),
        (["grad_sync.compression=int8", "determinism=off"], 2),
        (["grad_sync.compression=powersgd", "determinism=off", "grad_sync.powersgd_rank=8"], 2),
        (["grad_sync.compression=int8", "determinism=off", "parallelism.replicate=2", "parallelism.shard=2"], 4),
        (["grad_sync.compression=bf16", "determinism=off", "parallelism.replicate=2", "parallelism.tensor=2"], 4),
        (["local_sgd.method=average", "determinism=off", "precision=fp16"], 2),
        (["local_sgd.method=diloco", "determinism=off", "parallelism.replicate=2", "local_sgd.sync_dtype=int8"], 2),
        (["local_sgd.method=diloco", "determinism=off", "local_sgd.sync_every=500"], 1),
    ],
)
def test_layouts_that_fit_pass(overrides: list[str], workers: int, tmp_path: Path) -> None:
    check_recipe(recipe(*overrides), tmp_path, workers)


def test_each_problem_of_a_layout_has_a_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        check_recipe(
            recipe("parallelism.tensor=2", "parallelism.context=3", "parallelism.expert=2", "optimizer.name=muon"),
            tmp_path,
            2,
        )
    keys = [line.split(":")[0] for line in str(caught.value).splitlines()]
    assert keys == ["parallelism", "parallelism.expert", "parallelism.tensor", "parallelism.context"]


def test_a_list_of_numbers_is_told_as_one() -> None:
    with pytest.raises(
        RecipeError,
        match=r"parallelism.layers_per_stage: .* expected a list of whole numbers from 1 to 1,000,000 or null",
    ):
        recipe("parallelism.layers_per_stage=3")


def test_a_check_says_where_the_key_was_written(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("name: a\nbatch:\n  micro_size: 5\n")
    loaded = load_recipe(file)
    with pytest.raises(RecipeError, match=r"r\.yaml:3: batch.micro_size: 5 x 1"):
        check_recipe(loaded.recipe, loaded.recipe_dir, 1, loaded.location_of)


def test_an_init_that_is_an_export_is_refused_with_its_right_name(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"init_from: .*out is a Hugging Face directory, or an export; give hf:out$"):
        check_recipe(recipe("init_from=out"), tmp_path, 1)
    check_recipe(recipe("init_from=hf:out"), tmp_path, 1)


def test_init_is_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    check_recipe(recipe("init_from=there"), tmp_path)


def test_differences_name_the_deepest_keys() -> None:
    found = diff_recipes(
        recipe("model.args.a=1", "parallelism=auto"), recipe("model.args.b=2", "optimizer.lr=1", "parallelism.shard=1")
    )
    assert {difference.key for difference in found} == {"model.args.a", "model.args.b", "optimizer.lr", "parallelism"}
    assert RecipeDifference("optimizer.lr", 0.001, 1.0) in found
    assert str(RecipeDifference("optimizer.lr", 0.001, 1.0)) == "optimizer.lr: 0.001 -> 1.0"


def test_differences_go_into_lists_of_the_same_length() -> None:
    old = recipe("data.source=[{text: a}, {text: b}]")
    new = recipe("data.source=[{text: a}, {text: b, weight: 2}]")
    assert [difference.key for difference in diff_recipes(old, new)] == ["data.source.1.weight"]


@pytest.mark.parametrize(
    "key",
    [
        "name",
        "steps",
        "checkpoint.every",
        "fault_tolerance.max_restarts",
        "callbacks",
        "callbacks.0",
        "evaluation.every",
    ],
)
def test_what_does_not_touch_the_mathematics_is_free(key: str) -> None:
    assert is_free_on_resume(key)


@pytest.mark.parametrize(
    "key",
    [
        "seed",
        "optimizer.lr",
        "batch.global_size",
        "batch.micro_size",
        "evaluation.holdout_fraction",
        "precision",
        "num_threads",
        "names",
    ],
)
def test_what_touches_the_mathematics_is_not_free(key: str) -> None:
    assert not is_free_on_resume(key)


@pytest.mark.parametrize(
    ("old", "resolved", "new", "keys"),
    [
        ([], [], ["steps=900", "name=b", "checkpoint.keep=9", "evaluation.every=3"], []),
        ([], [], ["optimizer.lr=1", "seed=2", "steps=900"], ["optimizer.lr", "seed"]),
        ([], ["precision=bf16"], [], []),
        ([], ["precision=bf16"], ["precision=bf16"], []),
        ([], ["precision=bf16"], ["precision=fp32"], ["precision"]),
        (["precision=bf16"], ["precision=bf16"], ["precision=auto"], []),
        (["batch.micro_size=4"], ["batch.micro_size=4"], ["batch.micro_size=8"], ["batch.micro_size"]),
        ([], ["parallelism.replicate=2"], ["parallelism.replicate=3"], []),
        ([], ["parallelism.replicate=2"], ["parallelism.shard=2"], []),  # changes rounding only
        ([], [], ["evaluation.holdout_fraction=0.02"], ["evaluation.holdout_fraction"]),
        (["model.args.a=[3]"], ["model.args.a=[3]"], ["model.args.a=[auto]"], ["model.args.a.0"]),
        (["model.args.a=[auto]"], ["model.args.a=[auto]"], ["model.args.a=[3]"], ["model.args.a.0"]),
    ],
)
def test_a_run_goes_on_only_under_the_same_mathematics(
    old: list[str], resolved: list[str], new: list[str], keys: list[str]
) -> None:
    found = incompatible_changes(recipe(*old), recipe(*resolved), recipe(*new))
    assert sorted(difference.key for difference in found) == keys


def test_an_import_path_gives_the_object_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["unused"])
    (tmp_path / "ours_found.py").write_text("class Net:\n    def make(): return 3\n")
    assert import_object("ours_found:Net.make", tmp_path)() == 3


def test_no_module_beside_the_recipe_takes_the_place_of_a_librarys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", list(sys.path))
    for name in ("queue", "chunk", "mypyc"):  # Python's own, not imported yet; a library's, likewise
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text("mine = True\n")
    (tmp_path / "ours_helper.py").write_text("value = 5\n")
    source = "import queue\nimport mypyc\nfrom ours_helper import value\ndef net(): return queue, mypyc, value\n"
    (tmp_path / "ours_main.py").write_text(source)
    found_queue, found_library, value = import_object("ours_main:net", tmp_path)()
    assert hasattr(found_queue, "SimpleQueue")
    assert not hasattr(found_library, "mine")
    assert value == 5


def test_the_module_that_the_recipe_names_is_the_one_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mypyc", raising=False)
    (tmp_path / "mypyc").mkdir()
    (tmp_path / "mypyc" / "__init__.py").write_text("")
    (tmp_path / "mypyc" / "ours.py").write_text("def net(): return 4\n")
    assert import_object("mypyc.ours:net", tmp_path)() == 4
    for name in ("mypyc", "mypyc.ours"):
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("name", ["queue", "json", "pydantic"])
def test_a_module_called_like_another_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / f"{name}.py").write_text("class Net: pass\n")
    with pytest.raises(RecipeError, match=rf"r.yaml:3: .*{name}\.py: its name is that of .* rename the file$"):
        import_object(f"{name}:Net", tmp_path, "r.yaml:3")


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("ours_a", "", "found 'ours_a', expected an import path module:name"),
        ("ours_b:", "", "found 'ours_b:', expected an import path module:name"),
        ("nothing_here:x", "", "'nothing_here:x': there is no module 'nothing_here'; looked in "),
        ("ours_c:Nett", "class Net: pass\n", "'ours_c:Nett': ours_c has no 'Nett'; did you mean Net?"),
        (
            "ours_d:x",
            "\nx = y\n",
            "importing 'ours_d' failed: NameError: name 'y' is not defined ({folder}/ours_d.py:2)",
        ),
        ("ours_e:x", "x = (\n", "importing 'ours_e' failed: SyntaxError: '(' was never closed ({folder}/ours_e.py:1)"),
        (
            "ours_f:x",
            "import gone\n",
            "importing 'ours_f' failed: ModuleNotFoundError: No module named 'gone' ({folder}",
        ),
        ("ours_h:x", "x = {}\n", "'ours_h:x' is dict, expected a function or a class"),
        ("ours_i:__builtins__", "", "'ours_i:__builtins__' is dict, expected a function or a class"),
        ("ours_g:x", "raise SystemExit(3)\n", "importing 'ours_g' failed: SystemExit: 3 ({folder}/ours_g.py:1)"),
    ],
)
def test_an_import_path_that_fails_is_told_in_one_line(
    path: str, source: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    (tmp_path / f"{path.split(':')[0].replace('nothing_here', 'other')}.py").write_text(source)
    with pytest.raises(RecipeError) as caught:
        import_object(path, tmp_path, "r.yaml:3: model.build")
    assert str(caught.value).startswith("r.yaml:3: model.build: " + expected.format(folder=tmp_path))
    assert len(str(caught.value).splitlines()) == 1


def _descriptions(schema: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Each part, key, and whether something says what it means."""
    parts = {"Recipe": schema, **schema["$defs"]}
    return [
        (part, key, "description" in below or "$ref" in below)
        for part, form in parts.items()
        for key, below in form["properties"].items()
    ]


def test_every_key_has_a_meaning_in_the_schema() -> None:
    schema = json_schema()
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["additionalProperties"] is False
    assert [(part, key) for part, key, told in _descriptions(schema) if not told] == []


def test_the_examples_of_the_schema_are_recipes() -> None:
    for example in json_schema()["examples"]:
        Recipe.model_validate(example)


def test_the_reference_page_is_up_to_date() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "recipe.md"
    assert page.read_text() == render_recipe_reference(), "run `make docs`"


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e999"])
@pytest.mark.parametrize(
    "key", ["optimizer.lr", "optimizer.weight_decay", "fault_tolerance.hang_timeout_s", "data.source.weight"]
)
def test_numbers_are_finite(key: str, value: str) -> None:
    with pytest.raises(RecipeError, match=rf"{key}: found (-?Infinity|NaN), expected a number"):
        recipe(f"{key}={value}")


@pytest.mark.parametrize("depth", [65, 3000])
def test_a_recipe_that_is_nested_too_deeply_is_refused(tmp_path: Path, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    (tmp_path / "deep.yaml").write_text(f"model: {{args: {{x: {nested}}}}}\n")
    for path, overrides in ((tmp_path / "deep.yaml", []), (None, [f"model.args.x={nested}"])):
        with pytest.raises(RecipeError, match="nested too deeply, expected at most 64 levels") as caught:
            load_recipe(path, overrides)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["device=cpu", "precision=fp8"],
            "precision: fp8 needs tensor cores .*, and a CPU has none; bf16, fp16",
        ),
        (["device=xpu", "precision=fp8"], "precision: fp8 needs tensor cores .*, and an Intel GPU has none"),
        (
            ["device=mps", "compile=cuda-graphs"],
            "compile: cuda-graphs need a GPU that has them, and an Apple GPU has none",
        ),
        (
            ["device=cpu", "compile=cuda-graphs"],
            "compile: cuda-graphs need a GPU that has them, and a CPU is no GPU; true or false",
        ),
        (
            ["device=xpu", "determinism=fixed-world"],
            "determinism: found fixed-world, but torch does not say which kernels",
        ),
        (
            ["device=mps", "parallelism.replicate=2"],
            "device: found mps, on which torch has no way to exchange gradients",
        ),
        (
            ["optimizer.name=sgd", "optimizer.state_dtype=int8"],
            "optimizer.state_dtype: int8 is for adamw; sgd keeps its state in fp32",
        ),
        (
            ["optimizer.name=muon", "optimizer.offload=true"],
            "optimizer.offload: true goes with adamw and sgd; a step",
        ),
        (
            ["task=classification", "memory.chunked_loss=true"],
            "memory.chunked_loss: true is for language models, and the task",
        ),
        (
            ["data.source={images: .}"],
            r"data.source: images need a common size, for instance `image_size: \[224, 224\]`",
        ),
        (["evaluation.source={images: .}"], "evaluation.source: images need a common size"),
        (["data.source=[{text: a},{images: .}]"], r"data.source.1: images need a common size"),
        (
            ["parallelism.pipeline=2", "parallelism.layers_per_stage=[1,1,1]"],
            "parallelism.layers_per_stage: 1f1b on 2 ranks takes one stage a rank",
        ),
        (
            ["parallelism={pipeline: 2, pipeline_schedule: interleaved, layers_per_stage: [1, 1]}"],
            "parallelism.layers_per_stage: interleaved on 2 ranks",
        ),
        (
            ["parallelism.layers_per_stage=[1,1]"],
            "parallelism.layers_per_stage: is for pipelines: give parallelism.pipeline, or leave it out",
        ),
        (
            ["parallelism.pipeline_schedule=gpipe"],
            "parallelism.pipeline_schedule: gpipe is for pipelines: give parallelism.pipeline, or leave it out",
        ),
        (
            ["parallelism.pipeline=4", "batch.micro_size=8"],
            "batch.micro_size: 1f1b with 4 stages on 4 ranks cannot run 2",
        ),
        (
            ["parallelism.pipeline=8", "batch.global_size=4"],
            "batch.global_size: 1f1b with 8 stages on 8 ranks has no micro-batch",
        ),
        (
            ["grad_sync.algorithm=ring", "grad_sync.powersgd_rank=8"],
            "grad_sync.powersgd_rank: is for compression: powersgd",
        ),
        (
            ["grad_sync.powersgd_rank=8"],
            "grad_sync.powersgd_rank: is for compression: powersgd, and the compression is none",
        ),
        (
            ["optimizer.name=sgd", "optimizer.betas=[0.9, 0.99]"],
            "optimizer.betas: is for adamw, lamb, muon, and the optimizer is sgd",
        ),
        (["optimizer.momentum=0.5"], "optimizer.momentum: is for sgd, muon, lars, and the optimizer is adamw"),
        (["optimizer.schedule.power=2"], "optimizer.schedule.power: is for decay: poly, and it is cosine"),
        (["optimizer.schedule.gamma=0.5"], "optimizer.schedule.gamma: is for decay: step, and it is cosine"),
        (
            ["data.source={text: x, image_size: [8, 8]}"],
            "data.source.image_size: is for images, and the source is text",
        ),
        (
            ["data.source={prepared: x, exclude: y}"],
            "data.source.exclude: is for text, jsonl, parquet, and the source is",
        ),
        (
            ["data.source=[{text: x}, {text: x, text_field: t}]"],
            "data.source.1.text_field: is for jsonl, parquet, and the source is",
        ),
        (
            ["data={source: {images: ., image_size: [8, 8]}, seq_len: 64}"],
            "data.seq_len: is for text, and the source has",
        ),
        (
            ["evaluation={holdout_fraction: 0.2, source: {text: x}}"],
            "evaluation.holdout_fraction: is a share of the training data, and",
        ),
        (
            ["optimizer.schedule={decay: constant, min_lr_ratio: 0}"],
            "optimizer.schedule.min_lr_ratio: is for decay: cosine, linear, poly, and it is constant",
        ),
        (
            ["batch.scale_with_workers=true", "batch.global_size=90000000", "parallelism.replicate=2"],
            "batch.global_size: 180,000,000 samples of 2 workers, expected at most 100,000,000 in all",
        ),
    ],
)
def test_what_depends_on_the_recipe_alone_is_refused_by_its_check(
    overrides: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FP8_VARIABLE, raising=False)
    found = recipe(*overrides)
    with pytest.raises(RecipeError, match=expected) as caught:
        check_recipe(found, tmp_path, num_workers_for(found, 1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["device=cuda", "precision=fp8", "compile=cuda-graphs"],
        ["device=auto", "precision=fp8"],
        ["device=cpu", "precision=tf32"],
        ["device=mps"],
        ["parallelism={pipeline: 2, pipeline_schedule: zero-bubble, layers_per_stage: [1, 1, 1, 1]}"],
        ["parallelism={pipeline: 2, pipeline_schedule: interleaved}", "batch.micro_size=8"],
        ["grad_sync.compression=powersgd", "determinism=off", "grad_sync.powersgd_rank=8"],
        ["data.source={images: ., image_size: [8, 8]}"],
        [
            "optimizer={name: muon, betas: [0.9, 0.99], momentum: 0.95}",
            "optimizer.schedule={decay: poly, power: 2, min_lr_ratio: 0}",
        ],
    ],
)
def test_what_some_machine_can_do_passes_its_check(overrides: list[str], tmp_path: Path) -> None:
    found = recipe(*overrides)
    check_recipe(found, tmp_path, num_workers_for(found, 1))


def test_without_a_number_of_workers_nothing_is_said_about_it(tmp_path: Path) -> None:
    check_recipe(recipe("batch.global_size=7", "init_from=nowhere"), tmp_path, None)
    with pytest.raises(RecipeError, match=r"optimizer.state_dtype: int8 is for adamw"):
        check_recipe(recipe("batch.global_size=7", "optimizer.name=sgd", "optimizer.state_dtype=int8"), tmp_path, None)
