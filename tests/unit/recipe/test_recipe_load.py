"""Loading: YAML with places, overrides, variables, and errors that say what to do."""

import sysconfig
from pathlib import Path

import pytest
from pydantic import ValidationError

from phalanx.errors import DataError, PhalanxError, RecipeError, UsageError
from phalanx.recipe import Recipe, load_recipe
from phalanx.recipe.data_schema import DataSource, IdxFiles
from phalanx.recipe.load import LoadedRecipe, dump_recipe, expand_recipe
from phalanx.recipe.yaml_loader import parse_yaml, to_yaml


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(text: str | bytes, *overrides: str) -> str:
    """What is said about `r.yaml` with this text."""
    Path("r.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError) as caught:
        load_recipe(Path("r.yaml"), overrides)
    return str(caught.value)


def recipe(text: str, *overrides: str) -> Recipe:
    Path("r.yaml").write_text(text)
    return load_recipe("r.yaml", overrides).recipe


def test_an_empty_recipe_is_the_example(folder: Path) -> None:
    assert recipe("") == load_recipe(None).recipe
    assert recipe("# nothing\n").name == "gpt-python"


@pytest.fixture
def store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a directory."""
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(folder / "cache"))
    (folder / "bucket" / "dir").mkdir(parents=True)
    return f"file://{folder}/bucket/dir"


def at_url(store: str, text: str, *overrides: str) -> LoadedRecipe:
    Path("bucket/dir/r.yaml").write_text(text)
    return load_recipe(f"{store}/r.yaml", overrides)


def test_relative_paths_of_a_recipe_at_a_url_are_relative_to_its_directory(store: str) -> None:
    loaded = at_url(
        store,
        """
        model: {build: "hf:model", args: {text: kept}}
        init_from: ../runs/first
        data:
          source:
            - {text: ["a/*.txt", /local/b.txt, "s3://other/c.txt"], exclude: ["**/x.txt", "a/y.txt"]}
            - {idx: {images: train.gz, labels: labels.gz}}
          tokenizer: tokenizer.json
        evaluation: {source: {prepared: "${recipe.dir}/set"}}
        """,
        "data.source.1.idx.labels=other.gz",
    )
    first, second = loaded.recipe.data.sources
    assert first.text == [f"{store}/a/*.txt", "/local/b.txt", "s3://other/c.txt"]
    assert first.exclude == ["**/x.txt", f"{store}/a/y.txt"]
    assert second.idx == IdxFiles(images=f"{store}/train.gz", labels=f"{store}/other.gz")
    assert loaded.recipe.evaluation.source == DataSource(prepared=f"{store}/set")
    assert (loaded.recipe.model.build, loaded.recipe.model.args) == (f"hf:{store}/model", {"text": "kept"})
    assert loaded.recipe.init_from == f"{store.removesuffix('/dir')}/runs/first"
    assert loaded.recipe.data.tokenizer == f"{store}/tokenizer.json"
    assert at_url(store, "init_from: hf://owner/name\n").recipe.init_from == "hf://owner/name"
    assert at_url(store, "").recipe == load_recipe(None).recipe


def test_errors_in_a_recipe_at_a_url_name_the_url(store: str) -> None:
    with pytest.raises(RecipeError, match=rf"^{store}/r.yaml:2: stpes: unknown key"):
        at_url(store, "name: x\nstpes: 3\n")
    with pytest.raises(UsageError, match=rf"^{store}/none.yaml: there is no such object"):
        load_recipe(f"{store}/none.yaml")
    with pytest.raises(UsageError, match=r"^s3://bucket: names no object in it; expected s3://bucket/recipe\.yaml"):
        load_recipe("s3://bucket")


@pytest.mark.parametrize("key", ["model.build", "task", "callbacks.0"])
def test_code_next_to_a_recipe_at_a_url_is_refused(store: str, key: str) -> None:
    Path("bucket/dir/my_module.py").write_text("class Thing: ...\n")
    value = "[my_module:Thing]" if key == "callbacks.0" else "my_module:Thing"
    with pytest.raises(RecipeError, match=rf"{key}: 'my_module:Thing': no package 'my_module' is installed, and code"):
        at_url(store, "", f"{key.removesuffix('.0')}={value}")


def test_missing_keys_take_the_defaults(folder: Path) -> None:
    found = recipe("optimizer: {lr: 0.5}\n")
    assert (found.optimizer.lr, found.optimizer.name, found.steps, found.batch.global_size) == (0.5, "adamw", 300, 16)


def test_loaded_knows_its_file_its_folder_and_what_was_given(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "r.yaml").write_text("steps: 5\n")
    loaded = load_recipe("sub/r.yaml", ["seed=3"])
    assert loaded.path == Path("sub/r.yaml")
    assert loaded.recipe_dir == folder / "sub"
    assert loaded.given == {"steps": 5, "seed": 3}


def test_a_key_is_named_with_its_file_and_line(folder: Path) -> None:
    Path("r.yaml").write_text("name: a\nmodel:\n  build: x:y\n")
    loaded = load_recipe("r.yaml", ["seed=3"])
    assert loaded.location_of("model.build") == "r.yaml:3: model.build"
    assert loaded.location_of("seed") == "override seed=3: seed"
    assert loaded.location_of("task") == "r.yaml: task"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RecipeError("model.build: no such module"), "r.yaml:3: model.build: no such module"),
        (RecipeError("data.source: matches no file"), "r.yaml: data.source: matches no file"),
        (RecipeError("runs/a: another recipe"), "runs/a: another recipe"),
        (DataError("model.build: not of the recipe"), "model.build: not of the recipe"),
    ],
)
def test_an_error_that_begins_with_a_key_gets_file_and_line(folder: Path, error: PhalanxError, told: str) -> None:
    Path("r.yaml").write_text("name: a\nmodel:\n  build: x:y\n")
    with pytest.raises(type(error)) as caught, load_recipe("r.yaml").locate_errors():
        raise error
    assert str(caught.value) == told


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-2E5", -2e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("010", 10),
        ("0x10", 16),
        ("0o17", 15),
        ("true", True),
        ("~", None),
        ("", None),
        ("'1e-3'", "1e-3"),
        ("[1, {a: 2}]", [1, {"a": 2}]),
        ("!!str 5", "5"),
        ("0123", 123),
        *(
            (text, text)
            for text in ["no", "on", "yes", "off", "2024-01-01", "1:30", "0b11", "1_000", "<<", "8bit", "1%"]
        ),
    ],
)
def test_values_are_read_by_the_rules_of_yaml_1_2(folder: Path, text: str, value: object) -> None:
    found = recipe(f"model: {{args: {{x: {text}}}}}\n").model.args["x"]
    assert found == value
    assert type(found) is type(value)
    assert load_recipe(None, [f"model.args.x={text}"]).recipe.model.args["x"] == value


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        (
            "%YAML 1.1\n---\nmodel: {args: {x: [no, 010, 1:30]}}\n",
            "x",
            ["no", 10, "1:30"],
        ),  # a directive changes nothing
        ("model: {args: {a: &x {k: 1}, b: *x}}\n", "b", {"k": 1}),
        ("model: {args: {a: &x 1, b: *x, c: &x 2, d: *x}}\n", "d", 2),  # an anchor that comes again: the newer value
    ],
)
def test_anchors_and_directives_are_read(folder: Path, text: str, key: str, value: object) -> None:
    assert recipe(text).model.args[key] == value


@pytest.mark.parametrize("flow", [None, True, False])
@pytest.mark.parametrize(
    "value",
    [
        "no",
        "y",
        "on",
        "~",
        "010",
        "08",
        "0o17",
        "0b11",
        "1_000",
        "1e-3",
        "1:30",
        "2024-01-01",
        "<<",
        "=",
        "? a",
        "x: y",
    ],
)
def test_a_string_that_some_yaml_takes_for_something_else_is_quoted(value: str, flow: bool | None) -> None:
    text = to_yaml({"a": [value]}, flow)
    assert f"'{value}'" in text
    assert parse_yaml(text, "x")[0] == {"a": [value]}


def test_numbers_are_written_as_older_yaml_reads_them() -> None:
    assert to_yaml({"a": [1e-5, 1e22, 0.5, 3, float("inf")]}) == "a: [1.0e-05, 1.0e+22, 0.5, 3, .inf]\n"


def test_steps_may_be_written_with_their_unit(folder: Path) -> None:
    assert recipe("evaluation: {every: 7 steps}\nsteps: 1 step\n").evaluation.every == 7


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: x\noptimizer:\n  lrr: 3", "3: optimizer.lrr: unknown key; did you mean lr?"),
        ("lr: 3", "1: lr: unknown key; did you mean optimizer.lr?"),
        ("checkpoint: {zzz: 3}", "1: checkpoint.zzz: unknown key; known are every, keep, in_memory_every"),
        (b"name: a\nx: \xff", "2: not UTF-8 text (byte 0xff)"),
        ("steps: soon", '1: steps: found "soon", expected a whole number above 0 or `N steps`'),
        ("optimizer: [1]", "1: optimizer: found [1], expected a mapping (name, lr, "),
        ("batch:\n  micro_size: 0", "2: batch.micro_size: found 0, expected a whole number above 0 or auto"),
        ("parallelism:\n  shrad: 3", "2: parallelism.shrad: unknown key; did you mean shard?"),
        ("compile: maybe", '1: compile: found "maybe", expected true or false or auto'),
        (
            "trackers: [wandb, mlflw]",
            '1: trackers.1: found "mlflw", expected tensorboard, wandb, mlflow or trackio; did you mean mlflow?',
        ),
        ("data: {source: {txt: a}}", "1: data.source.txt: unknown key; did you mean text?"),
        ("data:\n  source:\n  - text: a\n  - {text: b, weight: x}", "4: data.source.1.weight: found "),
        ("data:\n  source: {weight: 2}", "2: data.source: give exactly one of text, "),
        ("data: {source: {idx: {images: a}}}", "1: data.source.idx.labels: missing, expected text"),
        (
            "data: {tokenizer: {bpe: 3}}",
            "1: data.tokenizer.bpe: found 3, expected a whole number from 257 to 10,000,000",
        ),
        (
            "evaluation: {holdout_fraction: 1.5}",
            "1: evaluation.holdout_fraction: found 1.5, expected a number of at least 0 and below 1",
        ),
        ("name: 5", "1: name: found 5, expected text"),
        ("a: [", "2: not valid YAML: "),
        ("a: 1\nb: \x01", "2: not valid YAML: control character"),
        ("seed: 1\nseed: 2", "2: seed: appears twice, first at r.yaml:1"),
        ("x: !!python/object:os.system 3", "1: the tag !!python/object:os.system cannot be used"),
        ("x: &x [*x]", "1: an anchor that contains itself"),
        ("? [a]\n: 1", "1: found a sequence as a key"),
        ("steps: 1\n---\nsteps: 2", "2: not valid YAML: "),
        ("model: {args: {a: {b: 1, b: 2}}}", "1: model.args.a.b: appears twice, first at r.yaml:1"),
        ("x: !mine {a: 1}", "1: the tag !mine cannot be used"),
    ],
)
def test_bad_input_is_told_with_file_line_and_what_was_expected(folder: Path, text: str | bytes, expected: str) -> None:
    message = refusal(text + b"\n" if isinstance(text, bytes) else f"{text}\n")
    assert message.startswith(f"r.yaml:{expected}")
    assert len(message.splitlines()) == 1


def test_several_problems_are_told_in_the_order_of_the_file(folder: Path) -> None:
    lines = refusal("seed: -1\noptimizer: {lrr: 1, max_grad_norm: x}\nsteps: 0\n").splitlines()
    assert [line.split(": ")[1] for line in lines] == ["seed", "optimizer.lrr", "optimizer.max_grad_norm", "steps"]


def test_of_many_problems_the_first_five_are_told(folder: Path) -> None:
    lines = refusal("".join(f"zzz{index}: 1\n" for index in range(8))).splitlines()
    assert len(lines) == 6
    assert lines[-1] == "... and 3 more"


def test_a_file_that_does_not_exist_is_named_with_the_nearest(folder: Path) -> None:
    Path("small.yaml").write_text("")
    with pytest.raises(RecipeError, match=r"^smal\.yaml: there is no such file; did you mean small\.yaml\?$"):
        load_recipe("smal.yaml")


def test_a_folder_is_not_a_recipe(folder: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(folder)


def test_a_byte_order_mark_is_no_matter(folder: Path) -> None:
    Path("r.yaml").write_bytes(b"\xef\xbb\xbfsteps: 4\n")
    assert load_recipe("r.yaml").recipe.steps == 4


# -- overrides ---------------------------------------------------------------------------------------------------------


def test_overrides_change_what_the_file_says_in_their_order(folder: Path) -> None:
    found = recipe("steps: 5\noptimizer: {lr: 1}\n", "optimizer.lr=3e-4", "batch.global_size=8", "steps=6", "steps=7")
    assert (found.optimizer.lr, found.batch.global_size, found.steps) == (3e-4, 8, 7)


@pytest.mark.parametrize("text", ["", "parallelism: auto\n", "parallelism: null\n"])
def test_an_override_below_auto_or_nothing_makes_the_mapping(folder: Path, text: str) -> None:
    layout = recipe(text, "parallelism.shard=2").parallelism
    assert not isinstance(layout, str)
    assert (layout.shard, layout.replicate, layout.world) == (2, 1, 2)


def test_a_number_picks_from_a_list(folder: Path) -> None:
    found = recipe("data: {source: [{text: a}, {text: b}]}\n", "data.source.1.weight=2")
    assert isinstance(found.data.source, list)
    assert [source.weight for source in found.data.source] == [1, 2]


def test_an_override_that_is_not_key_and_value_is_wrong_usage() -> None:
    for argument in ("steps", "=3", "a..b=1"):
        with pytest.raises(UsageError, match="expected KEY=VALUE"):
            load_recipe(None, [argument])


@pytest.mark.parametrize(
    ("text", "argument", "expected"),
    [
        ("", "optimizer.lrr=3", "optimizer.lrr: unknown key; did you mean lr?"),
        ("", "steps=soon", 'steps: found "soon", expected '),
        ("", "steps=", "steps: found nothing, expected "),
        ("", "adapter=", "adapter: found nothing, expected a mapping (kind, rank, alpha, target_modules"),
        ("", "steps={", "not valid YAML: "),
        ("steps: 3", "steps.x=2", "steps is 3, not a mapping"),
        ("data: {source: [{text: a}]}", "data.source.1.weight=2", "data.source is a list of 1: found '1'"),
        ("data: {source: [{text: a}]}", "data.source.0.wight=2", "data.source.0.wight: unknown key"),
    ],
)
def test_errors_of_an_override_name_it(folder: Path, text: str, argument: str, expected: str) -> None:
    assert refusal(text, argument).startswith(f"override {argument}: {expected}")


@pytest.mark.parametrize("text", ["adapter: # {rank: 8}", "init_from:", "checkpoint:", "optimizer: {lr}"])
def test_a_key_without_a_value_is_no_null(folder: Path, text: str) -> None:
    key = "optimizer.lr" if "lr}" in text else text.partition(":")[0]
    assert refusal(f"seed: 1\n{text}\n").startswith(f"r.yaml:2: {key}: found nothing, expected ")


def test_recipes_in_checkpoints_of_earlier_versions_can_be_read() -> None:
    old = {**Recipe().model_dump(), "budget": None, "lora": None}
    old["data"]["order"] = 2
    assert Recipe.model_validate(old) == Recipe()
    with pytest.raises(ValidationError, match="budget"):
        Recipe.model_validate({**old, "budget": {"kwh": 1.0}})
    with pytest.raises(ValidationError, match="lora"):
        Recipe.model_validate({**old, "lora": {"rank": 8}})
    with pytest.raises(ValidationError, match="order"):
        Recipe.model_validate({"data": {"order": 7}})


# -- variables ---------------------------------------------------------------------------------------------------------


def test_variables_are_replaced_in_values_and_defaults(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/there")
    monkeypatch.setenv("RATE", "1e-2")
    found = recipe(
        "init_from: ${env.WHERE}/x\nmodel: {args: {a: ['${recipe.dir}/y']}}\noptimizer: {lr: '${env.RATE}'}\n"
    )
    assert found.init_from == "/there/x"
    assert found.model.args["a"] == [f"{folder}/y"]
    assert found.optimizer.lr == 1e-2
    assert not isinstance(found.data.source, list)
    assert found.data.source.text == f"{sysconfig.get_path('stdlib')}/**/*.py"


def test_a_recipe_made_in_python_can_be_expanded(folder: Path) -> None:
    assert expand_recipe(Recipe(), folder) == load_recipe(None).recipe


def test_an_unknown_variable_is_told_with_the_known_ones(folder: Path) -> None:
    message = refusal("name: a\ninit_from: ${foo}\n")
    assert message.startswith("r.yaml:2: init_from: unknown variable ${foo}; known are ${python.stdlib}, ")
    assert "NOPE_NOT_SET is not set" in refusal("init_from: ${env.NOPE_NOT_SET}\n")


# -- dump --------------------------------------------------------------------------------------------------------------


def test_what_is_dumped_loads_to_the_same_recipe(folder: Path) -> None:
    first = recipe(
        "name: x\nparallelism: {replicate: 2}\ndeterminism: off\noptimizer: {max_grad_norm: null, lr: 1e-5}\n"
        "evaluation: {every: null}\nbatch: {global_size: 8, micro_size: 2}\ncompile: false\n"
        "model: {args: {a: '1e-3', b: 'no', c: '010', d: null, e: 'über: x', f: '2024-01-01', g: [1, [2]], h: ''}}\n"
        "data: {tokenizer: {bpe: 300}, source: [{text: [a, b], exclude: c}, {idx: {images: i, labels: k}}]}\n"
    )
    Path("again.yaml").write_text(dump_recipe(first))
    assert load_recipe("again.yaml").recipe == first


def test_a_dump_keeps_the_order_of_the_schema_and_the_names_of_files() -> None:
    text = dump_recipe(load_recipe(None).recipe)
    assert text.startswith("name: gpt-python\nmodel:\n")
    assert "batch: {global_size: 16, micro_size: auto, scale_with_workers: false}" in text
    assert "determinism: auto" in text


@pytest.mark.parametrize(
    ("text", "overrides", "missing"),
    [
        ("name: a\n", [], ["model", "data.source"]),
        ("data: {seq_len: 8}\n", ["model.args.layers=1"], ["data.source"]),
        ("model: {}\n", ["data.source.text=x"], []),
    ],
)
def test_a_recipe_in_a_file_names_its_model_and_its_data(
    tmp_path: Path, text: str, overrides: list[str], missing: list[str]
) -> None:
    (tmp_path / "r.yaml").write_text(text)
    loaded = load_recipe(tmp_path / "r.yaml", overrides)
    assert loaded.missing_keys() == missing
    if missing:
        with pytest.raises(RecipeError, match=rf"r.yaml: names no {' and no '.join(missing)}; a recipe must name"):
            loaded.check_required()
    else:
        loaded.check_required()


def test_the_example_needs_no_names() -> None:
    load_recipe(None, ["steps=3"]).check_required()
