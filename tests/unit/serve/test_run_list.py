"""The list of runs: its short names and its order, which live updates keep."""

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from make_run import healthy
from phalanx.serve.access import make_access
from phalanx.serve.pages import SORT_KEYS, RunQuery, render_run_list, select_rows
from phalanx.serve.run_index import RunRow
from serve_browser import Browser

NOW = 1000.0


def make_rows(**losses: float | None) -> dict[str, RunRow]:
    return {
        name: RunRow(Path(name), None, last_written_at=10.0 * number, first_event_at=1.0, ended_as="done", loss=loss)
        for number, (name, loss) in enumerate(losses.items())
    }


def sort_names(rows: dict[str, RunRow], sort: str, descending: bool = False) -> list[str]:
    query = RunQuery(sort=sort, descending=descending)
    return [listed.name for listed in select_rows(rows, {id: id for id in rows}, query, NOW)]


def test_a_run_without_a_value_is_last_in_both_directions() -> None:
    rows = make_rows(a=2.0, b=None, c=1.0, d=3.0)
    assert sort_names(rows, "loss") == ["c", "a", "d", "b"]
    assert sort_names(rows, "loss", descending=True) == ["d", "a", "c", "b"]


@pytest.mark.parametrize("descending", [False, True])
def test_runs_with_equal_values_keep_the_order_of_the_list(descending: bool) -> None:
    assert sort_names(make_rows(a=1.0, b=1.0, c=1.0), "loss", descending) == ["c", "b", "a"]


@pytest.mark.parametrize("sort", SORT_KEYS)
def test_each_column_sorts_rows_of_which_nothing_is_known(sort: str) -> None:
    rows = {**make_rows(a=1.0), "empty": RunRow(Path("empty"), None, 0.0)}
    assert sorted(sort_names(rows, sort)) == ["a", "empty"]


def test_running_runs_keep_their_places_while_they_are_written() -> None:
    rows = {
        name: RunRow(Path(name), None, last_written_at=NOW, first_event_at=started)
        for name, started in (("old", 1.0), ("new", 2.0))
    }
    before = sort_names(rows, "")
    rows["old"] = replace(rows["old"], last_written_at=NOW + 1)
    assert sort_names(rows, "") == before == ["new", "old"]


def test_the_head_of_the_sorted_column_says_so_and_leads_to_the_other_order() -> None:
    query = RunQuery(text="a", sort="loss")
    listed = select_rows(make_rows(a=1.0), {"a": "a"}, query, NOW)
    page = render_run_list(listed, query, is_complete=True)
    heads = dict(re.findall(r'aria-sort="(\w+)"><a href="(.*?)"', page))
    assert {order: unescape(address) for order, address in heads.items()} == {
        "ascending": "./?q=a&sort=loss&descending=1"
    }


def test_the_stream_and_the_filter_keep_the_order(tmp_path: Path) -> None:
    healthy(tmp_path / "one")
    page = Browser(tmp_path, make_access("127.0.0.1", False, None, demands_token=False)).get("/?sort=loss&descending=1")
    assert 'data-events="stream/runs?sort=loss&amp;descending=1"' in page.text
    assert '<input type="hidden" name="sort" value="loss">' in page.text


def test_runs_have_short_names_and_their_paths_as_titles(tmp_path: Path) -> None:
    for name in ("gpt/1", "gpt/2", "vit/1"):
        healthy(tmp_path / name)
    page = Browser(tmp_path, make_access("127.0.0.1", False, None, demands_token=False)).get("/")
    links = re.findall(r'<a href="run/\w+" title="(.*?)">(.*?)</a>', page.text)
    assert dict(links) == {
        str(tmp_path / "gpt/1"): "gpt/1",
        str(tmp_path / "gpt/2"): "2",
        str(tmp_path / "vit/1"): "vit/1",
    }
