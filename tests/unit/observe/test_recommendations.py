"""Each rule speaks when its number is bad, names a key, and is silent on a healthy run."""

import re
from pathlib import Path

import pytest

from make_run import Maker, healthy, troubled
from phalanx.observe.history import read_history
from phalanx.observe.recommendations import Recommendation, find_recommendations
from phalanx.observe.summary import build_summary
from phalanx.run import Run
from phalanx.run.event_types import NonFiniteStep


def advices(path: Path) -> dict[str, Recommendation]:
    run = Run(path)
    history = read_history(run.events)
    return {advice.rule_name: advice for advice in find_recommendations(build_summary(run, history), history)}


@pytest.mark.parametrize("seed", range(4))
def test_no_rule_fires_on_a_healthy_run(tmp_path: Path, seed: int) -> None:
    assert advices(healthy(tmp_path / "run", seed=seed)) == {}


@pytest.mark.parametrize(
    ("rule", "key", "words", "shape"),
    [
        ("data-wait", "data.source.prepared", r"data wait is 3\d% of the step", {"split": {"data_wait": 0.45}}),
        (
            "grad-sync",
            "batch.global_size",
            r"gradient synchronization is 2\d% of the step",
            {"split": {"grad_sync": 0.3}, "world": 2},
        ),
        (
            "low-mfu",
            "batch.micro_size",
            "micro-batches of 2 are small",
            {"mfu": 0.1, "batch": {"global_size": 16, "micro_size": 2}},
        ),
        ("slow-precision", "precision", r"bf16 would be 3\.4x in matmul on this machine", {"precision": "fp32"}),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else None,
)
def test_a_rule_fires_with_its_number_and_key(
    tmp_path: Path, rule: str, key: str, words: str, shape: dict[str, object]
) -> None:
    found = advices(healthy(tmp_path / "run", **shape))
    assert list(found) == [rule]
    assert key in (found[rule].recipe_key or "")
    assert re.search(words, found[rule].full_text)


def test_checkpoint_stalls_name_how_often_to_save_instead(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", total=60, checkpoint={"every": 10}).start()
    for step in range(1, 61):
        maker.step(step)
        if step % 10 == 0:
            maker.checkpoint(step, stall=1.0)
    maker.end()
    found = advices(maker.path)["checkpoint-stalls"]
    assert found.recipe_key == "checkpoint.every"
    assert "instead of every 10" in found.advice
    assert "20% of the time" in found.finding or "19% of the time" in found.finding


def test_guards_come_first_and_gains_are_sorted(tmp_path: Path) -> None:
    run = Run(troubled(tmp_path / "run"))
    history = read_history(run.events)
    found = find_recommendations(build_summary(run, history), history)
    assert [advice.rule_name for advice in found if advice.is_urgent] == ["nonfinite-steps"]
    gains = [advice.max_gain for advice in found if not advice.is_urgent]
    assert gains == sorted(gains, reverse=True)
    assert {"data-wait", "grad-sync", "restart-cost"} <= {advice.rule_name for advice in found}


def test_fp16_guards_point_to_bf16(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", total=60, precision="fp16", matmul={"fp16": 0.3}).start()
    maker.steps(1, 30).event(NonFiniteStep, step=31, reason="non-finite gradient")
    maker.step(31, loss=None, skip_reason="non-finite gradient").steps(32, 60)
    assert "precision=bf16" in advices(maker.path)["nonfinite-steps"].advice


def test_a_precision_that_auto_has_chosen_is_not_doubted(tmp_path: Path) -> None:
    path = healthy(tmp_path / "run", precision="fp32")
    plan = path / "plan.json"
    plan.write_text(plan.read_text().replace('"value": "bf16"', '"value": "fp32"'))
    assert advices(path) == {}


def test_one_save_at_the_end_cannot_be_made_more_rarely(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", total=20).start()
    for step in range(1, 21):
        maker.step(step)
    maker.checkpoint(20, stall=5.0).end()
    assert "checkpoint-stalls" not in advices(maker.path)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_run_too_short_to_judge_gets_no_advice(tmp_path: Path, steps: int) -> None:
    maker = Maker(tmp_path / "run", split={"data_wait": 0.9}).start().steps(1, steps)
    assert advices(maker.path) == {}
