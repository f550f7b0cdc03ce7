"""The base class of the recipe's parts, and types of their fields: numbers with limits, step counts, percentages."""

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
MAX_STEPS = 10**10
"""Steps of a run: four months at a millisecond a step."""
MOST_SAMPLES = 10**8
"""Samples of a step. `MAX_STEPS` times this is below 2^63, in which positions are counted."""
MOST_WORKERS = 10**6
MOST_THREADS = 1024
LONGEST_SEQUENCE = 1 << 24
LARGEST_VOCABULARY = 10**7
LARGEST_SIDE = 1 << 14
"""Pixels of an image's height or width."""
MAX_RANK_OR_MIB = 1 << 16
"""Rank of a matrix, and MiB of a bucket."""
MAX_RATE = 1e6
"""Limit of rates and weights, which are usually near 1."""

Count = Annotated[int, Field(gt=0, le=10**6), NUMBER_NOT_BOOL]
"""A number of things."""
Samples = Annotated[int, Field(gt=0, le=MOST_SAMPLES), NUMBER_NOT_BOOL]
Ranks = Annotated[int, Field(gt=0, le=MOST_WORKERS), NUMBER_NOT_BOOL]
Begin = Annotated[int, Field(ge=0, le=MAX_STEPS), NUMBER_NOT_BOOL]
"""A number of steps at the start of a run; may be 0."""
Rate = Annotated[float, Field(gt=0, le=MAX_RATE), NUMBER_NOT_BOOL]
Fraction = Annotated[float, Field(ge=0, lt=1), NUMBER_NOT_BOOL]


def _parse_steps(value: Any) -> Any:
    """Accept `100`, `"100 steps"` or `"1 step"`; anything else is left for pydantic to refuse."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*([0-9]{1,20})\s*(steps?)?\s*", value)):
        return int(match[1])
    return _number(value)


STEPS_REGEX = r"^\s*[0-9]+\s*(steps?)?\s*$"
_Steps = Annotated[int, Field(gt=0, le=MAX_STEPS)]

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
