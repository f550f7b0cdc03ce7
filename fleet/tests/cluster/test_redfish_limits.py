"""Set the power limit of a node through real HTTP: a service that takes changes, with ETags, and sushy-static, which
ignores them."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from phalanx_fleet.power.devices import CapLimits
from phalanx_fleet.power.fake_fleet import MemoryStore
from phalanx_fleet.power.messages import NodeRequest
from phalanx_fleet.power.node_keeper import NodeKeeper
from phalanx_fleet.power.redfish_limit import open_redfish_device
from phalanx_fleet.telemetry.redfish import RedfishOptions
from server_processes import find_free_port, find_program, run_server

pytest.importorskip("sushy", reason="sushy is not installed: pip install 'phalanx[fleet]'")
pytestmark = pytest.mark.filterwarnings("default")  # of what it is read by
CHASSIS = "/redfish/v1/Chassis/Node"
METRICS = f"{CHASSIS}/EnvironmentMetrics"
STATIC = find_program("sushy-static")


def make_resources() -> dict[str, dict[str, Any]]:
    limit = {"SetPoint": None, "ControlMode": "Disabled", "AllowableMin": 2000, "AllowableMax": 10200}
    return {
        "/redfish/v1/": {"RedfishVersion": "1.18.0", "Chassis": {"@odata.id": "/redfish/v1/Chassis"}},
        "/redfish/v1/Chassis": {"Members": [{"@odata.id": CHASSIS}]},
        CHASSIS: {"Id": "Node", "EnvironmentMetrics": {"@odata.id": METRICS}},
        METRICS: {"@odata.etag": '"1"', "PowerWatts": {"Reading": 4374.5}, "PowerLimitWatts": limit},
    }


class LimitService(BaseHTTPRequestHandler):
    """Serves resources, and takes changes of them with the right ETag."""

    resources: dict[str, dict[str, Any]]

    def do_GET(self) -> None:
        found = self.resources.get(self.path) or self.resources.get(f"{self.path}/")
        self.answer(200 if found else 404, found or {})

    def do_PATCH(self) -> None:
        found = self.resources[self.path]
        values = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["If-Match"] != found["@odata.etag"]:
            self.answer(412, {})
            return
        found["@odata.etag"] = f'"{int(found["@odata.etag"].strip(chr(34))) + 1}"'
        for key, value in values.items():
            found[key].update(value)
        self.answer(200, found)

    def answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: object) -> None:
        """Keep quiet."""


@pytest.fixture
def service() -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    resources = make_resources()
    handler = type("Handler", (LimitService,), {"resources": resources})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", resources
        server.shutdown()
        thread.join()


def test_a_limit_is_set_and_read_back(service: tuple[str, dict[str, dict[str, Any]]]) -> None:
    url, resources = service
    device = open_redfish_device(RedfishOptions(url=url), environment={})
    assert (device.read_limits(), device.read_cap_w()) == (CapLimits(2000.0, 10200.0, 10200.0), 10200.0)
    for cap_w in (6000.0, 5000.0):
        device.set_cap_w(cap_w)
        assert (device.read_cap_w(), resources[METRICS]["PowerLimitWatts"]["ControlMode"]) == (cap_w, "Automatic")
    assert device.read_draw_w() == 4374.5


@pytest.mark.skipif(STATIC is None, reason="NOTHING IS TESTED ON A REAL REDFISH SERVICE: there is no sushy-static")
def test_a_service_that_ignores_changes_has_not_lowered(tmp_path: Path) -> None:
    for path, resource in make_resources().items():
        file = tmp_path / "tree" / path.removeprefix("/redfish/v1/") / "index.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"@odata.id": path, "Name": "test", **resource}))
    port = find_free_port()
    words = [str(STATIC), "-i", "127.0.0.1", "-p", str(port), "-m", str(tmp_path / "tree")]
    with run_server(words, port, tmp_path / "static.log"):
        device = open_redfish_device(RedfishOptions(url=f"http://127.0.0.1:{port}"), environment={})
        assert device.read_cap_w() == 10200.0
        keeper = NodeKeeper("n0", [device], MemoryStore())
        session = keeper.answer(NodeRequest(1, 1, "g", takes_over=True)).session
        report = keeper.answer(NodeRequest(2, 1, "g", False, session, (6000.0,), (5000.0,), 30.0))
        assert report.refusal == "a device was not lowered, so nothing is raised"
        assert report.problems == (f"{device.id}: set to 6000 W, enforces 10200 W",)
