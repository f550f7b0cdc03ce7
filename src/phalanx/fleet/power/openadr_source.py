"""Load targets of a utility by OpenADR 3: the events of a program, polled from a VTN. While the VTN is silent, the
events that were read hold until their ends."""

import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import UsageError
from phalanx.fleet.power.load_targets import LoadTarget
from phalanx.fleet.power.target_record import read_target_record, write_target_record
from phalanx.fleet.power_tree import PowerTree
from phalanx.fleet.target_settings import OpenAdrSettings
from phalanx.fleet.telemetry.credentials import Credentials, find_credentials, parse_service_url
from phalanx.run.boot_clock import unix_now

if TYPE_CHECKING:
    from openadr3 import Event, IntervalPeriod

logger = logging.getLogger(__name__)

LIMIT_TYPES = ("IMPORT_CAPACITY_LIMIT", "DISPATCH_SETPOINT")
"""Payloads of which the value is a power."""
WATTS_BY_UNIT = {"KW": 1e3, "W": 1.0, "MW": 1e6}
STOP_TIMEOUT_S = 5.0


MAX_PAGES, EVENTS_PER_PAGE = 100, 50
ENDLESS_DURATION_PATTERN = re.compile(r"P\d{4,}Y.*")
"""P9999Y says that there is no end; openadr3 0.5 cannot add it to a date."""
EventsReader = Callable[[], Sequence[object]]
"""Returns all events of a program as JSON has them. Raises OSError where the VTN does not answer."""


class OpenAdrSource:
    """A `TargetSource` that polls in a thread, unless `polls` is False. `record`: the file that keeps targets."""

    def __init__(
        self,
        settings: OpenAdrSettings,
        read_events: EventsReader,
        record: Path,
        wall_clock: Callable[[], float] = unix_now,
        polls: bool = True,
    ):
        self._settings, self._read_events, self._wall_clock = settings, read_events, wall_clock
        self._record, self._targets = record, read_target_record(record)
        self._problems: list[str] = []
        self._known_problems: set[str] = set()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._poll_again, name="power-openadr", daemon=True)
        if polls:
            self._thread.start()

    def read_targets(self) -> Sequence[LoadTarget]:
        """Return the targets that have not ended."""
        now = self._wall_clock()
        return [each for each in self._targets if each.end_s is None or now < each.end_s]

    def list_problems(self) -> list[str]:
        """Return what went wrong since the last call."""
        problems, self._problems = self._problems, []
        return problems

    def close(self) -> None:
        """Stop polling."""
        self._has_ended.set()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)

    def poll(self) -> None:
        """Read all events once. What cannot be read is a problem, reported once until it is over."""
        try:
            found = self._read_events()
        except OSError as error:
            self._report({f"{self._settings.url}: {error}; its events hold until they end"})
            return
        targets, problems = list_event_targets(found, self._settings)
        if targets != self._targets:
            try:
                write_target_record(self._record, targets)
            except OSError as error:
                problems.append(f"{self._record}: cannot be written, and a restart would forget targets: {error}")
        self._targets = targets
        self._report({f"{self._settings.url}: {problem}" for problem in problems})

    def _report(self, problems: set[str]) -> None:
        self._problems += sorted(problems - self._known_problems)
        self._known_problems = problems

    def _poll_again(self) -> None:
        while not self._has_ended.is_set():
            try:
                self.poll()
            except Exception as error:  # what a VTN sends may be anything; the next poll comes nevertheless
                logger.exception("power: %s: a poll has failed", self._settings.url)
                self._report({f"{self._settings.url}: unreadable: {error}; its events hold until they end"})
            self._has_ended.wait(self._settings.interval_s)


def list_event_targets(events: Sequence[object], settings: OpenAdrSettings) -> tuple[list[LoadTarget], list[str]]:
    """Return the targets of a program's events as JSON has them, and why some are none.

    Events of a higher priority (a lower number) win, then those that were changed last. A value is in kW unless the
    event says W or MW.
    """
    from openadr3 import Event

    found: list[Event] = []
    problems: list[str] = []
    for raw in events:
        try:
            found.append(Event.from_raw(_drop_endless_durations(raw)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"an event that is not as OpenADR 3 has it: {type(error).__name__}: {error}"[:300])
    targets: list[LoadTarget] = []
    for event in sorted(found, key=_rank_event):
        units = {each.payload_type: each.units for each in event.payload_descriptors or []}
        for interval in event.resolved_intervals():
            try:
                start_s, end_s = _find_period(interval.interval_period)
                for payload in interval.payloads:
                    limit_w = _find_limit(payload.type, payload.values, units.get(payload.type), settings)
                    targets.append(LoadTarget(settings.level, limit_w, start_s, end_s, id=f"{event.id}"))
            except (ValueError, OverflowError) as error:
                problems.append(f"event {event.event_name or event.id}, interval {interval.id}: {error}")
    return targets, problems


def open_openadr_source(
    settings: OpenAdrSettings, tree: PowerTree, record: Path, environment: Mapping[str, str]
) -> OpenAdrSource:
    """Return the source that the fleet file names; it polls in the background.

    Raises:
        UsageError: Its address, level or credentials are wrong, or its package is not installed.
    """
    address = parse_service_url("OPENADR", settings.url, ("https", "http"))
    if settings.level not in (labels := [level.label for level in tree.levels]):
        raise UsageError(f"power.openadr.level: {settings.level}: no such level; there are {', '.join(labels[:10])}")
    credentials = find_credentials("OPENADR", address.hostname or "", settings.credentials_file, environment)
    if credentials is not None and address.scheme == "http" and address.hostname not in ("localhost", "127.0.0.1"):
        raise UsageError(f"{settings.url}: a secret is not sent without TLS; use https://")
    return OpenAdrSource(settings, make_events_reader(settings, credentials), record)


def make_events_reader(settings: OpenAdrSettings, credentials: Credentials | None) -> EventsReader:
    """Return a reader of the program's events. It gets a new token when the VTN refuses the old one."""
    try:
        import httpx
        from openadr3 import OpenADRClient
    except ImportError:
        raise UsageError("power.openadr: openadr3 is not installed: pip install 'phalanx[openadr]'") from None
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request
    client = OpenADRClient(settings.url, client_type="ven")
    has_token = False

    def read_events() -> Sequence[object]:
        nonlocal has_token
        try:
            if credentials is not None and not has_token:
                client.fetch_token(credentials.user, credentials.password)
                has_token = True
            events: list[object] = []
            for page in range(MAX_PAGES):
                answer = client.get_events(
                    programID=settings.program, skip=page * EVENTS_PER_PAGE, limit=EVENTS_PER_PAGE
                )
                answer.raise_for_status()
                found = answer.json()
                if not isinstance(found, list):
                    raise ValueError("expected a list of events")
                events += found
                if len(found) < EVENTS_PER_PAGE:
                    break
            return events
        except httpx.HTTPStatusError as error:
            has_token = False
            raise OSError(f"answers {error.response.status_code} to {error.request.url.path}") from None
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise OSError(f"does not answer as OpenADR 3 has it: {error or type(error).__name__}") from None

    return read_events


def _drop_endless_durations(value: Any) -> Any:
    if isinstance(value, list):
        return [_drop_endless_durations(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _drop_endless_durations(each)
        for key, each in value.items()
        if key != "duration" or not ENDLESS_DURATION_PATTERN.fullmatch(str(each))
    }


def _rank_event(event: "Event") -> tuple[float, float]:
    """Lowest first: the last one wins."""
    priority = float("inf") if event.priority is None else float(event.priority)
    changed = event.modified or event.created
    return -priority, 0.0 if changed is None else changed.timestamp()


def _find_period(period: "IntervalPeriod | None") -> tuple[float, float | None]:
    """Start and end in unix seconds. Without a duration, or with an endless one, there is no end."""
    if period is None or period.start is None:
        raise ValueError("it has no start")
    if period.period is None or period.period[1] <= period.start:
        return period.start.timestamp(), None
    return period.start.timestamp(), period.period[1].timestamp()


def _find_limit(type: str, values: Sequence[object], unit: str | None, settings: OpenAdrSettings) -> float | None:
    """Watts of a payload; None for normal operation."""
    value = float(str(values[0])) if values else float("nan")
    if type == "SIMPLE":
        level = int(value) if value == value else -1
        if level == 0:
            return None
        if not 1 <= level <= len(settings.simple_limits):
            raise ValueError(f"SIMPLE level {value:g}; power.openadr.simple_limits has {len(settings.simple_limits)}")
        return settings.simple_limits[level - 1]
    if type not in LIMIT_TYPES:
        raise ValueError(f"payload {type}; expected {', '.join((*LIMIT_TYPES, 'SIMPLE'))}")
    factor = WATTS_BY_UNIT.get((unit or "KW").upper())
    if factor is None or not 0 < value < float("inf"):
        raise ValueError(f"{type} of {value:g} {unit or 'KW'}; expected a power above 0 in W, KW or MW")
    return value * factor
