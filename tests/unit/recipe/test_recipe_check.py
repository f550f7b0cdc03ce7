"""Checks between keys and workers, changes between recipes, import paths, and the schema's own pages."""

import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import RecipeError
from phalanx.recipe import Recipe, check_recipe, import_object, load_recipe
from phalanx.recipe.checks import num_workers_for
from phalanx.recipe.devices import FP8_VARIABLE
from phalanx.recipe.diff import RecipeDifference, diff_recipes, incompatible_changes
from phalanx.recipe.schema_keys import json_schema
from phalanx.recipe.yaml_loader import parse_yaml


def recipe(*overrides: str) -> Recipe:
    return load_recipe(None, overrides).recipe


def test_a_layout_says_how_many_workers_a_run_has() -> None:
    assert num_workers_for(recipe("parallelism.shard=2", "parallelism.tensor=3"), default=8) == 6
    assert num_workers_for(recipe("parallelism=auto"), default=8) == 8


REFUSED = parse_yaml((Path(__file__).parent / "refused_recipes.yaml").read_text(), "refused_recipes.yaml")[0]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: " ".join(case["overrides"]) or "the example")
def test_a_recipe_that_cannot_run_is_refused_by_key(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FP8_VARIABLE, raising=False)
    with pytest.raises(RecipeError) as caught:
        check_recipe(recipe(*case["overrides"]), tmp_path, case["workers"])
    assert str(caught.value).replace(str(tmp_path), "DIR").splitlines() == case["error"]


@pytest.mark.parametrize(
    ("overrides", "workers"),
    [
        *(
            ([f"batch.micro_size={micro}"], workers)
            for micro, workers in [("auto", 4), (4, 4), (16, 1), (1, 16), (8, 2)]
        ),
        (["parallelism.replicate=2", "parallelism.shard=2"], 4),
        (["parallelism.tensor=2", "batch.micro_size=16"], 2),  # tensor ranks have the same samples
        (["parallelism.context=4", "batch.micro_size=16"], 4),
        (["parallelism.shard=2", "parallelism.context=2", "parallelism.expert=4"], 4),
        (["parallelism.shard=2", "optimizer.name=muon"], 2),
        (["parallelism.replicate=2", "parallelism.shard=2", "determinism=elastic"], 4),
        (["parallelism.tensor=3"], 3),  # hidden states stay whole where the sequence does not divide
        (["parallelism.shard=2", "optimizer.state_dtype=int8"], 2),
        (["parallelism.replicate=2", "compile=cuda-graphs"], 2),
        (["grad_sync.compression=powersgd", "determinism=off", "grad_sync.powersgd_rank=8"], 2),
        (["grad_sync.compression=int8", "determinism=off", "parallelism.replicate=2", "parallelism.shard=2"], 4),
        (["grad_sync.compression=bf16", "determinism=off", "parallelism.replicate=2", "parallelism.tensor=2"], 4),
        (["local_sgd.method=average", "determinism=off", "precision=fp16"], 2),
        (["local_sgd.method=diloco", "determinism=off", "parallelism.replicate=2", "local_sgd.sync_dtype=int8"], 2),
        (["device=cuda", "precision=fp8", "compile=cuda-graphs"], None),
        (["device=auto", "precision=fp8"], None),
        (["device=cpu", "precision=tf32"], None),
        (["parallelism={pipeline: 2, pipeline_schedule: zero-bubble, layers_per_stage: [1, 1, 1, 1]}"], None),
        (["parallelism={pipeline: 2, pipeline_schedule: interleaved}", "batch.micro_size=8"], None),
        (["grad_sync.compression=powersgd", "determinism=off", "grad_sync.powersgd_rank=8"], None),
        (["data.source={images: ., image_size: [8, 8]}"], None),
        (
            [
                "optimizer={name: muon, betas: [0.9, 0.99], momentum: 0.95}",
                "optimizer.schedule={decay: poly, power: 2, min_lr_ratio: 0}",
            ],
            None,
        ),
    ],
)
def test_what_some_machine_can_do_passes(overrides: list[str], workers: int | None, tmp_path: Path) -> None:
    found = recipe(*overrides)
    check_recipe(found, tmp_path, num_workers_for(found, 1) if workers is None else workers)


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
        match=r"parallelism.layers_per_stage: .* expected a list of whole numbers above 0 or null",
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
        ("ours_a", "", "found 'ours_a', expected module:name"),
        ("ours_b:", "", "found 'ours_b:', expected module:name"),
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


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e999"])
@pytest.mark.parametrize(
    "key", ["optimizer.lr", "optimizer.weight_decay", "fault_tolerance.hang_timeout_s", "data.source.weight"]
)
def test_numbers_are_finite(key: str, value: str) -> None:
    with pytest.raises(RecipeError, match=rf"{key}: found (-?Infinity|NaN), expected a number"):
        recipe(f"{key}={value}")


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("task", ["task=[chat]"]),
        ("task.kind", ["task={kind: [chat]}"]),
        ("model.args", ["task=reward", "model={build: 'hf:base', args: [1]}"]),
    ],
)
def test_a_task_is_not_expanded_where_a_list_stands(key: str, overrides: list[str]) -> None:
    with pytest.raises(RecipeError, match=rf"{key}: found"):
        recipe(*overrides)


@pytest.mark.parametrize("depth", [65, 3000])
def test_a_recipe_that_is_nested_too_deeply_is_refused(tmp_path: Path, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    (tmp_path / "deep.yaml").write_text(f"model: {{args: {{x: {nested}}}}}\n")
    for path, overrides in ((tmp_path / "deep.yaml", []), (None, [f"model.args.x={nested}"])):
        with pytest.raises(RecipeError, match="nested too deeply, expected at most 64 levels") as caught:
            load_recipe(path, overrides)
        assert len(str(caught.value)) < 300


def test_without_a_number_of_workers_nothing_is_said_about_it(tmp_path: Path) -> None:
    check_recipe(recipe("batch.global_size=7", "init_from=nowhere"), tmp_path, None)
    with pytest.raises(RecipeError, match=r"optimizer.state_dtype: int8 is for adamw"):
        check_recipe(recipe("batch.global_size=7", "optimizer.name=sgd", "optimizer.state_dtype=int8"), tmp_path, None)
