"""Jobs made of what people type, and a job that is followed."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from made_events import made
from phalanx.app.submit import (
    BACKEND_TIMEOUT_S,
    expand_sweep,
    follow_job,
    make_framework_job,
    make_recipe_job,
    make_sweep,
    parse_assignments,
    parse_duration,
    split_recipes_and_overrides,
)
from phalanx.app.train_arguments import TrainArguments
from phalanx.errors import RecipeError, UsageError
from phalanx.jobs.backends.base import Backend
from phalanx.jobs.spec import Job, JobState, JobStatus
from phalanx.observe.progress import DeferredDisplay
from phalanx.run import EventLog, EventTail, Run
from phalanx.run.directory import write_json
from phalanx.run.event_types import RunWarning, WorkerFailure


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("1.5h", 5400), ("15min", 900), ("2d", 172800), ("01:30:05", 5405), ("2m", 120)],
)
def test_times_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "5 parsecs", "1:2", "h"])
def test_what_is_no_time_is_told(text: str) -> None:
    with pytest.raises(UsageError, match="is not a duration: expected one such as"):
        parse_duration(text)


def test_options_are_pairs() -> None:
    assert parse_assignments(["a=1", "b=x=y"], "-o") == {"a": "1", "b": "x=y"}
    with pytest.raises(UsageError, match="expected KEY=VALUE"):
        parse_assignments(["a"], "-o")


def test_a_recipe_is_checked_before_it_becomes_a_job(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: mine\nstpes: 3\n")
    with pytest.raises(RecipeError, match="stpes"):
        make_recipe_job(TrainArguments(recipe))


def test_the_job_of_a_recipe_at_a_url_reads_it_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "recipe.yaml").write_text("name: mine\nmodel: {args: {layers: 1}}\ndata: {source: {text: '*.txt'}}\n")
    arguments = TrainArguments(f"file://{tmp_path}/recipe.yaml")
    assert f"file://{tmp_path}/recipe.yaml" in make_recipe_job(arguments).command
    with pytest.raises(UsageError, match=r"recipe\.yaml is not in a directory here; leave it out"):
        make_recipe_job(arguments, snapshot="workdir")


def test_a_recipes_job_trains_it_in_an_absolute_run(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: mine\nmodel: {build: 'phalanx.models:transformer'}\ndata: {source: {text: '*.txt'}}\n")
    job = make_recipe_job(TrainArguments(recipe, ["steps=3"], Path("here"), 2, force=True), num_nodes=2)
    assert (job.name, job.num_nodes) == ("mine", 2)
    assert job.command[1:] == (
        *("-P", "-m", "phalanx", "train", str(recipe), "steps=3", "--run", str(Path("here").absolute())),
        *("--nproc-per-node", "2", "--force"),
    )


RECIPE = "name: mine\nmodel: {}\ndata: {source: {text: '*.txt'}}\n"


def test_a_recipe_whose_code_travels_is_named_as_it_lies_in_the_copy(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    job = make_recipe_job(
        TrainArguments(tmp_path / "recipe.yaml", run=Path("here")), snapshot="workdir", environment={"A": "b"}
    )
    assert job.snapshot is not None
    assert (job.snapshot.source_dir, job.snapshot.num_files, job.run_dir) == (tmp_path, 1, Path("here").absolute())
    assert job.command[1:] == ("-P", "-m", "phalanx", "train", "recipe.yaml", "--run", str(Path("here").absolute()))
    assert job.environment == {"A": "b", "PHALANX_SNAPSHOT_SOURCE": str(tmp_path)}


def test_a_script_travels_with_the_folder_that_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "loop.py").write_text("")
    monkeypatch.chdir(tmp_path)
    job = make_recipe_job(TrainArguments(Path("deep/loop.py"), ["-v"]), snapshot="workdir")
    assert job.command[5:7] == ("deep/loop.py", "-v")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(UsageError, match="start from a directory that contains the script"):
        make_recipe_job(TrainArguments(Path("../deep/loop.py")), snapshot="workdir")


def test_a_frameworks_job_is_named_after_its_script() -> None:
    job = make_framework_job("jax", ["python", "-u", "path/to/my.script.py", "--lr", "1"], 2, None)
    assert job.name == "my.script"
    assert job.command[1:7] == ("-P", "-m", "phalanx.jobs.frameworks.launcher", "jax", "2", "--")
    with pytest.raises(UsageError, match="needs a command"):
        make_framework_job("torch", [], None, None)


class Scripted(Backend):
    """An engine that says one thing after the other."""

    name = "scripted"

    def __init__(self, *said: JobStatus | UsageError):
        self.said: Iterator[Any] = iter(said)

    def poll(self, job: str) -> JobStatus:
        found = next(self.said)
        if isinstance(found, UsageError):
            raise found
        assert isinstance(found, JobStatus)
        return found


HAPPENED: dict[Run, EventTail] = {}
"""What has happened in a run since somebody began to follow it."""


def status(state: JobState, **more: Any) -> JobStatus:
    return JobStatus("7", "job", state, **more)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.create()
    write_json(run.result, {"status": "done", "digest": "abc"})
    log = EventLog(run.events)
    log.write(made(RunWarning, text="an older one"))
    happened = EventTail(run.events)
    happened.skip()
    HAPPENED[run] = happened
    log.write(made(WorkerFailure, message="a newer one"))
    log.close()
    return run


def followed(run: Run, *said: JobStatus | UsageError) -> tuple[JobStatus, str]:
    out = io.StringIO()
    engine: Any = Scripted(*said)
    with DeferredDisplay(run, out) as shown:
        found = follow_job(engine, "7", HAPPENED[run], shown, out, sleep=lambda seconds: None)
    return found, out.getvalue()


def test_what_happens_in_a_followed_run_is_shown_from_now_on(run: Run) -> None:
    found, said = followed(run, status(JobState.QUEUED), status(JobState.RUNNING), status(JobState.DONE, exit_code=0))
    assert found.state is JobState.DONE
    assert "a newer one" in said
    assert "an older one" not in said


def test_how_a_job_ended_is_told_with_its_code_and_why(run: Run) -> None:
    found, said = followed(run, status(JobState.FAILED, exit_code=93, reason="no progress"))
    assert found.exit_code == 93
    assert "job 7 failed, exit code 93: no progress" in said


def test_an_engine_that_does_not_answer_for_a_while_is_asked_again(run: Run) -> None:
    silent = UsageError("slurm does not answer")
    found, said = followed(run, silent, silent, status(JobState.DONE, exit_code=0))
    assert found.state is JobState.DONE
    assert said.count("slurm does not answer; retrying for 10 min") == 1
    with pytest.raises(UsageError, match="does not answer"):
        followed(run, *[silent] * int(BACKEND_TIMEOUT_S + 2))


@pytest.mark.parametrize(("device", "devices"), [("auto", 2), ("cuda", 2), ("cpu", 0)])
def test_a_recipe_for_the_cpu_takes_no_gpu_unless_it_is_asked_for(tmp_path: Path, device: str, devices: int) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    assert make_recipe_job(TrainArguments(recipe, [f"device={device}"]), default_gpus=2).gpus_per_node == devices


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
