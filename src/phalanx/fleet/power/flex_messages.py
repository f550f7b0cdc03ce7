"""Messages of NVIDIA's DSX Flex 1.7: CloudEvents 1.0.2 as JSON on MQTT. Pure: bytes in, load targets out, and back.

Schema: https://github.com/NVIDIA/dsx-exchange, schemas/asyncapi/dsx-flex.
"""

import json
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from phalanx.fleet.power.load_targets import LoadTarget
from phalanx.fleet.power.signed_data import SignatureError, verify_jws
from phalanx.fleet.power_tree import PowerTree
from phalanx.safe_files import parse_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

SPEC_VERSION = "1.0.2"
TARGET_TYPE, STATUS_TYPE = "grid.loadtarget.set.v1", "grid.powerstate.status.v1"
BREACH_TYPE, ENFORCEMENT_TYPE = "grid.powerbreach.alert.v1", "grid.powerbreach.enforcement.v1"
WATTS_BY_UNIT = {"watt": 1.0, "kilowatt": 1e3, "megawatt": 1e6}
MAX_PAYLOAD_BYTES = 1 << 20
JsonObject = dict[str, Any]
"""A message about to be written as JSON."""


class FlexMessageError(Exception):
    """A message is refused."""


class _FlexModel(BaseModel):
    """Fields that this version does not know are left out: later ones of the schema may have more."""

    model_config = ConfigDict(extra="ignore")


class _Constraint(_FlexModel):
    value: float = Field(gt=0, allow_inf_nan=False)
    unit: Literal["watt", "kilowatt", "megawatt"]


class _Interval(_FlexModel):
    start_time: AwareDatetime | None = None
    end_time: AwareDatetime | None = None


class _Strategy(_FlexModel):
    best_effort: bool = False


class _Target(_FlexModel):
    interval: _Interval
    load_constraint: _Constraint | None
    """It has to be there; null is the default."""
    feed_tags: list[str] = Field(default_factory=list)
    strategy: _Strategy = _Strategy()


class _SetLoadTarget(_FlexModel):
    targets: list[_Target] = Field(min_length=1)


class _Envelope(_FlexModel):
    specversion: Literal["1.0.2"]
    id: str
    source: str
    type: str
    time: AwareDatetime
    correlationid: str = ""
    data: Any


@dataclass(frozen=True)
class FlexCommand:
    """Targets of one message. `id`: a message that comes twice has the same."""

    id: str
    source: str
    targets: tuple[LoadTarget, ...]


def parse_load_targets(
    payload: bytes, tree: PowerTree, keys: "Sequence[PublicKeyTypes] | None", unix_time_s: float
) -> FlexCommand:
    """Read a message that sets load targets.

    Args:
        payload: The message.
        tree: Of the fleet: feed tags are the names of its feeds.
        keys: One of them has to have signed the data; None where only the broker's permissions protect the topic.
        unix_time_s: Now, the start of targets without one.

    Raises:
        FlexMessageError: It is no such message, is not signed, or names a feed that is not there. Nothing of it holds.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise FlexMessageError(f"a message of {len(payload)} bytes; expected {MAX_PAYLOAD_BYTES} at most")
    try:
        envelope = _Envelope.model_validate(parse_json(payload.decode()))
        if envelope.type != TARGET_TYPE:
            raise FlexMessageError(f"type {envelope.type}; expected {TARGET_TYPE}")
        data = _open_data(envelope.data, keys)
        found = _SetLoadTarget.model_validate(data).targets
    except SignatureError as error:
        raise FlexMessageError(f"not accepted: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise FlexMessageError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ValueError as error:
        raise FlexMessageError(f"no JSON: {error}") from None
    id = envelope.correlationid or envelope.id
    return FlexCommand(
        envelope.id,
        envelope.source,
        tuple(each for target in found for each in _expand_target(target, tree, unix_time_s, id)),
    )


def make_event(
    type: str, agent: str, subject: str, data: JsonObject, unix_time_s: float, correlation_id: str = ""
) -> bytes:
    """Return a CloudEvent of this agent. Its data are not signed."""
    event: JsonObject = {
        "specversion": SPEC_VERSION,
        "id": str(uuid.uuid4()),
        "source": f"//grid/v1/dsx-flex-agent/{agent}",
        "type": type,
        "time": format_time(unix_time_s),
        "datacontenttype": "application/json",
        "subject": subject,
        "traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01",
        "data": data,
    }
    if correlation_id:
        event["correlationid"] = correlation_id
    return json.dumps(event).encode()


def format_watts(watts: float) -> JsonObject:
    """Return a power as the schema has it."""
    return {"value": round(watts, 1), "unit": "watt"}


def format_time(unix_time_s: float) -> str:
    """Return a time as the schema has it."""
    return datetime.fromtimestamp(unix_time_s, UTC).isoformat().replace("+00:00", "Z")


def format_target(target: LoadTarget, is_active: bool) -> JsonObject:
    """Return a target with a limit as reports repeat it."""
    interval = {"start_time": format_time(target.start_s)}
    if target.end_s is not None:
        interval["end_time"] = format_time(target.end_s)
    return {
        "active": is_active,
        "load_constraint": format_watts(target.limit_w or 0.0),
        "interval": interval,
        "strategy": {"best_effort": target.strategy == "caps"},
        "correlation_id": target.id,
    }


def _open_data(data: object, keys: "Sequence[PublicKeyTypes] | None") -> object:
    """Return the content of `data`; SignatureError where it is not signed as it should be."""
    if isinstance(data, str):
        if keys is None:
            raise SignatureError("its data are signed, and power.flex.key_file has no key to verify them")
        return parse_json(verify_jws(data, keys).decode())
    if keys is not None:
        raise SignatureError("its data are not signed")
    return data


def _expand_target(target: _Target, tree: PowerTree, unix_time_s: float, id: str) -> list[LoadTarget]:
    """A target for each of its feeds; for each feed of the fleet where it names none."""
    feeds = {level.name: level.label for level in tree.levels if level.kind == "feed"}
    if missing := [tag for tag in target.feed_tags if tag not in feeds]:
        raise FlexMessageError(f"{missing[0]}: no such feed; there are {', '.join(list(feeds)[:10])}")
    interval, limit = target.interval, target.load_constraint
    start_s = unix_time_s if interval.start_time is None else interval.start_time.timestamp()
    end_s = None if interval.end_time is None else interval.end_time.timestamp()
    if end_s is not None and end_s <= start_s:
        raise FlexMessageError("interval: it ends before it starts")
    limit_w = None if limit is None else limit.value * WATTS_BY_UNIT[limit.unit]
    strategy: Literal["caps", "pause"] = "caps" if target.strategy.best_effort else "pause"
    is_immediate = interval.start_time is None
    return [
        LoadTarget(feeds[tag], limit_w, start_s, end_s, strategy, id, is_immediate) for tag in target.feed_tags or feeds
    ]
