"""The report's pages in a real browser: they render, ask nobody for anything, and complain of nothing."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from chromium import Page
from make_run import healthy, render_pages, troubled
from phalanx.observe.compare import compare_runs, render_comparison_html
from phalanx.run import Run


def write_report(path: Path) -> Path:
    run = Run(path)
    run.report.write_text(render_pages(path)[1])
    return run.report


@pytest.fixture(scope="module")
def page(browser: str) -> Iterator[Page]:
    """One browser for all tests of this file."""
    with Page(browser) as page:
        yield page


@pytest.fixture(autouse=True)
def _forget(page: Page) -> None:
    page.messages.clear()
    page.requests.clear()


def assert_renders_alone(page: Page, path: Path) -> None:
    page.open(path)
    picture = Image.open(io.BytesIO(page.picture())).convert("RGB")
    colours = picture.getcolors(1 << 24)
    background = max(colours)[0] / (picture.width * picture.height)
    assert len(colours) > 30, "the page is blank"
    assert 0.3 < background < 0.995
    assert page.messages == []
    outside = [url for url in page.requests if not url.startswith("data:") and url != path.resolve().as_uri()]
    assert outside == []


def test_the_report_of_a_troubled_run_renders_without_network_or_complaint(page: Page, tmp_path: Path) -> None:
    assert_renders_alone(page, write_report(troubled(tmp_path / "run")))
    assert page.evaluate("document.querySelectorAll('figure.chart canvas').length") == 5
    signs = page.evaluate("[...document.querySelector('figure.wide .keys').children].map((key) => key.innerText)")
    assert signs[2:] == ["validation", "○best", "┆restart", "▒repeated steps", "▼non-finite", "▲checkpoint"]
    assert page.evaluate("document.querySelector('.bar span').style.flexGrow") != ""
    assert page.evaluate("document.querySelectorAll('.advice li').length") >= 4


def test_a_comparison_renders_without_network_or_complaint(page: Page, tmp_path: Path) -> None:
    runs = [Run(healthy(tmp_path / name, seed=seed)) for seed, name in enumerate(("a", "b"))]
    path = tmp_path / "compare.html"
    path.write_text(render_comparison_html(compare_runs(runs)))
    assert_renders_alone(page, path)


def test_the_pointer_over_a_plot_shows_the_values_there(page: Page, tmp_path: Path) -> None:
    page.open(write_report(healthy(tmp_path / "run")))
    box = page.evaluate("(() => { const b = document.querySelector('.u-over').getBoundingClientRect();"
                        " return [b.x, b.y, b.width, b.height]; })()")  # fmt: skip
    page.move_mouse(box[0] + box[2] * 0.999, box[1] + box[3] * 0.5)
    shown = page.evaluate("document.querySelector('.tip:not([hidden])')?.innerText") or ""
    assert shown.startswith("step 300")
    values = dict(line.rsplit(" ", 1) for line in shown.splitlines())
    assert float(values["training, running mean"]) == pytest.approx(1.40, abs=0.1)
    assert float(values["validation"]) == pytest.approx(1.47, abs=0.02)
    page.move_mouse(1, 1)
    assert page.evaluate("document.querySelectorAll('.tip:not([hidden])').length") == 0
    assert page.messages == []


def test_dark_mode_is_dark_and_a_phone_needs_no_sideways_scrolling(page: Page, tmp_path: Path) -> None:
    page.open(write_report(troubled(tmp_path / "run")))
    page.prefer_colors("dark")
    corner = Image.open(io.BytesIO(page.picture())).convert("L").getpixel((3, 3))
    assert isinstance(corner, int)
    assert corner < 60
    page.resize(390, 800)
    assert page.evaluate("document.documentElement.scrollWidth <= 390")


HOSTILE = '"><script>document.title="ran"</script><img src=x onerror=\'document.title="ran"\'>\'"&lt;</style>`'


def hostile(value: object) -> object:
    """The same with a script in every text."""
    if isinstance(value, dict):
        return {key: each if key == "kind" else hostile(each) for key, each in value.items()}
    if isinstance(value, list):
        return [hostile(each) for each in value]
    return f"{value}{HOSTILE}" if isinstance(value, str) else value


def test_no_text_of_a_run_becomes_script_or_markup(page: Page, tmp_path: Path) -> None:
    runs = [Run(troubled(tmp_path / name)) for name in ("a", "b")]
    for run in runs:
        lines = [json.dumps(hostile(json.loads(line))) for line in run.events.read_text().splitlines()]
        run.events.write_text("\n".join(lines) + "\n")
        for path in (run.plan, run.cluster, run.environment, run.result):
            if path.exists():
                path.write_text(json.dumps(hostile(json.loads(path.read_text()))))
        resolved = json.loads(run.resolved.read_text())
        run.resolved.write_text(json.dumps({**resolved, "name": f"x{HOSTILE}"}))
    compared = tmp_path / "compare.html"
    compared.write_text(render_comparison_html(compare_runs(runs)))
    for path in (write_report(runs[0].path), compared):
        page.open(path)
        assert "script" in page.evaluate("document.body.innerText")
        assert page.evaluate("document.querySelectorAll('script:not([type])').length") == 1
        assert page.evaluate("document.querySelectorAll('main img').length") == 0
        assert page.evaluate("document.title") != "ran"
        assert [request for request in page.requests if not request.startswith(("file:", "data:"))] == []


def test_the_page_itself_forbids_any_other_script(page: Page, tmp_path: Path) -> None:
    path = write_report(healthy(tmp_path / "run"))
    path.write_text(path.read_text().replace("</main>", "<script>document.title='ran'</script></main>"))
    page.open(path)
    assert page.evaluate("document.title") != "ran"
