"""Redfish against sushy-tools: its emulator, which has legacy resources only, and a tree of modern ones over TLS."""

import json
import shutil
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cdu_mockup import CDU, make_cdu
from phalanx.telemetry.sample import HostSample, SourceUnavailableError
from phalanx_fleet.telemetry.redfish import RedfishOptions, open_redfish
from phalanx_fleet.telemetry.redfish_cdu import RedfishCduOptions, open_redfish_cdu
from server_processes import find_free_port, find_program, make_certificate, run_server

bcrypt = pytest.importorskip("bcrypt", reason="sushy-tools is not installed: pip install 'phalanx[dev]'")
EMULATOR, STATIC = find_program("sushy-emulator"), find_program("sushy-static")
LACKING = [name for name in ("sushy-emulator", "sushy-static", "openssl") if find_program(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"NOTHING IS TESTED ON A REAL REDFISH SERVICE: there is no {LACKING}"),
    pytest.mark.filterwarnings("default"),  # of what it is read by
]

CHASSIS = "/redfish/v1/Chassis/Node"
RESOURCES = {
    "/redfish/v1/": {
        "Id": "RootService",
        "RedfishVersion": "1.18.0",
        "Chassis": {"@odata.id": "/redfish/v1/Chassis"},
    },
    "/redfish/v1/Chassis": {"Members": [{"@odata.id": CHASSIS}]},
    CHASSIS: {
        "Id": "Node",
        "ThermalSubsystem": {"@odata.id": f"{CHASSIS}/ThermalSubsystem"},
        "EnvironmentMetrics": {"@odata.id": f"{CHASSIS}/EnvironmentMetrics"},
    },
    f"{CHASSIS}/EnvironmentMetrics": {
        "PowerWatts": {"Reading": 4374.5},
        "FanSpeedsPercent": [{"Reading": 61.0}, {"Reading": 0.0}],
    },
    f"{CHASSIS}/ThermalSubsystem": {"ThermalMetrics": {"@odata.id": f"{CHASSIS}/ThermalSubsystem/ThermalMetrics"}},
    f"{CHASSIS}/ThermalSubsystem/ThermalMetrics": {
        "TemperatureSummaryCelsius": {"Intake": {"Reading": 27.25}},
        "TemperatureReadingsCelsius": [{"PhysicalContext": "CPU", "Reading": 66.0}],
    },
}
SERVED = HostSample(node_power_w=4374.5, inlet_temperature_c=27.25, cpu_temperature_c=66.0, failed_fans=1.0)


def write_tree(folder: Path, resources: dict[str, dict[str, Any]]) -> None:
    for path, resource in resources.items():
        file = folder / path.removeprefix("/redfish/v1/") / "index.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"@odata.id": path, "Name": "test", **resource})
        file.with_suffix(".new").write_text(text)
        file.with_suffix(".new").replace(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("redfish")


@pytest.fixture(scope="module")
def certificate(folder: Path) -> tuple[Path, Path]:
    return make_certificate(folder)


@pytest.fixture(scope="module")
def emulator(folder: Path, certificate: tuple[Path, Path]) -> Iterator[str]:
    """The address of an emulator that wants a password."""
    port, users, config = find_free_port(), folder / "users", folder / "emulator.conf"
    users.write_text(f"root:{bcrypt.hashpw(b'swordfish', bcrypt.gensalt(4)).decode()}\n")
    config.write_text(f"SUSHY_EMULATOR_AUTH_FILE = {str(users)!r}\n")
    words = [str(EMULATOR), "--fake", "--interface", "127.0.0.1", "--port", str(port), "--config", str(config)]
    words += ["--ssl-certificate", str(certificate[0]), "--ssl-key", str(certificate[1])]
    with run_server(words, port, folder / "emulator.log"):
        yield f"https://127.0.0.1:{port}"


@pytest.fixture
def tree(tmp_path: Path, certificate: tuple[Path, Path]) -> Iterator[tuple[str, Path]]:
    """The address of a service, and the folder with what it serves."""
    port, tree = find_free_port(), tmp_path / "tree"
    write_tree(tree, RESOURCES)
    words = [str(STATIC), "-i", "127.0.0.1", "-p", str(port), "-m", str(tree)]
    with run_server([*words, "-c", str(certificate[0]), "-k", str(certificate[1])], port, tmp_path / "static.log"):
        yield f"https://127.0.0.1:{port}", tree


def credentials(password: str = "swordfish") -> dict[str, str]:
    return {"PHALANX_REDFISH_USER": "root", "PHALANX_REDFISH_PASSWORD": password}


def test_the_legacy_resources_of_the_emulator_are_read(emulator: str, certificate: tuple[Path, Path]) -> None:
    source = open_redfish(RedfishOptions(url=emulator, ca_file=certificate[0]), credentials())
    try:
        reading = source.read()
        assert reading.host == HostSample(inlet_temperature_c=25.0, cpu_temperature_c=41.0, failed_fans=0.0)
        assert 0 < reading.host_age_s < 30
        assert source.problems == [f"{emulator}: serves no node power"]
    finally:
        source.close()


@pytest.mark.parametrize(
    ("environment", "text"),
    [(credentials("wrong"), "refuses the user or the password"), ({}, "wants PHALANX_REDFISH_USER and")],
)
def test_wrong_or_no_credentials_are_said(
    emulator: str,
    certificate: tuple[Path, Path],
    environment: dict[str, str],
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    with pytest.raises(SourceUnavailableError, match=text):
        open_redfish(RedfishOptions(url=emulator, ca_file=certificate[0]), environment)
    assert "wrong" not in caplog.text


def test_a_certificate_that_is_not_trusted_is_refused(emulator: str) -> None:
    with pytest.raises(SourceUnavailableError, match="certificate is not trusted; set ca_file"):
        open_redfish(RedfishOptions(url=emulator), credentials())
    open_redfish(RedfishOptions(url=emulator, verify_tls=False), credentials()).close()


def test_the_modern_resources_of_a_tree_are_read_and_read_again(
    tree: tuple[str, Path], certificate: tuple[Path, Path], wait_until: Callable[[Callable[[], bool]], None]
) -> None:
    url, folder = tree
    source = open_redfish(RedfishOptions(url=url, ca_file=certificate[0], interval_s=0.3), {})
    try:
        assert (source.read().host, source.problems) == (SERVED, [])
        write_tree(folder, {f"{CHASSIS}/EnvironmentMetrics": {"PowerWatts": {"Reading": None}}})
        wait_until(lambda: source.read().host == HostSample(inlet_temperature_c=27.25, cpu_temperature_c=66.0))
        shutil.rmtree(folder)
        wait_until(lambda: source.read().host == HostSample())
        write_tree(folder, RESOURCES)
        wait_until(lambda: source.read().host == SERVED)
    finally:
        source.close()


class SessionController(ThreadingHTTPServer):
    """A controller that wants sessions: sushy-tools has none."""

    def __init__(self, certificate: tuple[Path, Path]):
        super().__init__(("127.0.0.1", 0), SessionHandler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.logins: list[dict[str, str]] = []
        self.tokens: set[str] = set()
        self.password = "swordfish"


class SessionHandler(BaseHTTPRequestHandler):
    server: SessionController

    def do_GET(self) -> None:
        root = {**RESOURCES["/redfish/v1/"], "SessionService": {"@odata.id": "/redfish/v1/SessionService"}}
        service = {"Id": "SessionService", "Sessions": {"@odata.id": "/redfish/v1/SessionService/Sessions"}}
        resources = {**RESOURCES, "/redfish/v1/": root, "/redfish/v1/SessionService": service}
        is_open = self.path == "/redfish/v1/" or self.headers.get("X-Auth-Token") in self.server.tokens
        self._answer(200, {"Name": "test", **resources[self.path]}) if is_open else self._answer(401, {"error": {}})

    def do_POST(self) -> None:
        login = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.logins.append(login)
        if login != {"UserName": "root", "Password": self.server.password}:
            self._answer(401, {"error": {}})
            return
        token = f"token-{len(self.server.logins)}"
        self.server.tokens.add(token)
        location = f"/redfish/v1/SessionService/Sessions/{token}"
        self._answer(201, {"Id": token}, {"X-Auth-Token": token, "Location": location})

    def do_DELETE(self) -> None:
        self.server.tokens.discard(self.path.rsplit("/", 1)[-1])
        self._answer(204, {})

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _answer(self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode() if status != 204 else b""
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def controller(certificate: tuple[Path, Path]) -> Iterator[SessionController]:
    with SessionController(certificate) as controller:
        thread = threading.Thread(target=controller.serve_forever)
        thread.start()
        yield controller
        controller.shutdown()
        thread.join()


def test_a_session_is_used_renewed_and_ended(
    controller: SessionController,
    certificate: tuple[Path, Path],
    wait_until: Callable[[Callable[[], bool]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    url = f"https://127.0.0.1:{controller.server_port}"
    source = open_redfish(RedfishOptions(url=url, ca_file=certificate[0], interval_s=0.2), credentials())
    assert (source.read().host, len(controller.logins)) == (SERVED, 1)
    controller.tokens.clear()  # it has expired
    wait_until(lambda: len(controller.logins) == 2)
    wait_until(lambda: source.read().host == SERVED)
    source.close()
    assert not controller.tokens
    assert "swordfish" not in caplog.text
    assert "token-1" not in caplog.text


def test_a_service_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(SourceUnavailableError, match="connection refused"):
        open_redfish(RedfishOptions(url=f"https://127.0.0.1:{find_free_port()}"), {})


def test_a_cdu_is_read_and_a_leak_is_seen(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    port, folder = find_free_port(), tmp_path / "cdu"
    write_tree(folder, make_cdu())
    words = [str(STATIC), "-i", "127.0.0.1", "-p", str(port), "-m", str(folder)]
    url = f"https://127.0.0.1:{port}"
    with run_server([*words, "-c", str(certificate[0]), "-k", str(certificate[1])], port, tmp_path / "static.log"):
        source = open_redfish_cdu("cdu-1", RedfishCduOptions(url=url, ca_file=certificate[0], interval_s=2.0), {})
        try:
            sample = source.read().racks[0]
            assert (sample.supply_temperature_c, sample.flow_l_per_min, sample.has_leak) == (32.5, 180.0, False)
            detector = f"{CDU}/LeakDetection/LeakDetectors/Floor"
            write_tree(folder, {detector: {"DetectorState": "Critical"}})
            deadline = time.monotonic() + 30
            while source.read().racks[0].has_leak is not True:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            source.close()
