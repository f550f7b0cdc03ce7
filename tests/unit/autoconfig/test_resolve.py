"""Trials that fill memory: their end is an answer, and the next best choice is tried. No process is started."""

import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.autoconfig import trial_names
from phalanx.autoconfig.choices import AutoChoice
from phalanx.autoconfig.memory_choice import MemoryProfile, WorkerMemory
from phalanx.autoconfig.resolve import (
    SubprocessCall,
    TrialTimes,
    cache_trials,
    call_catching_oom,
    choose_fewest_threads,
    measure_memory,
    try_memory_choices,
)
from phalanx.autoconfig.trial_names import (
    MATMUL_TRIAL,
    MAX_OTHER_LOAD,
    META_PROFILE_TRIAL,
    OTHER_LOAD_KEY,
    PROFILE_TRIAL,
    TIMING_TRIAL,
    TRACE_TRIAL,
)
from phalanx.cluster import discover_machine
from phalanx.errors import RecipeError, SubprocessError
from phalanx.recipe import Recipe
from small_data import prepare

NEEDS = MemoryProfile(1000, 0, {"whole": {"none": 1000, "selective": 500, "full": 100}})
ROOM = WorkerMemory("cpu", 10**12, 1)
DIED = {"out_of_memory": 1.0}
PROFILED: dict[str, Any] = {"trainable_parameters": 1000, "frozen_parameters": 0, "peaks": NEEDS.peak_bytes}
SECONDS = {"fp32": 1.0, "bf16": 0.5, "update": 0.1}


def recipe(**values: Any) -> Recipe:
    return Recipe.model_validate(values)


def killed(function: str, payload: dict[str, Any]) -> Any:
    raise SubprocessError("the trial process ended with SIGKILL", None, killed=True)


def machine(limit: int, asked: list[tuple[str, int]]) -> SubprocessCall:
    """Trials on a machine where only so many samples at once survive."""

    def call(function: str, payload: dict[str, Any]) -> Any:
        asked.append((payload["recompute"], payload["micro"]))
        return SECONDS if payload["micro"] <= limit else DIED

    return call


@pytest.mark.parametrize("function", [PROFILE_TRIAL, TIMING_TRIAL])
def test_a_trial_that_is_killed_for_memory_says_so(function: str) -> None:
    assert call_catching_oom(killed, function, {}) == DIED


def test_trials_are_announced_and_timed_unless_they_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines: list[str] = []
    times = TrialTimes(lines.append)
    timing = {"micro": 8, "precisions": ["fp32", "bf16"], "compile": True}

    def call(function: str, payload: dict[str, Any]) -> Any:
        time.sleep(0.01)
        return SECONDS

    for _ in range(2):
        run_trial = cache_trials(call, discover_machine(), "code", times)
        run_trial(TIMING_TRIAL, timing)
        run_trial(TRACE_TRIAL, {})
    expected = ["timing micro-batches of 8 in fp32, bf16, compiled", "tracing the model"]
    assert lines == [f"resolving auto: {line}" for line in expected]
    assert times.trials_s >= 0.01
    assert times.trace_s >= 0.01


def test_only_the_matmul_rate_is_reused_after_the_code_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[str] = []

    def call(function: str, payload: dict[str, Any]) -> Any:
        asked.append(function)
        return SECONDS

    for code_hash in ("before", "after"):
        run_trial = cache_trials(call, discover_machine(), code_hash, TrialTimes())
        for function in (MATMUL_TRIAL, PROFILE_TRIAL):
            run_trial(function, {"device": "cpu"})
    assert asked == [MATMUL_TRIAL, PROFILE_TRIAL, PROFILE_TRIAL]


def test_a_trial_that_fails_otherwise_is_an_error() -> None:
    def failing(function: str, payload: dict[str, Any]) -> Any:
        raise SubprocessError("KeyError: 'x'", None)

    with pytest.raises(SubprocessError, match="KeyError"):
        call_catching_oom(failing, TIMING_TRIAL, {})


@pytest.mark.parametrize(("limit", "asked"), [(16, [16]), (5, [16, 8, 4])])
def test_the_next_smaller_micro_batch_is_tried_until_one_survives(limit: int, asked: list[int]) -> None:
    seen: list[tuple[str, int]] = []
    choices, seconds, _ = try_memory_choices(recipe(batch={"global_size": 16}), NEEDS, ROOM, {}, machine(limit, seen))
    assert seen == [("none", micro) for micro in asked]
    assert {choice.key: choice.value for choice in choices}["batch.micro_size"] == asked[-1]
    assert seconds == SECONDS


def test_where_the_layout_divides_the_model_a_trial_of_the_whole_proves_nothing() -> None:
    seen: list[tuple[str, int]] = []
    of = recipe(batch={"global_size": 16}, parallelism={"shard": 2})
    choices, seconds, _ = try_memory_choices(of, NEEDS, WorkerMemory("cpu", 10**12, 2), {}, machine(0, seen))
    assert ([choice.value for choice in choices], seconds) == (["none", False, 8], {})
    assert seen == [("none", 8)]


def test_when_no_trial_survives_the_recipe_is_refused() -> None:
    seen: list[tuple[str, int]] = []
    with pytest.raises(RecipeError, match="trials ran out of memory, the last with 1 samples at once"):
        try_memory_choices(recipe(batch={"global_size": 2}), NEEDS, ROOM, {}, machine(0, seen))
    assert seen == [(way, micro) for way in ("none", "selective", "full") for micro in (2, 1)]


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("0123456789abcdef" * 200)
    return prepare(tmp_path, tmp_path / "data", {"text": "*.txt"})


@pytest.mark.parametrize(
    ("layout", "memory", "imagined", "expected"),
    [
        ("auto", 100, PROFILED, [PROFILE_TRIAL]),
        ({"shard": 2}, 17_000, PROFILED, [META_PROFILE_TRIAL, PROFILE_TRIAL]),
        ({"shard": 2}, 16_000, PROFILED, [META_PROFILE_TRIAL, META_PROFILE_TRIAL]),
        ({"shard": 2}, 16_000, {}, [META_PROFILE_TRIAL, PROFILE_TRIAL]),
    ],
    ids=["a whole model", "a divided one that fits into one process", "one that does not", "one nobody can imagine"],
)
def test_only_a_model_that_fits_into_a_process_is_loaded_for_trials(
    prepared: Path, layout: Any, memory: int, imagined: dict[str, Any], expected: list[str]
) -> None:
    called: list[str] = []

    def call(function: str, payload: dict[str, Any]) -> Any:
        called.append(function)
        return imagined if function == META_PROFILE_TRIAL else PROFILED

    given = recipe(parallelism=layout, data={"source": {"prepared": str(prepared)}})
    profile, needs = measure_memory(given, WorkerMemory("cpu", memory, 1), 2, {}, call)
    assert called == expected
    assert (profile, needs.trainable_parameters, needs.peak_bytes) == (PROFILED, 1000, NEEDS.peak_bytes)


def test_a_loss_in_chunks_that_the_model_cannot_have_is_refused(prepared: Path) -> None:
    given = recipe(memory={"chunked_loss": True}, data={"source": {"prepared": str(prepared)}})
    with pytest.raises(RecipeError, match=r"^memory.chunked_loss: true needs a language model .*; use auto or false$"):
        measure_memory(given, WorkerMemory("cpu", 10**9, 1), 2, {}, lambda function, payload: PROFILED)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({4: 0.1, 2: 0.101, 1: 0.102}, 1),
        ({4: 0.1, 2: 0.101, 1: 0.2}, 2),
        ({4: 0.1, 2: 0.19}, 4),
        ({4: 1.0}, 4),
    ],
)
def test_a_model_has_the_fewest_threads_that_are_as_fast(seconds: dict[int, float], expected: int) -> None:
    def call(function: str, payload: dict[str, Any]) -> dict[str, float]:
        return {"fp32": seconds[payload["threads"]]}

    threads = AutoChoice("num_threads", 4, "4 cores for 1 worker")
    assert choose_fewest_threads(threads, "fp32", {"fp32": seconds[4]}, {"threads": 4}, call).value == expected


def test_a_trial_that_others_disturbed_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(trial_names, "MAX_OTHER_LOAD", MAX_OTHER_LOAD)
    loads = iter([1.5, 0.0])
    call = cache_trials(
        lambda function, payload: {"fp32": 1.0, OTHER_LOAD_KEY: next(loads)}, discover_machine(), "code", TrialTimes()
    )
    assert [call("a:b", {})[OTHER_LOAD_KEY] for _ in range(3)] == [1.5, 0.0, 0.0]
