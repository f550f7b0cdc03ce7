"""Load targets from a bus and from a VTN: what is accepted, what wins, what holds while a source is silent."""

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from made_targets import TOPIC, make_ec_key, make_message, make_target, write_public_key
from phalanx.errors import UsageError
from phalanx.fleet.power.breaches import BreachTracker
from phalanx.fleet.power.flex_bus import OutgoingMessage
from phalanx.fleet.power.flex_messages import FlexMessageError, parse_load_targets
from phalanx.fleet.power.flex_reports import FeedReport, FlexReporter
from phalanx.fleet.power.flex_source import FlexSource, drop_replaced_targets, open_flex_source
from phalanx.fleet.power.load_targets import LiveTargets, LoadTarget, TargetsFileSource, find_active_budgets
from phalanx.fleet.power.openadr_source import OpenAdrSource, make_events_reader, open_openadr_source
from phalanx.fleet.power.signed_data import SignatureError, load_public_keys, verify_jws
from phalanx.fleet.power_tree import BudgetLevel, NodePower, PoweredNode, PowerTree
from phalanx.fleet.target_settings import FlexSettings, OpenAdrSettings
from phalanx.fleet.telemetry.credentials import Credentials
from phalanx.fleet.telemetry.mqtt import OnMessage

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'phalanx[fleet]'")
TEN = 1_795_860_000.0  # 2026-11-28T10:00:00Z
POWER = NodePower(2, 700.0, 70.0, 500.0, 250.0, 200.0)
TREE = PowerTree(
    (
        BudgetLevel("site", "s", 9000.0),
        BudgetLevel("feed", "main-a", 6000.0, 0),
        BudgetLevel("feed", "main-b", None, 0),
        BudgetLevel("rack", "k", None, 1),
    ),
    tuple(PoweredNode(f"n{i}", "h", POWER, 3) for i in range(3)),
)


def budgets_at(targets: Sequence[LoadTarget], seconds: float) -> dict[str, float | None]:
    found = find_active_budgets(TREE, targets, TEN + seconds)
    return dict(zip(("site", "a", "b", "rack"), found, strict=True))


def test_a_target_without_feeds_is_for_each_feed_and_holds_until_it_is_replaced() -> None:
    targets = parse_load_targets(make_message(make_target(4.0)), TREE, None, TEN).targets
    assert budgets_at(targets, -3600) == {"site": 9000.0, "a": 4000.0, "b": 4000.0, "rack": None}  # a clock set back
    assert budgets_at(targets, 1e9) == {"site": 9000.0, "a": 4000.0, "b": 4000.0, "rack": None}


def test_a_target_never_raises_a_budget() -> None:
    targets = parse_load_targets(make_message(make_target(7.0, feed_tags=["main-a"])), TREE, None, TEN).targets
    assert budgets_at(targets, 0)["a"] == 6000.0


def test_the_latest_target_wins_while_it_holds_and_null_is_the_default() -> None:
    hour = {"start_time": "2026-11-28T10:00:00Z", "end_time": "2026-11-28T11:00:00Z"}
    message = make_message(
        make_target(4.0, feed_tags=["main-a"]),
        make_target(5.0, feed_tags=["main-a"], interval=hour),
        make_target(None, feed_tags=["main-a"], interval={"start_time": "2026-11-28T12:00:00Z"}),
    )
    targets = parse_load_targets(message, TREE, None, TEN).targets
    assert [budgets_at(targets, s)["a"] for s in (0, 3600, 7200)] == [5000.0, 4000.0, 6000.0]


def test_best_effort_never_pauses_jobs() -> None:
    message = make_message(make_target(4.0, strategy={"best_effort": True}), make_target(4.0))
    targets = parse_load_targets(message, TREE, None, TEN).targets
    assert [each.strategy for each in targets] == ["caps", "caps", "pause", "pause"]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"\xff", "no JSON"),
        (make_message(make_target(4.0), type="grid.powerstate.status.v1"), "expected grid.loadtarget.set.v1"),
        (make_message(make_target(4.0), specversion="0.3"), "specversion"),
        (make_message(), "targets"),
        (make_message(make_target(-1.0)), "load_constraint.value"),
        (make_message({"interval": {}}), "load_constraint"),
        (make_message(make_target(1.0, load_constraint={"value": 1, "unit": "horsepower"})), "unit"),
        (make_message(make_target(1.0, interval={"start_time": "2026-11-28T10:00:00"})), "start_time"),
        (make_message(make_target(1.0, interval={"end_time": "2026-11-28T09:00:00Z"})), "ends before it starts"),
        (make_message(make_target(4.0), make_target(1.0, feed_tags=["main-c"])), "main-c: no such feed"),
        (make_message(make_target(4.0), data="a.b.c"), "no key to verify"),
    ],
)
def test_a_wrong_message_is_refused_as_a_whole(message: bytes, problem: str) -> None:
    with pytest.raises(FlexMessageError, match=problem):
        parse_load_targets(message, TREE, None, TEN)


def test_signed_data_are_accepted_from_known_keys_only(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import rsa

    keys = [make_ec_key(), rsa.generate_private_key(65537, 2048)]
    known = load_public_keys(write_public_key(tmp_path / "keys.pem", *keys))
    for key in keys:
        assert parse_load_targets(make_message(make_target(4.0), key=key), TREE, known, TEN).targets[0].limit_w == 4000
    for message in (make_message(make_target(4.0), key=make_ec_key()), make_message(make_target(4.0))):
        with pytest.raises(FlexMessageError, match="not accepted"):
            parse_load_targets(message, TREE, known, TEN)


def test_a_changed_payload_or_algorithm_has_no_signature(tmp_path: Path) -> None:
    key = make_ec_key()
    known = load_public_keys(write_public_key(tmp_path / "keys.pem", key))
    signed = json.loads(make_message(make_target(4.0), key=key))["data"]
    header, payload, signature = signed.split(".")
    none = "eyJhbGciOiJub25lIn0"  # {"alg":"none"}
    for text in (f"{header}.{payload[:-2]}AA.{signature}", f"{none}.{payload}.", f"{none}.{payload}.{signature}", "a"):
        with pytest.raises(SignatureError):
            verify_jws(text, known)
    assert json.loads(verify_jws(signed, known)) == {"targets": [make_target(4.0)]}


@dataclass
class FakeBus:
    """A bus that keeps what is published."""

    is_connected: bool = True
    published: list[OutgoingMessage] = field(default_factory=list)
    topic_filters: Sequence[str] = ()

    def start(self, topic_filters: Sequence[str], on_message: OnMessage) -> None:
        self.topic_filters = topic_filters

    def queue_message(self, message: OutgoingMessage) -> None:
        self.published.append(message)

    def stop(self) -> None:
        self.is_connected = False


def open_source(folder: Path, bus: FakeBus | None = None, now: float = TEN) -> FlexSource:
    settings = FlexSettings(url="mqtts://bus.example.com", agent="site-a")
    return FlexSource(settings, TREE, bus or FakeBus(), folder / "targets.json", None, lambda: now)


def test_a_guard_that_restarts_holds_what_it_has_received(tmp_path: Path) -> None:
    source = open_source(tmp_path)
    source.receive(TOPIC, make_message(make_target(4.0, interval={"end_time": "2026-11-28T11:00:00Z"})))
    again = open_source(tmp_path)
    assert again.read_targets() == source.read_targets() != []
    assert open_source(tmp_path, now=TEN + 3600).read_targets() == []


def test_a_bus_that_is_lost_is_reported_once_and_changes_nothing(tmp_path: Path) -> None:
    bus = FakeBus()
    source = open_source(tmp_path, bus)
    source.receive(TOPIC, make_message(make_target(4.0)))
    bus.is_connected = False
    assert source.list_problems() == ["mqtts://bus.example.com: does not answer; its targets hold until they end"]
    assert source.list_problems() == []
    assert len(source.read_targets()) == 2
    bus.is_connected = True
    assert source.list_problems() == ["mqtts://bus.example.com: is back"]


def test_a_message_of_another_sender_or_a_copy_is_not_taken(tmp_path: Path) -> None:
    source = open_source(tmp_path)
    source.receive(TOPIC, make_message(make_target(4.0), source="//grid/v1/isv/other"))
    assert (source.read_targets(), len(source.list_problems())) == ([], 1)
    message, other = make_message(make_target(4.0)), make_message(make_target(5.0))
    for each in (message, other, message):
        source.receive(TOPIC, each)
    assert budgets_at(source.read_targets(), 1)["a"] == 5000.0


def test_targets_that_are_replaced_for_good_are_forgotten() -> None:
    targets = [LoadTarget("feed main-a", w, TEN + s) for w, s in ((1.0, -9), (None, -5), (2.0, -1), (3.0, 60))]
    assert [each.limit_w for each in drop_replaced_targets(targets, TEN)] == [2.0, 3.0]


def test_keys_that_cannot_be_read_are_named_with_their_key(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^power.flex.key_file: .*none.pem: cannot be read: No such file"):
        load_public_keys(tmp_path / "none.pem")
    (tmp_path / "bad.pem").write_text("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
    with pytest.raises(UsageError, match=r"bad.pem: no public key in PEM: "):
        load_public_keys(tmp_path / "bad.pem")


def test_a_damaged_record_stops_the_guard(tmp_path: Path) -> None:
    (tmp_path / "targets.json").write_text('{"targets": [{"level": 1}]}')
    with pytest.raises(UsageError, match="cannot be read"):
        open_source(tmp_path)


def test_targets_without_tls_and_signature_are_refused(tmp_path: Path) -> None:
    settings = FlexSettings(url="mqtt://bus.example.com", agent="a")
    with pytest.raises(UsageError, match="anyone on the network"):
        open_flex_source(settings, TREE, tmp_path / "r.json", {})


def test_a_breach_has_one_id_from_active_to_resolved() -> None:
    tracker, target = BreachTracker(), {"feed main-a": LoadTarget("feed main-a", 4000.0, TEN)}
    found = []
    for seconds in range(0, 100, 2):
        watts = 4500.0 if seconds < 90 else 3900.0
        found += tracker.update(target, {"feed main-a": watts}, TEN + seconds)
    assert [(each.status, each.is_critical) for each in found] == [
        ("active", False),
        ("escalated", False),
        ("resolved", False),
    ]
    assert [each.detected_s for each in found] == [TEN + 10] * 3
    assert len({each.id for each in found}) == 1
    assert found[-1].resolved_s == TEN + 90


def test_a_guard_reports_ramps_breaches_and_enforcement() -> None:
    bus = FakeBus()
    reporter = FlexReporter("site-a", TREE, bus.queue_message, 0.02)
    target = LoadTarget("feed main-a", 4000.0, TEN, id="11111111-1111-4111-8111-111111111111")
    levels = {"site s": 6000.0, "feed main-a": 6000.0}
    reporter.report([], FeedReport(levels, levels, False), TEN - 2)
    reporter.report([target], FeedReport(levels, levels, True), TEN)
    reporter.report([target], FeedReport({"feed main-a": 3990.0}, levels, False, ["n1"]), TEN + 12)
    reporter.report([target], FeedReport({"feed main-a": 3990.0}, {"feed main-a": 3900.0}, False), TEN + 14)
    events = [json.loads(message.payload) for message in bus.published]
    feeds = [event["data"]["feeds"]["main-a"] for event in events if event["type"].endswith("status.v1")]
    assert [(feed["event"], feed["compliant"]) for feed in feeds] == [
        ("periodic", True),
        ("start_ramp_down", False),
        ("end_ramp_down", True),
    ]
    assert feeds[1]["targets"][0]["correlation_id"] == target.id
    rest = [event for event in events if not event["type"].endswith("status.v1")]
    assert [(event["type"], event["data"].get("status")) for event in rest] == [
        ("grid.powerbreach.alert.v1", "active"),
        ("grid.powerbreach.enforcement.v1", None),
        ("grid.powerbreach.alert.v1", "resolved"),
        ("grid.powerbreach.enforcement.v1", None),
    ]
    assert [hint["resource_id"] for hint in rest[0]["data"]["shed_hints"]] == ["n0", "n2"]
    assert rest[1]["data"]["results"][0]["resource_id"] == "n1"
    assert len({event["data"].get("breach_id") or event["data"]["breach"]["breach_id"] for event in rest}) == 1
    assert {message.qos for message in bus.published} == {1, 2}


EVENT: dict[str, Any] = {
    "id": "1",
    "objectType": "EVENT",
    "programID": "p",
    "eventName": "peak",
    "intervalPeriod": {"start": "2026-11-28T10:00:00Z", "duration": "PT1H"},
    "intervals": [
        {"id": 0, "payloads": [{"type": "IMPORT_CAPACITY_LIMIT", "values": [5.0]}]},
        {"id": 1, "payloads": [{"type": "IMPORT_CAPACITY_LIMIT", "values": [4.0]}]},
    ],
}
SIMPLE = {"id": 0, "payloads": [{"type": "SIMPLE", "values": [2]}]}


class FakeVtn(ThreadingHTTPServer):
    """A VTN with events of a program, which asks for a token."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), VtnHandler)
        self.events: list[Any] = [EVENT]
        self.status = 200
        self.tokens = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class VtnHandler(BaseHTTPRequestHandler):
    server: FakeVtn

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if self.path.startswith("/auth/server"):
            self._answer(200, {"tokenURL": f"{self.server.url}/auth/token"})
        elif self.headers.get("Authorization") != f"Bearer token-{self.server.tokens}":
            self._answer(401, {"title": "no token"})
        else:
            first, count = int(query["skip"][0]), int(query["limit"][0])
            assert query["programID"] == ["p"]
            self._answer(self.server.status, self.server.events[first : first + count])

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens += 1
        self._answer(200, {"access_token": f"token-{self.server.tokens}"})

    def _answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        """Print nothing."""


@pytest.fixture
def vtn() -> Iterator[FakeVtn]:
    pytest.importorskip("openadr3", reason="openadr3 is not installed: pip install 'phalanx[openadr]'")
    server = FakeVtn()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def open_vtn(vtn: FakeVtn, folder: Path, **changes: Any) -> OpenAdrSource:
    options = {"url": vtn.url, "program": "p", "level": "feed main-a", "simple_limits": ["5 kW", "3 kW"], **changes}
    settings = OpenAdrSettings.model_validate(options)
    reader = make_events_reader(settings, Credentials("ven", "secret"))
    return OpenAdrSource(settings, reader, folder / "openadr.json", lambda: TEN, polls=False)


def test_intervals_of_an_event_are_targets_one_after_the_other(vtn: FakeVtn, tmp_path: Path) -> None:
    source = open_vtn(vtn, tmp_path)
    source.poll()
    targets = source.read_targets()
    assert [budgets_at(targets, s)["a"] for s in (-1, 0, 3600, 7200)] == [6000.0, 5000.0, 4000.0, 6000.0]
    assert source.list_problems() == []


def test_an_event_of_a_higher_priority_wins_and_more_than_a_page_is_read(vtn: FakeVtn, tmp_path: Path) -> None:
    vtn.events = [{**EVENT, "priority": 1, "intervals": [SIMPLE]}, *[{**EVENT, "priority": 5}] * 60]
    source = open_vtn(vtn, tmp_path)
    source.poll()
    assert len(source.read_targets()) == 121
    assert budgets_at(source.read_targets(), 0)["a"] == 3000.0


def test_an_event_without_an_end_holds_and_its_unit_counts(vtn: FakeVtn, tmp_path: Path) -> None:
    descriptor = {"objectType": "EVENT_PAYLOAD_DESCRIPTOR", "payloadType": "IMPORT_CAPACITY_LIMIT", "units": "W"}
    interval = {"id": 0, "payloads": [{"type": "IMPORT_CAPACITY_LIMIT", "values": [4321.0]}]}
    period = {"start": "2026-11-28T10:00:00Z", "duration": "P9999Y"}
    vtn.events = [{**EVENT, "payloadDescriptors": [descriptor], "intervals": [interval], "intervalPeriod": period}]
    source = open_vtn(vtn, tmp_path)
    source.poll()
    assert budgets_at(source.read_targets(), 1e9)["a"] == 4321.0


def test_a_silent_vtn_keeps_its_events_also_over_a_restart(vtn: FakeVtn, tmp_path: Path) -> None:
    source = open_vtn(vtn, tmp_path)
    source.poll()
    vtn.status = 503
    source.poll()
    source.poll()
    assert source.list_problems() == [f"{vtn.url}: answers 503 to /events; its events hold until they end"]
    assert budgets_at(source.read_targets(), 0)["a"] == 5000.0
    again = open_vtn(vtn, tmp_path)
    again.poll()
    assert budgets_at(again.read_targets(), 0)["a"] == 5000.0


def test_a_token_that_has_ended_is_replaced(vtn: FakeVtn, tmp_path: Path) -> None:
    source = open_vtn(vtn, tmp_path)
    source.poll()
    vtn.tokens = 7  # the old one is refused
    source.poll()
    source.poll()
    assert (vtn.tokens, len(source.read_targets())) == (8, 2)


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        ({"programID": 3}, "not as OpenADR 3 has it"),
        ({**EVENT, "intervals": [{"id": 0, "payloads": [{"type": "PRICE", "values": [1]}]}]}, "payload PRICE"),
        ({**EVENT, "intervals": [{**SIMPLE, "payloads": [{"type": "SIMPLE", "values": [3]}]}]}, "SIMPLE level 3"),
        ({**EVENT, "intervalPeriod": None}, "it has no start"),
    ],
)
def test_a_wrong_event_is_named_and_the_others_hold(vtn: FakeVtn, tmp_path: Path, event: Any, problem: str) -> None:
    vtn.events = [event, EVENT]
    source = open_vtn(vtn, tmp_path)
    source.poll()
    assert problem in " ".join(source.list_problems())
    assert budgets_at(source.read_targets(), 0)["a"] == 5000.0


def test_a_vtn_for_a_level_that_is_not_there_is_refused(tmp_path: Path) -> None:
    settings = OpenAdrSettings(url="https://vtn.example.com", program="p", level="feed x")
    with pytest.raises(UsageError, match="feed x: no such level"):
        open_openadr_source(settings, TREE, tmp_path / "r.json", {})


def test_targets_of_a_later_source_win(tmp_path: Path) -> None:
    source = open_source(tmp_path)
    (tmp_path / "targets.yaml").write_text(
        "targets: [{level: feed main-a, limit: 3 kW, start: '2026-11-28T10:00:00Z'}]"
    )
    live = LiveTargets([TargetsFileSource(tmp_path / "targets.yaml", TREE), source])
    assert budgets_at(live, 1)["a"] == 3000.0
    source.receive(TOPIC, make_message(make_target(4.0)))
    assert (len(live), budgets_at(live, 1)["a"]) == (3, 4000.0)


def test_a_file_of_targets_is_read_again_and_those_of_before_hold_while_it_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "targets.yaml"

    def write(limit: str) -> None:
        (tmp_path / "new").write_text(
            f"targets: [{{level: feed main-a, limit: {limit}, start: '2026-11-28T10:00:00Z'}}]"
        )
        (tmp_path / "new").replace(file)

    write("3 kW")
    live = LiveTargets([TargetsFileSource(file, TREE)])
    assert budgets_at(live, 1)["a"] == 3000.0
    write("4 kW")
    assert budgets_at(live, 1)["a"] == 4000.0
    assert live.list_problems() == []
    write("4 kWh")
    assert (budgets_at(live, 1)["a"], budgets_at(live, 2)["a"]) == (4000.0, 4000.0)
    (problem,) = live.list_problems()
    assert 'targets.0.limit: found "4 kWh", expected a power' in problem
    assert problem.endswith("; the load targets of before hold")
    file.unlink()
    assert budgets_at(live, 1)["a"] == 4000.0
    assert ["there is no such file" in text for text in live.list_problems()] == [True]
    write("5 kW")
    assert budgets_at(live, 1)["a"] == 5000.0
    assert live.list_problems() == []
