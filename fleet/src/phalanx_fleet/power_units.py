"""A power with its unit, as people write it in files: `45 kW`."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from phalanx.recipe.validation_errors import describe_value

WATTS_BY_UNIT = {"W": 1.0, "kW": 1e3, "MW": 1e6}
POWER_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(W|kW|MW)")


def parse_power(value: Any) -> float:
    """Return the watts of a text such as "45 kW". ValueError for a number without a unit, or another unit."""
    found = POWER_PATTERN.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"found {describe_value(value)}, expected a power with its unit (W, kW or MW), such as 45 kW")
    return float(found[1]) * WATTS_BY_UNIT[found[2]]


Power = Annotated[
    float,
    BeforeValidator(parse_power, json_schema_input_type=str),
    Field(json_schema_extra={"type": "string", "format": "power"}),
]
