"""The base class of the recipe's parts, and types of their fields: numbers, step counts, percentages."""

import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError


class ConfigModel(BaseModel):
    """Base of every part of a recipe: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def _number(value: Any) -> Any:
    """Refuse true and false, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "expected a number")
    return value


NUMBER_NOT_BOOL = BeforeValidator(_number)
"""Last in the annotation of each number that users write."""

Count = Annotated[int, Field(gt=0), NUMBER_NOT_BOOL]
"""A number of things."""
Begin = Annotated[int, Field(ge=0), NUMBER_NOT_BOOL]
"""A number of steps at the start of a run; may be 0."""
PositiveNumber = Annotated[float, Field(gt=0), NUMBER_NOT_BOOL]
NonNegativeNumber = Annotated[float, Field(ge=0), NUMBER_NOT_BOOL]
Fraction = Annotated[float, Field(ge=0, lt=1), NUMBER_NOT_BOOL]


def _parse_steps(value: Any) -> Any:
    """Accept `100`, `"100 steps"` or `"1 step"`; anything else is left for pydantic to refuse."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*([0-9]{1,20})\s*(steps?)?\s*", value)):
        return int(match[1])
    return _number(value)


STEPS_REGEX = r"^\s*[0-9]+\s*(steps?)?\s*$"
_Steps = Annotated[int, Field(gt=0)]

StepCount = Annotated[
    _Steps,
    BeforeValidator(
        _parse_steps, json_schema_input_type=_Steps | Annotated[str, StringConstraints(pattern=STEPS_REGEX)]
    ),
]
"""A number of optimizer steps, written `100` or `100 steps`."""


def check_finite(value: Any) -> Any:
    """Refuse numbers that JSON does not have: a builder in another process would get None for them."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"found {value}, expected finite numbers")
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in below:
        check_finite(each)
    return value


def _check_percent(value: str) -> str:
    if not 0 < float(value.strip().removesuffix("%")) <= 50:
        raise ValueError("expected a share above 0% and up to 50%")
    return value


PERCENT_REGEX = r"^\s*[0-9]+(\.[0-9]+)?\s*%\s*$"

PercentText = Annotated[str, StringConstraints(pattern=PERCENT_REGEX), AfterValidator(_check_percent)]
"""A share of the time, written `1%`."""
