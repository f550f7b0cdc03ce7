"""Load targets from a bus in the form of NVIDIA's DSX Flex. What was received is kept in a file: a guard that restarts
holds it, and a bus that is silent changes nothing until a target ends."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from phalanx.errors import UsageError
from phalanx.fleet.power.flex_bus import FlexBus, OutgoingMessage
from phalanx.fleet.power.flex_messages import FlexMessageError, parse_load_targets
from phalanx.fleet.power.load_targets import LoadTarget
from phalanx.fleet.power.signed_data import load_public_keys
from phalanx.fleet.power.target_record import read_target_record, write_target_record
from phalanx.fleet.power_tree import PowerTree
from phalanx.fleet.target_settings import FlexSettings
from phalanx.fleet.telemetry.credentials import check_ca_file, find_credentials, parse_service_url
from phalanx.fleet.telemetry.mqtt import MqttOptions, OnMessage
from phalanx.run.boot_clock import unix_now

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

MAX_TARGETS = 1000
MAX_IDS_KEPT = 1000
"""Messages of which a copy is known as such."""


class TargetBus(Protocol):
    """A bus that carries targets and reports."""

    is_connected: bool

    def start(self, topic_filters: Sequence[str], on_message: OnMessage) -> None:
        """Connect and subscribe."""

    def queue_message(self, message: OutgoingMessage) -> None:
        """Send a message."""

    def stop(self) -> None:
        """Leave the bus."""


class FlexSource:
    """A `TargetSource`. `record`: the file that keeps targets. `keys`: as of `parse_load_targets`.

    Raises UsageError where the record cannot be read.
    """

    def __init__(
        self,
        settings: FlexSettings,
        tree: PowerTree,
        bus: TargetBus,
        record: Path,
        keys: "Sequence[PublicKeyTypes] | None" = None,
        wall_clock: Callable[[], float] = unix_now,
    ):
        self._settings, self._tree, self._bus, self._record, self._keys = settings, tree, bus, record, keys
        self._wall_clock = wall_clock
        self._targets = read_target_record(record)
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._problems: list[str] = []
        self._was_connected = True
        bus.start([f"grid/v1/isv/{settings.sender}/loadtarget/set"], self.receive)

    def read_targets(self) -> Sequence[LoadTarget]:
        """Return all targets that have not ended."""
        now = self._wall_clock()
        return [each for each in self._targets if each.end_s is None or now < each.end_s]

    def list_problems(self) -> list[str]:
        """Return the messages that were refused since the last call, and whether the bus is lost."""
        problems, self._problems = self._problems, []
        if self._bus.is_connected != self._was_connected:
            self._was_connected = self._bus.is_connected
            state = "is back" if self._was_connected else "does not answer; its targets hold until they end"
            problems.append(f"{self._settings.url}: {state}")
        return problems

    def queue_message(self, message: OutgoingMessage) -> None:
        """Send a report."""
        self._bus.queue_message(message)

    def close(self) -> None:
        """Leave the bus."""
        self._bus.stop()

    def receive(self, topic: str, payload: bytes) -> None:
        """Take a message. It is written to the record before it holds."""
        now = self._wall_clock()
        try:
            command = parse_load_targets(payload, self._tree, self._keys, now)
            if command.source.rpartition("/")[2] != topic.split("/")[3]:
                raise FlexMessageError(f"{command.source} has published as another one")
            if command.id in self._ids:
                return
            targets = drop_replaced_targets([*self._targets, *command.targets], now)
            if len(targets) > MAX_TARGETS:
                raise FlexMessageError(f"{len(targets)} targets; {MAX_TARGETS} are kept at most")
            write_target_record(self._record, targets)
        except FlexMessageError as error:
            self._problems.append(f"{topic}: load target refused: {error}")
            return
        except OSError as error:
            self._problems.append(f"{self._record}: cannot be written, and a restart would forget targets: {error}")
        self._targets = targets
        self._ids[command.id] = None
        while len(self._ids) > MAX_IDS_KEPT:
            self._ids.popitem(last=False)


def open_flex_source(
    settings: FlexSettings, tree: PowerTree, record: Path, environment: Mapping[str, str]
) -> FlexSource:
    """Return the source that the fleet file names; it connects in the background.

    Raises:
        UsageError: The address, a key or the credentials are wrong, or targets would be accepted from anyone.
    """
    address = parse_service_url("MQTT", settings.url, ("mqtts", "mqtt"))
    if address.scheme == "mqtt" and settings.key_file is None:
        raise UsageError(
            f"power.flex: {settings.url} is without TLS: anyone on the network could send targets. Use mqtts://, or "
            "set key_file to the sender's public key"
        )
    check_ca_file("MQTT", settings.ca_file)
    credentials = find_credentials("MQTT", address.hostname or "", settings.credentials_file, environment)
    if credentials is not None and address.scheme == "mqtt":
        raise UsageError(f"{settings.url}: a password is not sent without TLS; use mqtts://")
    keys = None if settings.key_file is None else load_public_keys(settings.key_file)
    bus = FlexBus(
        MqttOptions(url=settings.url, ca_file=settings.ca_file), credentials, f"phalanx-power-{settings.agent}"
    )
    return FlexSource(settings, tree, bus, record, keys)


def drop_replaced_targets(targets: Sequence[LoadTarget], unix_time_s: float) -> list[LoadTarget]:
    """Return the targets that may still hold: those that have not ended, and that no later one replaces for good."""
    kept: list[LoadTarget] = []
    is_replaced: set[str] = set()
    for target in reversed(targets):
        has_ended = target.end_s is not None and target.end_s <= unix_time_s
        if target.level in is_replaced or has_ended:
            continue
        if target.has_begun(unix_time_s) and target.end_s is None:
            is_replaced.add(target.level)
        kept.append(target)
    return kept[::-1]
