"""The building's bus through a real broker, mosquitto: TLS, passwords, permissions, a broker that restarts."""

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_bms import FakePoint, make_metadata, make_value
from phalanx.telemetry.sample import SourceUnavailableError
from phalanx_fleet.telemetry.credentials import Credentials
from phalanx_fleet.telemetry.mqtt import AiomqttSubscriber, MqttOptions, MqttSource, open_mqtt
from phalanx_fleet.telemetry.rack_points import HEARTBEAT_PREFIX, METADATA_PREFIX, VALUE_PREFIX
from server_processes import find_free_port, find_program, make_certificate, run_server

pytest.importorskip("aiomqtt", reason="aiomqtt is not installed: pip install 'phalanx[fleet]'")
BROKER = find_program("mosquitto")
LACKING = [name for name in ("mosquitto", "mosquitto_passwd", "openssl") if find_program(name) is None]
pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"NOTHING IS TESTED ON A REAL MQTT BROKER: there is no {LACKING}")

POWER = FakePoint("RackPower", tag="site1/row3/rack05/power", rack="rack-05")
LEAK = FakePoint("RackLeakDetect", tag="site1/row3/rack05/leak", rack="rack-05")
READER = {"PHALANX_MQTT_USER": "reader", "PHALANX_MQTT_PASSWORD": "swordfish"}
PERMISSIONS = "user bms\ntopic readwrite BMS/#\nuser reader\ntopic read BMS/v1/PUB/#\n"


class Broker:
    """A broker with TLS, where `bms` may publish and `reader` may read."""

    def __init__(self, folder: Path):
        self.folder, self.port = folder, find_free_port()
        self.certificate, self.key = make_certificate(folder)
        passwords = folder / "passwords"
        passwords.touch(mode=0o600)
        for user in ("bms", "reader"):
            words = [str(find_program("mosquitto_passwd")), "-b", str(passwords), user, "swordfish"]
            subprocess.run(words, check=True, capture_output=True)
        (folder / "permissions").write_text(PERMISSIONS)
        (folder / "permissions").chmod(0o600)
        (folder / "mosquitto.conf").write_text(
            f"user root\nlistener {self.port} 127.0.0.1\ncertfile {self.certificate}\nkeyfile {self.key}\n"
            f"allow_anonymous false\npassword_file {passwords}\nacl_file {folder / 'permissions'}\n"
        )

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        with run_server([str(BROKER), "-c", str(self.folder / "mosquitto.conf")], self.port, self.folder / "log"):
            yield

    def options(self, **changes: Any) -> MqttOptions:
        return MqttOptions(**{"url": f"mqtts://127.0.0.1:{self.port}", "ca_file": self.certificate, **changes})

    def publish(self, topic: str, content: Any, is_retained: bool = False) -> None:
        from paho.mqtt.publish import single

        tls: Any = {"ca_certs": str(self.certificate)}
        auth: Any = {"username": "bms", "password": "swordfish"}
        single(topic, json.dumps(content), 1, is_retained, "127.0.0.1", self.port, auth=auth, tls=tls)

    def publish_metadata(self) -> None:
        for point in (POWER, LEAK):
            self.publish(METADATA_PREFIX + point.key, make_metadata(point), is_retained=True)


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    return Broker(tmp_path)


def open_source(broker: Broker) -> MqttSource:
    """Which connects again soon."""
    options = broker.options()
    return MqttSource(options, AiomqttSubscriber(options, Credentials("reader", "swordfish"), retry_interval_s=0.1))


def test_values_arrive_and_missing_ones_replace_them(
    broker: Broker, wait_until: Callable[[Callable[[], bool]], None]
) -> None:
    with broker.run():
        broker.publish_metadata()  # retained: before the source is there
        source = open_mqtt(broker.options(), READER)
        try:
            wait_until(lambda: [rack.id for rack in source.read().racks] == ["rack-05"])
            broker.publish(VALUE_PREFIX + POWER.key, make_value(118.25, time.time()))
            broker.publish(VALUE_PREFIX + LEAK.key, make_value(1, time.time()))
            broker.publish(HEARTBEAT_PREFIX + "bms", make_value(1000 * time.time(), time.time()))
            wait_until(lambda: source.read().racks[0].has_leak is True)
            rack = source.read().racks[0]
            assert (rack.name, rack.power_w, source.problems) == ("Pod1 rack-05", 118_250.0, [])
            assert rack.age_s is not None
            assert rack.age_s < 60
            broker.publish(VALUE_PREFIX + POWER.key, make_value(119.0, time.time(), quality=0))
            wait_until(lambda: source.read().racks[0].power_w is None)
            broker.publish(VALUE_PREFIX + POWER.key, make_value(119.0, time.time() - 301))
            broker.publish(VALUE_PREFIX + LEAK.key, make_value(None, time.time()))
            wait_until(lambda: source.read().racks[0].has_leak is None)
            assert source.read().racks[0].power_w is None
        finally:
            source.close()


def test_a_broker_that_restarts_is_found_again(
    broker: Broker, wait_until: Callable[[Callable[[], bool]], None]
) -> None:
    with broker.run():
        broker.publish_metadata()
        source = open_source(broker)
    try:
        with broker.run():  # which remembers nothing
            broker.publish_metadata()

            def has_arrived() -> bool:
                broker.publish(VALUE_PREFIX + POWER.key, make_value(7.0, time.time()))
                return any(rack.power_w == 7000.0 for rack in source.read().racks)

            wait_until(has_arrived)
    finally:
        source.close()


@pytest.mark.parametrize(
    ("changes", "environment", "text"),
    [
        ({}, {**READER, "PHALANX_MQTT_PASSWORD": "wrong"}, "refuses the user or the password"),
        ({}, {}, "refuses the user or the password"),
        ({"ca_file": None}, READER, "certificate is not trusted; set ca_file"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # paho leaves the socket open
def test_what_a_broker_refuses_is_said(
    broker: Broker, changes: dict[str, Any], environment: dict[str, str], text: str
) -> None:
    with broker.run(), pytest.raises(SourceUnavailableError, match=text):
        open_mqtt(broker.options(**changes), environment)


def test_a_broker_that_is_not_there_is_unavailable(broker: Broker) -> None:
    with pytest.raises(SourceUnavailableError, match="refused"):
        open_mqtt(broker.options(), READER)
