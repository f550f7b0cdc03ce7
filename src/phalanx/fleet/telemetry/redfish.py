"""Read a node's power at its supplies, temperatures and fans from its management controller (BMC), by Redfish.

A controller takes from tenths of a second to many seconds for an answer, so a thread asks it, and a reading has an age.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from phalanx.errors import UsageError
from phalanx.fleet.telemetry.credentials import Credentials, check_ca_file, find_credentials, parse_service_url
from phalanx.fleet.telemetry.polling import PollingThread
from phalanx.fleet.telemetry.redfish_chassis import ChassisReader
from phalanx.fleet.telemetry.redfish_values import (
    RedfishAccessError,
    RedfishClient,
    RedfishLayoutError,
    RedfishStatusError,
    RedfishUnreachableError,
    Resource,
)
from phalanx.fleet.telemetry.sample import HostSample
from phalanx.fleet.telemetry.source import SourceReading, SourceUnavailableError, Stoppable

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
LATE_AFTER_INTERVALS = 3
"""A value that is older is missing."""
SampleT = TypeVar("SampleT", covariant=True)
FIELD_LABELS = {
    "node_power_w": "node power",
    "inlet_temperature_c": "inlet temperature",
    "cpu_temperature_c": "CPU temperature",
    "failed_fans": "state of fans",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RedfishOptions:
    """How a node's controller is read."""

    url: str
    """Such as https://node1-bmc.example.com."""
    chassis: str = ""
    """Id of the chassis that is the node; needed where several outermost ones have sensors."""
    interval_s: float = 10.0
    """Seconds from one reading to the next. A value is missing when it is older than three."""
    timeout_s: float = 20.0
    """Seconds for an answer to one request."""
    verify_tls: bool = True
    ca_file: Path | None = None
    """Certificates that sign the controller's; without it, those of the system."""
    credentials_file: Path | None = None
    """In the form of .netrc; else PHALANX_REDFISH_USER and PHALANX_REDFISH_PASSWORD."""


class ResourceReader(Protocol[SampleT]):
    """Reads what is wanted of one controller."""

    def read(self) -> SampleT:
        """Read all values. A value that is refused, null, absent or a blank code is None."""
        ...


class RedfishPoller(Generic[SampleT]):
    """The newest values of a controller. `make_reader` finds where it has them; `start_polling` calls a function at an
    interval in the background.

    Raises SourceUnavailableError where the controller does not answer at first; later its values are missing.
    """

    def __init__(
        self,
        options: RedfishOptions,
        client: RedfishClient,
        make_reader: Callable[[RedfishClient], ResourceReader[SampleT]],
        clock: Callable[[], float] = time.monotonic,
        start_polling: Callable[[Callable[[], None], float], Stoppable] = PollingThread,
    ):
        self._options, self._client, self._make_reader, self._clock = options, client, make_reader, clock
        self._reader: ResourceReader[SampleT] | None = None
        self._newest: tuple[float, SampleT] | None = None
        self._is_refused = False
        try:
            self._newest = self._read_resources()
        except (RedfishUnreachableError, RedfishStatusError, RedfishLayoutError) as error:
            client.close()
            raise SourceUnavailableError(f"{options.url}: {error}") from error
        self._polling = start_polling(self._poll, options.interval_s)

    def read(self) -> tuple[SampleT | None, float]:
        """Return the newest values and their age; None where they are late, or the controller does not answer."""
        newest = self._newest
        if newest is None:
            return None, 0.0
        age_s = self._clock() - newest[0]
        return (None if age_s > LATE_AFTER_INTERVALS * self._options.interval_s else newest[1]), age_s

    def close(self) -> None:
        """Stop asking, and end the session at the controller."""
        self._polling.stop()
        self._client.close()

    def _poll(self) -> None:
        """Ask once. Where the controller does not answer, all values are missing until it does."""
        if self._is_refused:
            return
        try:
            self._newest = self._read_resources()
        except RedfishAccessError as error:
            logger.warning(
                "telemetry: %s: %s; it is asked no more, since this may lock the user", self._options.url, error
            )
            self._newest, self._is_refused = None, True
        except (RedfishUnreachableError, RedfishStatusError, RedfishLayoutError) as error:
            if self._newest is not None:
                logger.info("telemetry: %s: %s", self._options.url, error)
            self._newest, self._reader = None, None  # after a restart its resources may be others

    def _read_resources(self) -> tuple[float, SampleT]:
        """A time before the values were measured, and the values."""
        if self._reader is None:
            self._reader = self._make_reader(self._client)
        begin = self._clock()
        return begin, self._reader.read()


class RedfishSource:
    """The power, temperatures and fans of one node. Arguments and errors as of RedfishPoller."""

    def __init__(
        self,
        options: RedfishOptions,
        client: RedfishClient,
        clock: Callable[[], float] = time.monotonic,
        start_polling: Callable[[Callable[[], None], float], Stoppable] = PollingThread,
    ):
        self.name = options.url
        self._poller = RedfishPoller(
            options, client, lambda found: ChassisReader(found, options.chassis), clock, start_polling
        )
        first, _ = self._poller.read()
        lacking = [label for column, label in FIELD_LABELS.items() if getattr(first, column, None) is None]
        self.problems = [f"{options.url}: serves no {', no '.join(lacking)}"] if lacking else []

    def read(self) -> SourceReading:
        """The newest values with their age. None of them where they are late."""
        host, age_s = self._poller.read()
        return SourceReading(host=host or HostSample(), host_age_s=age_s)

    def close(self) -> None:
        """Stop asking, and end the session at the controller."""
        self._poller.close()


def open_redfish(options: RedfishOptions, environment: Mapping[str, str] = os.environ) -> RedfishSource:
    """Open the controller that `options` names.

    Raises:
        SourceUnavailableError: it does not answer, or refuses.
        UsageError: its address or credentials are wrong.
    """
    return RedfishSource(options, open_redfish_client(options, environment))


def open_redfish_client(options: RedfishOptions, environment: Mapping[str, str] = os.environ) -> "SushyClient":
    """Return a client of the controller that `options` names. UsageError where its address or credentials are wrong."""
    address = parse_service_url("REDFISH", options.url, ("https", "http"))
    check_ca_file("REDFISH", options.ca_file)
    credentials = find_credentials("REDFISH", address.hostname or "", options.credentials_file, environment)
    if credentials is not None and address.scheme == "http":
        raise UsageError(f"{options.url}: a password is not sent without TLS; use https://")
    return SushyClient(options, credentials)


class SushyClient:
    """Requests to a controller through sushy: a session, renewed when it expires, or basic authentication."""

    def __init__(self, options: RedfishOptions, credentials: Credentials | None):
        try:
            import sushy
            import sushy.auth
            import sushy.connector
        except ImportError:
            raise SourceUnavailableError("Redfish: sushy is not installed: pip install 'phalanx[fleet]'") from None
        self._errors = sushy.exceptions
        self._options, self._auth, self._is_logged_in = options, None, False
        self._connector = sushy.connector.Connector(
            options.url,
            verify=str(options.ca_file) if options.ca_file and options.verify_tls else options.verify_tls,
            server_side_retries=1,  # the next reading is the next try
            default_request_timeout=options.timeout_s,
            connect_timeout=CONNECT_TIMEOUT_S,
        )
        self._connector._session.trust_env = False  # neither a proxy nor ~/.netrc; sushy has no option for it
        if credentials is not None:
            self._auth = sushy.auth.SessionOrBasicAuth(credentials.user, credentials.password)

    def get(self, path: str) -> Resource:
        """Read a resource."""
        found = self._ask(lambda: self._connector.get(path).json(), path)
        if not isinstance(found, dict):
            raise RedfishStatusError(f"{path} is no resource of Redfish")
        return found

    def close(self) -> None:
        """End the session, and the connection."""
        try:
            if self._auth is not None:
                self._auth.close()
        except self._errors.SushyError:
            logger.debug("telemetry: %s: the session was not ended", self._options.url)
        self._connector.close()

    def _ask(self, call: Callable[[], object], path: str) -> object:
        """Call, and log in before the first time."""
        try:
            if self._auth is not None and not self._is_logged_in:
                self._log_in()
            return call()
        except self._errors.HTTPError as error:
            if error.status_code == HTTPStatus.UNAUTHORIZED:
                raise RedfishAccessError(self._describe_refusal()) from None
            raise RedfishStatusError(f"answers with status {error.status_code} to {path}") from None
        except self._errors.ConnectionError as error:
            raise RedfishUnreachableError(_describe_connection_error(str(error))) from None
        except (self._errors.SushyError, ValueError, TypeError, AttributeError):  # sushy trusts the form of errors
            raise RedfishStatusError(f"{path} is no resource of Redfish") from None

    def _describe_refusal(self) -> str:
        if self._auth is not None:
            return "refuses the user or the password"
        return "wants PHALANX_REDFISH_USER and PHALANX_REDFISH_PASSWORD, or credentials_file"

    def _log_in(self) -> None:
        import sushy

        sushy.Sushy(self._options.url, auth=self._auth, connector=self._connector)
        self._is_logged_in = True


def _describe_connection_error(text: str) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "its certificate is not trusted; set ca_file to the one that signs it"
    if "timed out" in text:
        return "does not answer in time"
    if "refused" in text:
        return "connection refused"
    return "cannot be reached"
