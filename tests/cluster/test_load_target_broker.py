"""Load targets through a real broker, mosquitto: delivery while the guard is away, reports, a broker that restarts."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from made_targets import TOPIC, make_ec_key, make_message, make_target, write_public_key
from phalanx.fleet.power.flex_bus import FlexBus, OutgoingMessage
from phalanx.fleet.power.flex_source import FlexSource
from phalanx.fleet.power.signed_data import load_public_keys
from phalanx.fleet.power_tree import BudgetLevel, PowerTree
from phalanx.fleet.target_settings import FlexSettings
from phalanx.fleet.telemetry.mqtt import MqttOptions
from server_processes import find_free_port, find_program, run_server

pytest.importorskip("aiomqtt", reason="aiomqtt is not installed: pip install 'phalanx[fleet]'")
BROKER = find_program("mosquitto")
pytestmark = pytest.mark.skipif(BROKER is None, reason="NOTHING IS TESTED ON A REAL MQTT BROKER: there is no mosquitto")
TREE = PowerTree((BudgetLevel("feed", "a", 6000.0),), ())


@pytest.fixture
def port(tmp_path: Path) -> int:
    port = find_free_port()
    (tmp_path / "mosquitto.conf").write_text(
        f"user root\nlistener {port} 127.0.0.1\nallow_anonymous true\npersistence true\n"
        f"persistence_location {tmp_path}/\n"
    )
    return port


def run_broker(folder: Path, port: int) -> Any:
    return run_server([str(BROKER), "-c", str(folder / "mosquitto.conf")], port, folder / "log")


class Site:
    """A guard's source on the broker, and the key of the utility."""

    def __init__(self, folder: Path, port: int):
        self.folder, self.port, self.key = folder, port, make_ec_key()
        self.keys = load_public_keys(write_public_key(folder / "keys.pem", self.key))

    def open_source(self) -> FlexSource:
        settings = FlexSettings(url=f"mqtt://127.0.0.1:{self.port}", agent="site-a", sender="utility")
        bus = FlexBus(MqttOptions(url=settings.url), None, "phalanx-power-site-a", retry_interval_s=0.1)
        return FlexSource(settings, TREE, bus, self.folder / "targets.json", self.keys)

    def send(self, kilowatts: float, qos: int = 1) -> None:
        from paho.mqtt.publish import single

        message = make_message(make_target(kilowatts), key=self.key)
        single(TOPIC, message, qos, hostname="127.0.0.1", port=self.port)


def limits(source: FlexSource) -> list[float | None]:
    return [each.limit_w for each in source.read_targets()]


@pytest.mark.parametrize("qos", [1, 2])
def test_a_target_arrives_and_one_that_came_meanwhile_after_a_restart(
    tmp_path: Path, port: int, qos: int, wait_until: Callable[[Callable[[], bool]], None]
) -> None:
    site = Site(tmp_path, port)
    with run_broker(tmp_path, port):
        source = site.open_source()
        wait_until(lambda: source._bus.is_connected)
        site.send(4.0, qos)
        wait_until(lambda: limits(source) == [4000.0])
        source.close()
        site.send(3.0, qos)
        again = site.open_source()
        wait_until(lambda: limits(again) == [3000.0])
        again.close()


def test_targets_hold_while_the_broker_is_gone_and_reports_arrive_afterwards(
    tmp_path: Path, port: int, wait_until: Callable[[Callable[[], bool]], None]
) -> None:
    from paho.mqtt import subscribe

    site, received = Site(tmp_path, port), []
    with run_broker(tmp_path, port):
        source = site.open_source()
        wait_until(lambda: source._bus.is_connected)
        site.send(4.0)
        wait_until(lambda: limits(source) == [4000.0])
    wait_until(lambda: not source._bus.is_connected)
    assert limits(source) == [4000.0]
    source.queue_message(OutgoingMessage("grid/v1/dsx-flex-agent/site-a/powerbreach", b'{"late": true}', 2))
    with run_broker(tmp_path, port):
        listener = threading.Thread(
            target=lambda: received.append(
                subscribe.simple("grid/#", qos=2, hostname="127.0.0.1", port=port, msg_count=1, keepalive=5)
            )
        )
        listener.start()
        time.sleep(0)  # the listener may come after the message: it is sent again until it is seen
        deadline = time.monotonic() + 30
        while listener.is_alive() and time.monotonic() < deadline:
            source.queue_message(OutgoingMessage("grid/v1/dsx-flex-agent/site-a/powerbreach", b'{"late": true}', 2))
            listener.join(0.3)
        source.close()
    assert [json.loads(message.payload) for message in received] == [{"late": True}]
