"""What the site shows in place of links that leave docs/; the build itself is `make site`."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

PATH = Path(__file__).parents[2] / "tools" / "outside_links.py"
spec = importlib.util.spec_from_file_location("outside_links", PATH)
assert spec is not None
assert spec.loader is not None
outside_links = importlib.util.module_from_spec(spec)
spec.loader.exec_module(outside_links)


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("[own task](../../examples/own-task)", "own task (`examples/own-task`)"),
        ("[examples/own-task](../../examples/own-task)", "examples/own-task"),
        ("[data](data.md#the-cache)", "[data](data.md#the-cache)"),
        ("[tables](../benchmarks/index.md)", "[tables](../benchmarks/index.md)"),
        ("![picture](../images/report.png)", "![picture](../images/report.png)"),
        ("[paper](https://arxiv.org/abs/1511.00175)", "[paper](https://arxiv.org/abs/1511.00175)"),
    ],
)
def test_a_link_that_leaves_docs_becomes_its_path(link: str, shown: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="how-to/extend.md"))
    config = {"docs_dir": str(outside_links.ROOT / "docs")}
    assert outside_links.on_page_markdown(link, page, config) == shown
