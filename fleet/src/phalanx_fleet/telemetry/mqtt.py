"""Read racks from a building management system that publishes on an MQTT bus. The source publishes nothing."""

import asyncio
import contextlib
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import Field

from phalanx.cluster.spec import StrictModel
from phalanx.errors import UsageError
from phalanx.telemetry.sample import SourceUnavailableError
from phalanx_fleet.telemetry.credentials import Credentials, check_ca_file, find_credentials, parse_service_url
from phalanx_fleet.telemetry.rack_points import REPUBLISH_INTERVAL_S, TOPIC_FILTERS, RackPoints
from phalanx_fleet.telemetry.service_reading import ServiceReading

if TYPE_CHECKING:
    import aiomqtt

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
RETRY_INTERVAL_S = 5.0
STOP_TIMEOUT_S = 5.0
DEFAULT_PORTS = {"mqtts": 8883, "mqtt": 1883}
FIRST_REFUSAL_CODE = 128
"""From this one on, the broker's answer to a subscription is a refusal."""
OnMessage = Callable[[str, bytes], None]


class MqttOptions(StrictModel):
    """How the building's bus is read."""

    url: str
    """Such as mqtts://bus.example.com, with TLS; mqtt:// is without."""
    republish_interval_s: float = Field(REPUBLISH_INTERVAL_S, gt=0, le=1e6)
    """Seconds after which an unchanged value is sent again. A value is missing when it is older than three."""
    verify_tls: bool = True
    ca_file: Path | None = None
    """Certificates that sign the broker's; without it, those of the system."""
    credentials_file: Path | None = None
    """In the form of .netrc; else PHALANX_MQTT_USER and PHALANX_MQTT_PASSWORD."""


class MqttSource:
    """The racks of a building. `clock`: seconds of a monotonic clock; `wall_clock`: seconds since the epoch.

    Raises SourceUnavailableError where the broker does not answer at first; later values become late, and missing.
    """

    def __init__(
        self,
        options: MqttOptions,
        subscriber: "AiomqttSubscriber",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ):
        self.name = options.url
        self._subscriber, self._clock, self._wall_clock = subscriber, clock, wall_clock
        self._points = RackPoints(clock(), options.republish_interval_s)
        subscriber.start(TOPIC_FILTERS, self._on_message)

    @property
    def problems(self) -> Sequence[str]:
        """What the building does not send, and why a point is not used."""
        return [f"{self.name}: {problem}" for problem in self._points.find_problems(self._clock())]

    def read(self) -> ServiceReading:
        return ServiceReading(racks=self._points.read(self._wall_clock(), self._clock()))

    def close(self) -> None:
        self._subscriber.stop()

    def _on_message(self, topic: str, payload: bytes) -> None:
        self._points.receive(topic, payload, self._clock())


def open_mqtt(options: MqttOptions, environment: Mapping[str, str] = os.environ) -> MqttSource:
    """Open the bus that `options` names, to read it.

    Raises:
        SourceUnavailableError: the broker does not answer, or refuses.
        UsageError: its address or credentials are wrong.
    """
    address = parse_service_url("MQTT", options.url, ("mqtts", "mqtt"))
    check_ca_file("MQTT", options.ca_file)
    credentials = find_credentials("MQTT", address.hostname or "", options.credentials_file, environment)
    if credentials is not None and address.scheme == "mqtt":
        raise UsageError(f"{options.url}: a password is not sent without TLS; use mqtts://")
    return MqttSource(options, AiomqttSubscriber(options, credentials))


class AiomqttSubscriber:
    """Receives messages through aiomqtt, in a thread with an event loop of its own. After a loss of the connection it
    connects again."""

    def __init__(
        self, options: MqttOptions, credentials: Credentials | None, retry_interval_s: float = RETRY_INTERVAL_S
    ):
        self._options, self._credentials, self._retry_interval_s = options, credentials, retry_interval_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._is_decided = threading.Event()
        """Set when the first connection has been made, or has failed."""
        self._refusal = ""

    def start(self, topic_filters: Sequence[str], on_message: OnMessage) -> None:
        """Subscribe, and call `on_message` with the topic and payload of each message, in any thread; wait until the
        broker has answered. Raises SourceUnavailableError where it does not, or refuses."""
        try:
            import aiomqtt  # noqa: F401
        except ImportError:
            raise SourceUnavailableError("MQTT: aiomqtt is not installed: pip install 'phalanx-fleet'") from None
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._receive(topic_filters, on_message))
        self._thread = threading.Thread(
            target=self._run, args=(self._loop, self._task), name="telemetry-mqtt", daemon=True
        )
        self._thread.start()
        if not self._is_decided.wait(2 * CONNECT_TIMEOUT_S):
            self._refusal = f"does not answer within {2 * CONNECT_TIMEOUT_S:g} s"
        if self._refusal:
            self.stop()
            raise SourceUnavailableError(f"{self._options.url}: {self._refusal}")

    def stop(self) -> None:
        """Leave the bus. A broker that does not answer in time is left behind."""
        if self._loop is None or self._task is None or self._thread is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self, loop: asyncio.AbstractEventLoop, task: "asyncio.Task[None]") -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            logger.debug("telemetry: %s: left the bus", self._options.url)
        finally:
            loop.close()

    async def _receive(self, topic_filters: Sequence[str], on_message: OnMessage) -> None:
        import aiomqtt

        while True:
            try:
                await self._receive_until_lost(topic_filters, on_message)
            except (aiomqtt.MqttError, OSError) as error:
                if not self._is_decided.is_set():
                    self._refusal = _describe_error(error)
                    self._is_decided.set()
                    return
                logger.info("telemetry: %s: %s", self._options.url, _describe_error(error))
            await asyncio.sleep(self._retry_interval_s)

    def _make_client(self) -> "aiomqtt.Client":
        """Return a client of this broker, to be entered."""
        import aiomqtt

        address, user = urlsplit(self._options.url), self._credentials
        return aiomqtt.Client(
            address.hostname or "",
            address.port or DEFAULT_PORTS[address.scheme],
            username=None if user is None else user.user,
            password=None if user is None else user.password,
            tls_context=self._make_tls_context() if address.scheme == "mqtts" else None,
            timeout=CONNECT_TIMEOUT_S,
        )

    async def _subscribe(self, client: "aiomqtt.Client", topic_filters: Sequence[str]) -> None:
        import aiomqtt

        for topic_filter in topic_filters:
            granted = await client.subscribe(topic_filter, qos=1)
            if any(isinstance(code, int) and code >= FIRST_REFUSAL_CODE for code in granted):
                raise aiomqtt.MqttError(f"refuses the topics {topic_filter} to this user")

    async def _receive_until_lost(self, topic_filters: Sequence[str], on_message: OnMessage) -> None:
        async with self._make_client() as client:
            await self._subscribe(client, topic_filters)
            self._is_decided.set()
            async for message in client.messages:
                self._deliver(message, on_message)

    def _deliver(self, message: "aiomqtt.Message", on_message: OnMessage) -> None:
        payload = message.payload if isinstance(message.payload, bytes) else b""
        try:
            on_message(str(message.topic), payload)
        except Exception:  # one message must not end all others
            logger.exception("telemetry: %s: %s cannot be read", self._options.url, message.topic)

    def _make_tls_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._options.ca_file)
        if not self._options.verify_tls:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


def _describe_error(error: Exception) -> str:
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "its certificate is not trusted; set ca_file to the one that signs it"
    if "ot authori" in text or "ad user name" in text:  # of MQTT 3.1.1 and 5, in paho's words
        return "refuses the user or the password (PHALANX_MQTT_USER, credentials_file)"
    return text
