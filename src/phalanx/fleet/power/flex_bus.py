"""A connection to an MQTT bus that receives with QoS 2 and publishes, in a thread of its own. A broker that is lost
keeps what it has for this client; so does the client, for the broker."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from phalanx.errors import UsageError
from phalanx.fleet.telemetry.credentials import Credentials
from phalanx.fleet.telemetry.mqtt import (
    RETRY_INTERVAL_S,
    AiomqttSubscriber,
    MqttOptions,
    OnMessage,
)

if TYPE_CHECKING:
    import aiomqtt

MAX_WAITING_MESSAGES = 1000
SEND_INTERVAL_S = 0.2


@dataclass(frozen=True)
class OutgoingMessage:
    """A message that waits to be sent."""

    topic: str
    payload: bytes
    qos: Literal[1, 2]


class FlexBus(AiomqttSubscriber):
    """Receives and publishes. `client_id` is the same after a restart: what came meanwhile is received then."""

    def __init__(
        self,
        options: MqttOptions,
        credentials: Credentials | None,
        client_id: str,
        retry_interval_s: float = RETRY_INTERVAL_S,
    ):
        super().__init__(options, credentials, retry_interval_s)
        self._client_id = client_id
        self._waiting: deque[OutgoingMessage] = deque(maxlen=MAX_WAITING_MESSAGES)
        self.is_connected = False

    def start(self, topic_filters: Sequence[str], on_message: OnMessage) -> None:
        """Connect in the background, again and again: budgets are held without the bus, too."""
        try:
            import aiomqtt  # noqa: F401
        except ImportError:
            raise UsageError("power.flex: aiomqtt is not installed: pip install 'phalanx[fleet]'") from None
        self._is_decided.set()
        super().start(topic_filters, on_message)

    def queue_message(self, message: OutgoingMessage) -> None:
        """Send a message as soon as there is a connection. Of too many the oldest are left out."""
        self._waiting.append(message)

    async def _receive_until_lost(self, topic_filters: Sequence[str], on_message: OnMessage) -> None:
        try:
            async with self._make_client(identifier=self._client_id, clean_session=False) as client:
                await self._subscribe(client, topic_filters, qos=2)
                self.is_connected = True
                sender = asyncio.create_task(self._send_waiting(client))
                try:
                    async for message in client.messages:
                        self._deliver(message, on_message)
                finally:
                    sender.cancel()
        finally:
            self.is_connected = False

    async def _send_waiting(self, client: "aiomqtt.Client") -> None:
        while True:
            while self._waiting:
                message = self._waiting[0]
                await client.publish(message.topic, message.payload, qos=message.qos)
                self._waiting.popleft()
            await asyncio.sleep(SEND_INTERVAL_S)
