"""Arrays as people type them: several recipes, and values that vary."""

from pathlib import Path

import pytest

from phalanx.app.submit import expand_sweep, make_recipe_job, make_sweep, split_recipes_and_overrides
from phalanx.app.train_arguments import TrainArguments
from phalanx.errors import UsageError
from phalanx.jobs.spec import Job


def recipe(folder: Path, name: str, file: str | None = None) -> Path:
    path = folder / f"{file or name}.yaml"
    path.write_text(f"name: {name}\nmodel: {{}}\ndata: {{source: {{text: '*.txt'}}}}\n")
    return path


def make(path: Path, given: list[str], where: Path) -> Job:
    return make_recipe_job(TrainArguments(path, given, where))


@pytest.mark.parametrize(
    ("words", "recipes", "overrides"),
    [
        (["a.yaml"], ["a.yaml"], []),
        (["a.yaml", "steps=3"], ["a.yaml"], ["steps=3"]),
        (["a.yaml", "b.yml", "data.source.text=c.yaml"], ["a.yaml", "b.yml"], ["data.source.text=c.yaml"]),
        (["a.yaml", "steps=3", "b.yaml"], ["a.yaml"], ["steps=3", "b.yaml"]),
        (["loop.py", "b.yaml", "-v"], ["loop.py"], ["b.yaml", "-v"]),
    ],
)
def test_leading_words_are_recipes_and_others_overrides(
    words: list[str], recipes: list[str], overrides: list[str]
) -> None:
    assert split_recipes_and_overrides(words) == (recipes, overrides)


def test_values_that_vary_make_every_combination() -> None:
    assert expand_sweep([]) == [()]
    assert expand_sweep(["optimizer.lr=1e-3, 3e-4", "seed=1,2"]) == [
        ("optimizer.lr=1e-3", "seed=1"),
        ("optimizer.lr=1e-3", "seed=2"),
        ("optimizer.lr=3e-4", "seed=1"),
        ("optimizer.lr=3e-4", "seed=2"),
    ]


@pytest.mark.parametrize(
    ("vary", "told"),
    [
        (["lr"], "expected KEY=VALUE"),
        (["lr=1,,2"], "expected KEY=VALUE"),
        (["seed=1,1"], "duplicate value"),
        (["seed=1", "seed=2"], "seed is given twice"),
    ],
)
def test_what_varies_in_a_way_nobody_can_mean_is_refused(vary: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        expand_sweep(vary)


def test_each_member_trains_in_a_run_of_its_own(tmp_path: Path) -> None:
    jobs = make_sweep(
        [recipe(tmp_path, "mine")], ["steps=3"], expand_sweep(["init_from=null,x/y z"]), None, None, 2, make
    )
    assert [job.name for job in jobs] == ["mine.0", "mine.1"]
    assert [job.run_dir for job in jobs] == [Path(f"runs/mine-init_from={end}").absolute() for end in ("null", "x_y_z")]
    assert jobs[1].command[5:8] == (str(tmp_path / "mine.yaml"), "steps=3", "init_from=x/y z")
    assert {job.max_parallel for job in jobs} == {2}


def test_several_recipes_train_beside_each_other_in_the_given_folder(tmp_path: Path) -> None:
    recipes = [recipe(tmp_path, "one"), recipe(tmp_path, "two")]
    jobs = make_sweep(recipes, [], expand_sweep([]), tmp_path / "sweep", "both", None, make)
    assert [(job.name, job.run_dir) for job in jobs] == [
        ("both.0", tmp_path / "sweep" / "one"),
        ("both.1", tmp_path / "sweep" / "two"),
    ]


def test_recipes_of_one_name_are_refused(tmp_path: Path) -> None:
    recipes = [recipe(tmp_path, "same", "a"), recipe(tmp_path, "same", "b")]
    with pytest.raises(UsageError, match="members 0 and 1 would both train in"):
        make_sweep(recipes, [], expand_sweep([]), None, None, None, make)
