"""Who may see a page, and who may act: asked of the application as a browser would."""

import os
import re
import shutil
from html import unescape
from pathlib import Path
from urllib.parse import urljoin

import pytest

from make_run import healthy
from phalanx.errors import UsageError
from phalanx.serve.access import SECURITY_HEADERS, make_access
from phalanx.serve.run_index import run_id
from phalanx.std_streams import escape_control_chars
from serve_browser import Browser

TOKEN = "0123456789abcdef"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    healthy(tmp_path / "runs" / "one")
    return tmp_path / "runs"


def test_pages_of_this_machine_need_no_token(folder: Path) -> None:
    answer = Browser(folder, make_access("127.0.0.1", False, None, demands_token=False)).get("/")
    assert answer.status == 200
    assert "runs/one" in answer.text


def test_another_user_of_this_machine_needs_the_token_unless_the_server_shows_its_pages_to_all(folder: Path) -> None:
    browser = Browser(folder, make_access("127.0.0.1", False, None))
    run = f"/run/{run_id(folder / 'one')}"
    paths = ("/", "/metrics", "/static/phalanx.js", run, f"{run}/stream", f"{run}/logs")
    assert [browser.get(path).status for path in paths] == [403] * len(paths)
    with pytest.raises(UsageError, match="--no-token: other machines reach"):
        make_access("0.0.0.0", False, None, demands_token=False)


@pytest.mark.parametrize("path", ["/", "/jobs", "/run/ID", "/run/ID/logs?log=x", "/compare", "/nothing"])
def test_every_link_of_a_page_leads_below_the_path_of_a_proxy(folder: Path, path: str) -> None:
    """Jupyter, Open OnDemand and nginx serve the page below a path of theirs that the server does not know."""
    browser = Browser(folder, make_access("127.0.0.1", True, TOKEN))
    path, prefix = path.replace("ID", run_id(folder / "one")), "https://site/node/n1/8420"
    text = browser.get(path, cookie=f"phalanx-token-8420={TOKEN}").text
    base = urljoin(prefix + path, re.findall('<base href="(.*?)">', text)[0])
    assert base == f"{prefix}/"
    links = re.findall('(?<!<base )(?:href|src|action|data-action|data-events)="(.*?)"', text)
    found = {urljoin(base, unescape(link)) for link in links if not link.startswith("data:")}
    assert {f"{prefix}/", f"{prefix}/jobs", f"{prefix}{path}#content"} <= found
    assert all(each.startswith(f"{prefix}/") and ".." not in each for each in found)


def test_the_token_in_the_address_of_an_inner_page_sets_the_cookie_for_all(folder: Path) -> None:
    browser = Browser(folder, make_access("127.0.0.1", False, TOKEN))
    first = browser.get(f"/run/1/logs?q=a&token={TOKEN}").headers["location"]
    assert urljoin("https://site/x/run/1/logs", first).startswith("https://site/x/?token=")
    answer = browser.get(first.removeprefix("../.."))
    assert urljoin("https://site/x/", answer.headers["location"]) == "https://site/x/run/1/logs?q=a"
    assert "path" not in answer.headers["set-cookie"].lower()  # that of the address
    elsewhere = browser.get(f"/?token={TOKEN}&to=//evil.example").headers["location"]
    assert urljoin("https://site/x/", elsewhere).startswith("https://site/")


def test_a_proxy_may_ask_and_act_under_the_name_that_the_user_gives(folder: Path) -> None:
    refused = Browser(folder, make_access("127.0.0.1", True, TOKEN)).get("/", host="hub.example.org")
    assert (refused.status, "--proxy-name hub.example.org" in refused.text) == (400, True)
    browser = Browser(folder, make_access("127.0.0.1", True, TOKEN, proxy_names=["hub.example.org"]))
    cookie, origin = f"phalanx-token-8420={TOKEN}", "https://hub.example.org"
    assert browser.get("/", host="hub.example.org:443", cookie=cookie).status == 200
    assert browser.post("/jobs/cancel", "job=7", cookie=cookie, origin=origin).status == 200
    assert browser.post("/jobs/cancel", "job=7", cookie=cookie, origin="https://evil.example").status == 403


@pytest.mark.parametrize("name", [b"\xff\xfe", "a\u202eb\x1b".encode()])
def test_a_run_of_any_name_is_shown(folder: Path, name: bytes) -> None:
    shutil.copytree(folder / "one", folder / os.fsdecode(name))
    browser = Browser(folder, make_access("127.0.0.1", False, None, demands_token=False))
    run = f"/run/{run_id(folder / os.fsdecode(name))}"
    shown = escape_control_chars(os.fsdecode(name))
    assert shown in browser.get("/").text
    assert browser.get(run).status == 200
    assert shown in browser.get(f"{run}/logs").text
    assert browser.get("/metrics").status == 200


def test_a_run_with_a_link_out_of_it_is_not_shown(folder: Path) -> None:
    """It shows files of the server's user, or of another one, to all who see the page."""
    shutil.copytree(folder / "one", folder / "two")
    (folder / "secret").mkdir()
    (folder / "secret" / "attempt-0-rank-0.log").write_text("secret text")
    shutil.rmtree(folder / "two" / "logs", ignore_errors=True)
    (folder / "two" / "logs").symlink_to(folder / "secret")
    browser, run = Browser(folder, make_access("127.0.0.1", True, TOKEN)), f"/run/{run_id(folder / 'two')}"
    for path in (run, f"{run}/logs", f"{run}/stream"):
        answer = browser.get(path, cookie=f"phalanx-token-8420={TOKEN}")
        assert (answer.status, "secret text" in answer.text) == (422, False)


def test_every_answer_has_the_security_headers(folder: Path) -> None:
    browser = Browser(folder, make_access("127.0.0.1", False, None, demands_token=False))
    for path in ("/", "/jobs", "/nothing", "/run/0123", "/compare", "/metrics"):
        found = browser.get(path).headers
        assert {name: found[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS, path
        assert "unsafe-inline" not in found["content-security-policy"]


def test_another_address_demands_a_token(folder: Path) -> None:
    access = make_access("0.0.0.0", False, None)
    assert access.token is not None
    browser = Browser(folder, access)
    for path in ("/", "/jobs", "/static/phalanx.js", "/metrics", "/grafana.json"):
        assert browser.get(path).status == 403
    assert browser.get("/", cookie=f"phalanx-token-8420={access.token}").status == 200
    for path in ("/", "/metrics", "/grafana.json"):
        assert browser.get(path, authorization=f"Bearer {access.token}").status == 200
    assert browser.get("/", cookie="phalanx-token-8420=wrong").status == 403


def test_the_token_in_the_address_becomes_a_cookie_that_scripts_cannot_read(folder: Path) -> None:
    browser = Browser(folder, make_access("0.0.0.0", False, TOKEN))
    answer = browser.get(f"/jobs?x=1&token={TOKEN}")
    assert answer.status == 303
    assert answer.headers["location"] == "./jobs?x=1"
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=strict" in answer.headers["set-cookie"]
    assert browser.get("/?token=wrong").status == 403


def test_a_token_that_is_easily_guessed_is_refused() -> None:
    with pytest.raises(UsageError, match="expected 16 or more"):
        make_access("0.0.0.0", False, "secret")


def test_a_name_that_points_here_by_foreign_dns_is_refused(folder: Path) -> None:
    browser = Browser(folder, make_access("127.0.0.1", False, None, demands_token=False))
    assert browser.get("/", host="evil.example:8420").status == 400
    assert browser.get("/", host="localhost:8420").status == 200
    assert browser.get("/", host="[::1]:8420").status == 200


def test_nothing_can_be_done_on_a_server_that_is_read_only(folder: Path) -> None:
    browser = Browser(folder, make_access("127.0.0.1", False, TOKEN, demands_token=False))
    answer = browser.post("/jobs/cancel", "job=7", cookie=f"phalanx-token-8420={TOKEN}")
    assert (answer.status, browser.backend.cancelled) == (403, [])
    assert "--allow-actions" in answer.text


def test_a_job_is_cancelled_with_the_token_and_not_without(folder: Path) -> None:
    browser = Browser(folder, make_access("127.0.0.1", True, None, demands_token=False))
    assert browser.post("/jobs/cancel", "job=7").status == 403
    assert browser.backend.cancelled == []
    browser = Browser(folder, make_access("127.0.0.1", True, TOKEN))
    assert browser.post("/jobs/cancel", "job=7", cookie=f"phalanx-token-8420={TOKEN}").status == 200
    assert browser.backend.cancelled == ["7"]


def test_a_form_of_another_site_does_nothing(folder: Path) -> None:
    browser = Browser(folder, make_access("127.0.0.1", True, TOKEN))
    cookie = f"phalanx-token-8420={TOKEN}"
    assert browser.post("/jobs/cancel", "job=7", cookie=cookie, origin="https://evil.example").status == 403
    assert browser.backend.cancelled == []
    assert browser.post("/jobs/cancel", "job=7", cookie=cookie, origin="http://127.0.0.1:8420").status == 200


@pytest.mark.parametrize(("body", "status"), [("job=8", 409), ("x" * 20_000, 413), ("", 409)])
def test_a_request_that_cannot_be_done_changes_nothing(folder: Path, body: str, status: int) -> None:
    browser = Browser(folder, make_access("127.0.0.1", True, TOKEN))
    answer = browser.post("/jobs/cancel", body, cookie=f"phalanx-token-8420={TOKEN}")
    assert (answer.status, browser.backend.cancelled) == (status, [])


def test_a_button_to_cancel_is_shown_only_where_it_works(folder: Path) -> None:
    browser = Browser(folder, make_access("127.0.0.1", True, TOKEN))
    assert "/jobs/cancel" not in browser.get("/jobs").text
    assert 'data-action="jobs/cancel"' in browser.get("/jobs", cookie=f"phalanx-token-8420={TOKEN}").text


def test_texts_of_jobs_and_queries_are_escaped(folder: Path) -> None:
    browser = Browser(folder, make_access("127.0.0.1", False, None, demands_token=False))
    assert "<b>job</b>" not in browser.get("/jobs").text
    assert "<script>" not in browser.get("/?q=%22%3E%3Cscript%3E").text


@pytest.mark.parametrize("path", ["/run/..%2f..%2fetc", "/run/0123456789abcdef", "/run/x/logs", "/run/x/stream"])
def test_a_run_that_was_not_found_is_a_page_that_says_so(folder: Path, path: str) -> None:
    answer = Browser(folder, make_access("127.0.0.1", False, None, demands_token=False)).get(path)
    assert answer.status == 404
    assert "No run with this address" in answer.text or "no page with this address" in answer.text


def test_two_runs_are_compared_and_one_is_not(folder: Path) -> None:
    healthy(folder / "two", seed=1)
    browser = Browser(folder, make_access("127.0.0.1", False, None, demands_token=False))
    ids = [part.partition('"')[0] for part in browser.get("/").text.split('"run/')[1:]]
    assert "Recipe keys that differ" in browser.get(f"/compare?run={ids[0]}&run={ids[1]}").text
    assert browser.get(f"/compare?run={ids[0]}").status == 400
