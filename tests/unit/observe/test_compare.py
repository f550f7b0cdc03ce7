"""Runs side by side: what differs is shown, and whether the weights are the same."""

import json
from pathlib import Path

import pytest

from make_run import Maker, healthy
from phalanx.errors import UsageError
from phalanx.observe.compare import compare_runs, render_comparison_html, render_comparison_text
from phalanx.run import Run


def compared(*paths: Path):  # type: ignore[no-untyped-def]
    return compare_runs([Run(path) for path in paths])


def test_only_the_recipe_keys_that_differ_are_shown(tmp_path: Path) -> None:
    one = healthy(tmp_path / "one", total=60)
    two = healthy(tmp_path / "two", total=60, optimizer={"lr": 3e-4})
    comparison = compared(one, two)
    assert comparison.differing_keys["optimizer.lr"] == [1e-3, 3e-4]
    assert "precision" not in comparison.differing_keys
    text = render_comparison_text(comparison)
    assert "optimizer.lr" in text
    assert "final loss" in text
    assert "MFU (measured peak)" in text
    assert "data wait" in text


def test_keys_within_lists_are_flat(tmp_path: Path) -> None:
    groups = [{"match": "norm", "weight_decay": 0.0}, {"match": "head", "lr_ratio": 0.5}]
    changed = [groups[0], {"match": "head", "lr_ratio": 0.1}]
    one = healthy(tmp_path / "one", total=5, optimizer={"groups": groups})
    two = healthy(tmp_path / "two", total=5, optimizer={"groups": changed})
    assert compared(one, two).differing_keys == {"optimizer.groups.1.lr_ratio": [0.5, 0.1]}


def test_what_is_empty_missing_or_the_same_data_elsewhere_is_no_difference(tmp_path: Path) -> None:
    def make(name: str, hash: str, **changes: object) -> Path:
        data = {"source": [{"prepared": f"/{name}/cache/{hash}"}]}
        return healthy(tmp_path / name, total=5, data=data, **changes)

    one, two = (
        make("one", "5c", local_sgd=None, model={"build": "a:b", "args": {}}),
        make("two", "5c", model={"build": "a:b"}),
    )
    assert compared(one, two).differing_keys == {}
    other = make("other", "e1", model={"build": "a:b"})
    assert list(compared(two, other).differing_keys) == ["data.source.0.prepared"]


def test_equal_recipes_and_digests_are_said_to_be_equal(tmp_path: Path) -> None:
    comparison = compared(healthy(tmp_path / "one", total=30), healthy(tmp_path / "two", total=30))
    assert comparison.digests_equal is True
    text = render_comparison_text(comparison)
    assert "The recipes are the same" in text
    assert "Digests are equal" in text


def test_a_missing_digest_is_not_called_different(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "started").start()
    comparison = compared(healthy(tmp_path / "one", total=30), maker.path)
    assert comparison.digests_equal is None
    assert "not known" in render_comparison_text(comparison)


def test_different_digests_are_said_to_differ(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "two", total=5).start().steps(1, 5).end(digest="b" * 32)
    assert compared(healthy(tmp_path / "one", total=5), maker.path).digests_equal is False


def test_the_page_has_both_curves_and_the_json_is_strict(tmp_path: Path) -> None:
    comparison = compared(healthy(tmp_path / "one", total=60), healthy(tmp_path / "two", total=90))
    html = render_comparison_html(comparison)
    assert '"label":"one"' in html
    assert '"label":"two"' in html
    json.dumps(comparison.to_json(), allow_nan=False)


def test_runs_without_steps_can_be_compared(tmp_path: Path) -> None:
    makers = [Maker(tmp_path / name) for name in ("one", "two")]
    for maker in makers:
        maker.start()
    comparison = compared(*(maker.path for maker in makers))
    assert "not measured" in render_comparison_text(comparison)
    assert "No run has finished a step" in render_comparison_html(comparison)


def test_one_run_or_none_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least two"):
        compared(healthy(tmp_path / "one", total=5))
    with pytest.raises(UsageError, match="no run here"):
        compared(tmp_path / "one", tmp_path / "none")
