"""What a browser may do to nodes, and that their pages are as protected as all others."""

from pathlib import Path

import pytest

from fleet_browser import FleetBrowser
from phalanx.jobs.backends.base import NodeService
from phalanx.serve.access import SECURITY_HEADERS, make_access
from phalanx_fleet.fleet_file import open_node_states

TOKEN = "0123456789abcdef"


def test_a_node_is_drained_and_taken_back_with_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_STATE_DIR", str(tmp_path / "state"))
    browser = FleetBrowser(tmp_path, make_access("127.0.0.1", True, TOKEN), monkeypatch)
    backend, cookie = browser.node_backend, f"phalanx-token-8420={TOKEN}"
    assert browser.post("/nodes/drain", "node=n2&reason=loud").status == 403
    assert backend.nodes["n2"].service is NodeService.OPEN
    assert browser.post("/nodes/drain", "node=n2&reason=loud", cookie=cookie).text == "n2 is drained."
    assert backend.nodes["n2"].service is NodeService.DRAINED
    assert browser.post("/nodes/drain", "node=nowhere&reason=loud", cookie=cookie).status == 409
    assert browser.post("/nodes/undrain", "node=n2&reason=", cookie=cookie).status == 409
    assert browser.post("/nodes/undrain", "node=n2&reason=fixed", cookie=cookie).text == "n2 is taken back."
    with open_node_states() as states:
        assert [change.reason for change in states.history("n2")] == ["loud", "fixed"]
        assert states.history("n2")[0].actor.endswith("(page)")


def test_pages_of_nodes_have_the_security_headers_and_demand_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = FleetBrowser(tmp_path, make_access("127.0.0.1", False, None, demands_token=False), monkeypatch)
    closed = FleetBrowser(tmp_path, make_access("127.0.0.1", False, TOKEN), monkeypatch)
    for path in ("/nodes", "/nodes/n1", "/power", "/cooling"):
        headers = browser.get(path).headers
        assert {name: headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS, path
        assert closed.get(path).status == 403
