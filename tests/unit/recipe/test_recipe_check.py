"""Checks between keys and workers, changes between recipes, import paths, and the schema's own pages."""

import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import RecipeError
from phalanx.recipe import (
    Difference,
    Recipe,
    check,
    differences,
    import_object,
    is_free,
    json_schema,
    load_recipe,
    markdown,
    refused,
    workers_for,
)
from phalanx.recipe.checks import FP8


def recipe(*overrides: str) -> Recipe:
    return load_recipe(None, overrides).recipe


@pytest.mark.parametrize(("micro", "workers"), [("auto", 4), (4, 4), (16, 1), (1, 16), (8, 2)])
def test_a_batch_that_divides_passes(micro: int | str, workers: int, tmp_path: Path) -> None:
    check(recipe(f"batch.micro={micro}"), tmp_path, workers)


def test_a_layout_says_how_many_workers_a_run_has() -> None:
    assert workers_for(recipe("layout.shard=2", "layout.tensor=3"), otherwise=8) == 6
    assert workers_for(recipe("layout=auto"), otherwise=8) == 8


@pytest.mark.parametrize(
    ("overrides", "workers", "expected"),
    [
        (["batch.micro=5"], 1, "batch.micro: 5 x 1 worker = 5 does not divide batch.global = 16; .* is 4$"),
        (["batch.micro=8"], 4, "batch.micro: 8 x 4 workers = 32 does not divide batch.global = 16; .* is 4$"),
        ([], 3, "batch.global: 16 samples cannot be divided among 3 workers; 15 or 18 can$"),
        ([], 32, "batch.global: 16 samples cannot be divided among 32 workers; 32 can$"),
        (
            ["layout.replicate=4"],
            2,
            r"layout: takes 4 workers \(replicate 4\), but the run has 2: use --nproc 4 or layout=auto",
        ),
        (["layout.shard=2", "layout.overlap=true"], 2, "layout.overlap: is about what tensor ranks send each other"),
        (["layout.expert=1"], 2, r"layout: takes 1 workers \(one of each\), but the run has 2: use --nproc 1"),
        (
            ["layout.shard=2", "layout.tensor=3", "data.sequence=240"],
            4,
            r"layout: takes 6 workers \(shard 2 x tensor 3\), but the run has 4: use --nproc 6 or layout=auto",
        ),
        (
            ["layout.shard=2", "layout.context=2", "layout.expert=3"],
            4,
            "layout.expert: found 3, which must divide shard x context = 4$",
        ),
        (
            ["layout.tensor=2", "exchange.exact=replicas"],
            2,
            "layout: exchange.exact = replicas goes with replicate and shard only: give these, or exact: world",
        ),
        (
            ["layout.shard=2", "layout.expert=2", "exchange.exact=replicas"],
            2,
            "layout: exchange.exact = replicas goes with replicate and shard only",
        ),
        (
            ["layout.tensor=2", "optim.name=muon"],
            2,
            "layout.tensor: muon works on whole matrices, .*; use layout.shard",
        ),
        (["layout.tensor=2", "task=classification"], 2, "layout.tensor: is for models of sequences; "),
        (["layout.context=2", "task=classification"], 2, "layout.context: is for models of sequences; "),
        (
            ["layout.tensor=2", "optim.state=8bit"],
            2,
            "layout.tensor: optim.state = 8bit keeps blocks of whole rows, which would be cut; use bf16$",
        ),
        (
            ["layout.shard=2", "layout.expert=2", "optim.state=8bit"],
            2,
            "layout.expert: optim.state = 8bit keeps blocks of whole rows, which would be cut; use bf16$",
        ),
        (
            ["layout.shard=2", "compile=graphs"],
            2,
            "compile: graphs cannot hold the communication of a divided model: give layout.replicate only, or true$",
        ),
        (
            ["layout.pipeline=2", "layout.schedule=zero-bubble", "compile=true"],
            2,
            "compile: blocks of a zero-bubble pipeline cannot be compiled; use false, or layout.schedule=1f1b$",
        ),
        (
            ["layout.pipeline=2", "layout.schedule=zero-bubble", "memory.recompute=selective"],
            2,
            "memory.recompute: a zero-bubble pipeline's backward comes in two parts, of which selective repeats one; "
            "use full or none, or layout.schedule=1f1b$",
        ),
        (
            ["exchange.strategy=int8"],
            2,
            "exchange.strategy: int8 rounds what it sends, which exact: world forbids: use",
        ),
        (
            ["exchange.strategy=bf16", "exchange.exact=replicas"],
            2,
            "exchange.strategy: found bf16, but exact: replicas has a way of its own to add up: use auto, or exact: ",
        ),
        (
            ["exchange.strategy=bf16", "exchange.exact=no", "layout.shard=2"],
            2,
            "exchange.strategy: bf16 is for replicas, and layout has none: give layout.replicate, or allreduce",
        ),
        (
            ["exchange.strategy=bf16", "exchange.exact=no", "layout.replicate=2", "layout.context=2"],
            4,
            "exchange.strategy: bf16 goes with replicate and shard, or replicate and tensor: give these, or allreduce",
        ),
        (
            ["exchange.strategy=int8", "exchange.exact=no", "precision=fp16"],
            2,
            "exchange.strategy: int8 keeps what it could not send, but the loss scale of fp16 changes: use bf16",
        ),
        (
            ["exchange.strategy=powersgd", "exchange.exact=no", "layout.replicate=2", "layout.shard=2"],
            4,
            "exchange.strategy: powersgd projects whole gradients: give layout.replicate only, or int8",
        ),
        (
            ["exchange.strategy=powersgd"],
            2,
            "exchange.strategy: powersgd rounds what it sends, which exact: world forbids: use",
        ),
        (
            ["exchange.strategy=local"],
            2,
            "exchange.strategy: local has workers train apart, which exact: world forbids: use allreduce, or exact: no",
        ),
        (
            ["exchange.strategy=diloco", "exchange.exact=replicas"],
            2,
            "exchange.strategy: diloco has workers train apart, which exact: replicas forbids: use allreduce",
        ),
        (
            ["exchange.strategy=diloco", "exchange.exact=no", "layout.replicate=2", "layout.shard=2"],
            4,
            "exchange.strategy: diloco is for workers that hold the whole model: give layout.replicate only, or",
        ),
        (
            ["exchange.strategy=local", "exchange.exact=no", "exchange.outer.lr=0.5"],
            2,
            "exchange.outer: is for strategy: diloco, and local takes the plain mean: leave it out, or use diloco",
        ),
        (
            ["exchange.strategy=local", "exchange.exact=no", "optim.state=8bit"],
            2,
            "optim.state: 8bit state has no mean over workers, which local may have to take: use bf16",
        ),
        (
            ["exchange.every=50"],
            2,
            "exchange.every: is for strategy: local or diloco, and the strategy is auto: leave it out",
        ),
        (
            ["exchange.strategy=int8", "exchange.exact=no", "exchange.wire=bf16"],
            2,
            "exchange.wire: is for strategy: local or diloco, and the strategy is int8: leave it out",
        ),
        (
            ["exchange.fragments=2"],
            2,
            "exchange.fragments: is for strategy: local or diloco, and the strategy is auto: leave it out",
        ),
        (
            ["exchange.strategy=diloco", "exchange.exact=no", "exchange.every=3", "exchange.fragments=4"],
            2,
            "exchange.fragments: found 4, but at most one leaves after a step: at most every = 3",
        ),
        (
            ["exchange.strategy=diloco", "exchange.exact=no", "exchange.fragments=4", "exchange.delay=6"],
            2,
            "exchange.delay: found 6, but the next fragment leaves after 6: at most 5",
        ),
        (["layout.context=3"], 3, "layout.context: found 3, which must divide data.sequence = 256$"),
        (["layout.shard=3"], 3, "batch.global: 16 samples cannot be divided among 3 workers; 15 or 18 can$"),
        (["task=clasification"], 1, "task: found 'clasification', .*; did you mean classification\\?"),
        (["init=nowhere"], 1, "init: there is no checkpoint or run at .*nowhere"),
    ],
)
def test_what_cannot_run_is_told_with_its_numbers(
    overrides: list[str], workers: int, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=f"(?m)^{expected}"):
        check(recipe(*overrides), tmp_path, workers)


@pytest.mark.parametrize(
    ("overrides", "workers"),
    [
        (["layout.shard=4"], 4),
        (["layout.replicate=2", "layout.shard=2"], 4),
        (["layout.tensor=2", "batch.micro=16"], 2),  # tensor ranks have the same samples
        (["layout.context=4", "batch.micro=16"], 4),
        (["layout.shard=2", "layout.context=2", "layout.expert=4"], 4),
        (["layout.shard=2", "optim.name=muon"], 2),
        (["layout.replicate=4", "exchange.exact=replicas"], 4),
        (["layout.replicate=2", "layout.shard=2", "exchange.exact=replicas"], 4),
        (["layout.shard=2", "task=classification"], 2),
        (["layout.tensor=3"], 3),  # hidden states stay whole where the sequence does not divide
        (["layout.shard=2", "optim.state=8bit"], 2),
        (["layout.replicate=2", "compile=graphs"], 2),
        (["exchange.strategy=int8", "exchange.exact=no"], 2),
        (["exchange.strategy=powersgd", "exchange.exact=no", "exchange.low_rank=8"], 2),
        (["exchange.strategy=int8", "exchange.exact=no", "layout.replicate=2", "layout.shard=2"], 4),
        (["exchange.strategy=bf16", "exchange.exact=no", "layout.replicate=2", "layout.tensor=2"], 4),
        (["exchange.strategy=local", "exchange.exact=no", "precision=fp16"], 2),
        (["exchange.strategy=diloco", "exchange.exact=no", "layout.replicate=2", "exchange.wire=int8"], 2),
        (["exchange.strategy=diloco", "exchange.exact=no", "exchange.every=500"], 1),
    ],
)
def test_layouts_that_fit_pass(overrides: list[str], workers: int, tmp_path: Path) -> None:
    check(recipe(*overrides), tmp_path, workers)


def test_each_problem_of_a_layout_has_a_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        check(recipe("layout.tensor=2", "layout.context=3", "layout.expert=2", "optim.name=muon"), tmp_path, 2)
    keys = [line.split(":")[0] for line in str(caught.value).splitlines()]
    assert keys == ["layout", "layout.expert", "layout.tensor", "layout.context"]


def test_a_list_of_numbers_is_told_as_one() -> None:
    with pytest.raises(
        RecipeError, match=r"layout\.stages: .* expected a list of whole numbers from 1 to 1,000,000 or null"
    ):
        recipe("layout.stages=3")


def test_a_check_says_where_the_key_was_written(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("name: a\nbatch:\n  micro: 5\n")
    loaded = load_recipe(file)
    with pytest.raises(RecipeError, match=r"r\.yaml:3: batch\.micro: 5 x 1"):
        check(loaded.recipe, loaded.folder, 1, loaded.at)


def test_an_init_that_is_an_export_is_refused_with_its_right_name(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"init: .*out is a Hugging Face directory, or an export; give hf:out$"):
        check(recipe("init=out"), tmp_path, 1)
    check(recipe("init=hf:out"), tmp_path, 1)


def test_init_is_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    check(recipe("init=there"), tmp_path)


def test_differences_name_the_deepest_keys() -> None:
    found = differences(
        recipe("model.args.a=1", "layout=auto"), recipe("model.args.b=2", "optim.lr=1", "layout.shard=1")
    )
    assert {difference.key for difference in found} == {"model.args.a", "model.args.b", "optim.lr", "layout"}
    assert Difference("optim.lr", 0.001, 1.0) in found
    assert str(Difference("optim.lr", 0.001, 1.0)) == "optim.lr: 0.001 -> 1.0"


def test_differences_go_into_lists_of_the_same_length() -> None:
    old = recipe("data.source=[{text: a}, {text: b}]")
    new = recipe("data.source=[{text: a}, {text: b, weight: 2}]")
    assert [difference.key for difference in differences(old, new)] == ["data.source.1.weight"]


@pytest.mark.parametrize(
    "key", ["name", "steps", "checkpoint.every", "recovery.attempts", "callbacks", "callbacks.0", "evaluate.every"]
)
def test_what_does_not_touch_the_mathematics_is_free(key: str) -> None:
    assert is_free(key)


@pytest.mark.parametrize(
    "key", ["seed", "optim.lr", "batch.global", "batch.micro", "evaluate.share", "precision", "threads", "names"]
)
def test_what_touches_the_mathematics_is_not_free(key: str) -> None:
    assert not is_free(key)


@pytest.mark.parametrize(
    ("old", "resolved", "new", "keys"),
    [
        ([], [], ["steps=900", "name=b", "checkpoint.keep=9", "evaluate.every=3"], []),
        ([], [], ["optim.lr=1", "seed=2", "steps=900"], ["optim.lr", "seed"]),
        ([], ["precision=bf16"], [], []),
        ([], ["precision=bf16"], ["precision=bf16"], []),
        ([], ["precision=bf16"], ["precision=fp32"], ["precision"]),
        (["precision=bf16"], ["precision=bf16"], ["precision=auto"], []),
        (["batch.micro=4"], ["batch.micro=4"], ["batch.micro=8"], ["batch.micro"]),
        ([], ["layout.replicate=2"], ["layout.replicate=3"], []),
        ([], ["layout.replicate=2"], ["layout.shard=2"], []),  # changes rounding only
        ([], [], ["evaluate.share=0.02"], ["evaluate.share"]),
        (["model.args.a=[3]"], ["model.args.a=[3]"], ["model.args.a=[auto]"], ["model.args.a.0"]),
        (["model.args.a=[auto]"], ["model.args.a=[auto]"], ["model.args.a=[3]"], ["model.args.a.0"]),
    ],
)
def test_a_run_goes_on_only_under_the_same_mathematics(
    old: list[str], resolved: list[str], new: list[str], keys: list[str]
) -> None:
    found = refused(recipe(*old), recipe(*resolved), recipe(*new))
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
    page = Path(__file__).parents[3] / "docs" / "recipe.md"
    assert page.read_text() == markdown(), "run `make docs`"


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e999"])
@pytest.mark.parametrize("key", ["optim.lr", "optim.weight_decay", "recovery.silence", "data.source.weight"])
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
        (["device=mps", "compile=graphs"], "compile: graphs are CUDA graphs, and an Apple GPU has none"),
        (["device=cpu", "compile=graphs"], "compile: graphs are CUDA graphs, and a CPU is no GPU; true or false"),
        (["device=xpu", "exchange.exact=world"], "exchange.exact: found world, but torch does not say which kernels"),
        (["device=mps", "layout.replicate=2"], "device: found mps, on which torch has no way to exchange gradients"),
        (["optim.name=sgd", "optim.state=8bit"], "optim.state: 8bit is for adamw; sgd keeps its state in fp32"),
        (
            ["optim.name=muon", "memory.offload=optimizer"],
            "memory.offload: optimizer goes with adamw and sgd; a step",
        ),
        (
            ["task=classification", "memory.loss=chunked"],
            "memory.loss: chunked is for language models, and the task",
        ),
        (["data.source={images: .}"], r"data.source: images need a common size, for instance `size: \[224, 224\]`"),
        (["evaluate.source={images: .}"], "evaluate.source: images need a common size"),
        (["data.source=[{text: a},{images: .}]"], r"data.source.1: images need a common size"),
        (["layout.pipeline=2", "layout.stages=[1,1,1]"], "layout.stages: 1f1b on 2 ranks takes one stage a rank"),
        (
            ["layout={pipeline: 2, schedule: interleaved, stages: [1, 1]}"],
            "layout.stages: interleaved on 2 ranks",
        ),
        (["layout.stages=[1,1]"], "layout.stages: is for pipelines: give layout.pipeline, or leave it out"),
        (
            ["layout.schedule=gpipe"],
            "layout.schedule: gpipe is for pipelines: give layout.pipeline, or leave it out",
        ),
        (
            ["layout.pipeline=4", "batch.micro=8"],
            "batch.micro: 1f1b with 4 stages on 4 ranks cannot run 2",
        ),
        (
            ["layout.pipeline=8", "batch.global=4"],
            "batch.global: 1f1b with 8 stages on 8 ranks has no micro-batch",
        ),
        (["exchange.strategy=ring", "exchange.low_rank=8"], "exchange.low_rank: is for strategy: powersgd"),
        (["exchange.low_rank=8"], "exchange.low_rank: is for strategy: powersgd, and the strategy is auto"),
        (
            ["optim.name=sgd", "optim.betas=[0.9, 0.99]"],
            "optim.betas: is for adamw, lamb, muon, and the optimizer is sgd",
        ),
        (["optim.momentum=0.5"], "optim.momentum: is for sgd, muon, lars, and the optimizer is adamw"),
        (["optim.schedule.power=2"], "optim.schedule.power: is for decay: poly, and it is cosine"),
        (["optim.schedule.gamma=0.5"], "optim.schedule.gamma: is for decay: step, and it is cosine"),
        (["data.source={text: x, size: [8, 8]}"], "data.source.size: is for images, and the source is text"),
        (
            ["data.source={prepared: x, exclude: y}"],
            "data.source.exclude: is for text, jsonl, parquet, and the source is",
        ),
        (
            ["data.source=[{text: x}, {text: x, field: t}]"],
            "data.source.1.field: is for jsonl, parquet, and the source is",
        ),
        (["data={source: {images: ., size: [8, 8]}, sequence: 64}"], "data.sequence: is for text, and the source has"),
        (["evaluate={share: 0.2, source: {text: x}}"], "evaluate.share: is a share of the training data, and"),
        (
            ["optim.schedule={decay: constant, final: 0}"],
            "optim.schedule.final: is for decay: cosine, linear, poly, and it is constant",
        ),
        (
            ["batch.per=worker", "batch.global=90000000", "layout.replicate=2"],
            "batch.global: 180,000,000 samples of 2 workers, expected at most 100,000,000 in all",
        ),
    ],
)
def test_what_depends_on_the_recipe_alone_is_refused_by_its_check(
    overrides: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FP8, raising=False)
    found = recipe(*overrides)
    with pytest.raises(RecipeError, match=expected) as caught:
        check(found, tmp_path, workers_for(found, 1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["device=cuda", "precision=fp8", "compile=graphs"],
        ["device=auto", "precision=fp8"],
        ["device=cpu", "precision=tf32"],
        ["device=mps"],
        ["layout={pipeline: 2, schedule: zero-bubble, stages: [1, 1, 1, 1]}"],
        ["layout={pipeline: 2, schedule: interleaved}", "batch.micro=8"],
        ["exchange.strategy=powersgd", "exchange.exact=no", "exchange.low_rank=8"],
        ["data.source={images: ., size: [8, 8]}"],
        ["optim={name: muon, betas: [0.9, 0.99], momentum: 0.95, schedule: {decay: poly, power: 2, final: 0}}"],
    ],
)
def test_what_some_machine_can_do_passes_its_check(overrides: list[str], tmp_path: Path) -> None:
    found = recipe(*overrides)
    check(found, tmp_path, workers_for(found, 1))


def test_without_a_number_of_workers_nothing_is_said_about_it(tmp_path: Path) -> None:
    check(recipe("batch.global=7", "init=nowhere"), tmp_path, None)
    with pytest.raises(RecipeError, match=r"optim\.state: 8bit is for adamw"):
        check(recipe("batch.global=7", "optim.name=sgd", "optim.state=8bit"), tmp_path, None)
