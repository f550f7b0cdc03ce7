"""The keys `flex` and `openadr` of the section `power` of a fleet file: senders of load targets."""

from pathlib import Path

from pydantic import Field, field_validator

from phalanx.cluster.spec import StrictModel
from phalanx.fleet.power_units import Power


class FlexSettings(StrictModel):
    """A bus with load targets in the form of NVIDIA's DSX Flex."""

    url: str
    """Such as mqtts://bus.example.com, with TLS; mqtt:// is without, and needs `key_file`."""
    agent: str = Field(pattern=r"^[\w.-]+$")
    """Name of this guard on the bus, in the topics of its reports."""
    sender: str = Field("+", pattern=r"^(\+|[\w.-]+)$")
    """Name of the only sender; `+` for all users that the broker lets publish."""
    key_file: Path | None = None
    """Public keys (PEM) of which one has to have signed each target."""
    ca_file: Path | None = None
    credentials_file: Path | None = None
    """In the form of .netrc; else PHALANX_MQTT_USER and PHALANX_MQTT_PASSWORD."""


class OpenAdrSettings(StrictModel):
    """A VTN of OpenADR 3 and a program of it."""

    url: str
    """Such as https://vtn.example.com/openadr3/3.1.0."""
    program: str
    """The program's id."""
    level: str
    """Level of the fleet that its events limit, such as `feed a`."""
    interval_s: float = Field(60.0, ge=1, le=3600)
    """Seconds from one poll to the next."""
    simple_limits: list[Power] = Field(default_factory=list, max_length=3)
    """Limits for levels 1, 2 and 3 of SIMPLE events; without one such an event is refused."""
    credentials_file: Path | None = None
    """Client id and secret in the form of .netrc; else PHALANX_OPENADR_USER and PHALANX_OPENADR_PASSWORD."""

    @field_validator("simple_limits")
    @classmethod
    def _check_order(cls, limits: list[float]) -> list[float]:
        if limits != sorted(limits, reverse=True):
            raise ValueError("expected the highest limit first: level 1 is the mildest, 3 the most severe")
        return limits
