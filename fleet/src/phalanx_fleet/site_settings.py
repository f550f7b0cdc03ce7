"""The site of a simulation: `simulate.site` of a fleet file. Cooling, water, price and carbon, fixed or by hour."""

import re
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from phalanx.cluster.spec import Measure, StrictModel
from phalanx.recipe.field_types import NUMBER_NOT_BOOL
from phalanx_fleet.thermal.plant_settings import CoolingPlant, Degrees, Share

UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
CURRENCY_REGEX = r"^[\w$€£¥₩₹]{1,10}$"
QUANTITY_PATTERN = re.compile(r"\W*\d((?!\.[A-Za-z]\w*$).)*")
"""A number with or without a unit, such as 8 ct or 0,08; not 2023.csv."""
PLANT_KEYS = ("pue", "water_l_per_kwh", "conversion_efficiency")
"""Keys that a plant has the answer to."""


def _check_path(text: str) -> str:
    if QUANTITY_PATTERN.fullmatch(text):
        raise ValueError(f'found "{text}", expected a number without a unit, such as 0.08, or a file such as hours.csv')
    return text


HourlyPath = Annotated[str, AfterValidator(_check_path)]
"""Path of a CSV file where a number can stand as well. A file that is called like a number is {file: "2023"}."""


class HourlyFile(StrictModel):
    """A CSV file with a row for each hour. Times are UTC, or have an offset."""

    file: str
    """Path, relative to the fleet file."""
    site: str | None = None
    """Only rows of this site, by the column `site`."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns by the name that Phalanx has for them, where they differ, such as {time: hour_utc}."""


class SiteConditions(StrictModel):
    """The building around the machines: by a plant and its weather, or by constants of a year."""

    plant: CoolingPlant | None = None
    """Cooling plant, with `weather`; by default the fleet's `cooling`."""
    weather: str | HourlyFile | None = None
    """Hours of outside air: a CSV file with the columns time, dry_bulb_c, and wet_bulb_c or relative_humidity_pct."""
    start: str | date | None = None
    """First hour of the simulation in the hourly files, such as 2023-07-01; by default that of the first file."""
    supply_limit_c: Degrees | None = None
    """Supply temperature of which the hours above are counted; by default the plant's set point."""
    pue: Annotated[float, Field(ge=1, le=10), NUMBER_NOT_BOOL] = 1.2
    """Power usage effectiveness, fixed: energy of the site over that of the IT equipment, metered where it is fed."""
    water_l_per_kwh: Measure = 1.8
    """Water usage effectiveness, fixed: liters of water of the site per kWh of the IT equipment. 1.8 is the mean of a
    survey of the United States (The Green Grid)."""
    price_per_kwh: Measure | HourlyPath | HourlyFile = 0.08
    """A number, or hours: a CSV file with the columns time and price_per_kwh or price_per_mwh."""
    currency: Annotated[str, Field(pattern=CURRENCY_REGEX)] = "USD"
    carbon_g_per_kwh: Measure | HourlyPath | HourlyFile = 400.0
    """A number, or hours: a CSV file with the columns time and carbon_g_per_kwh."""
    conversion_efficiency: Share = 1.0
    """Power of the nodes over power of their supply."""
    rack_overhead_w: Measure = 0.0
    """Constant power of switches and pumps of a rack."""

    @model_validator(mode="after")
    def _check_plant(self) -> Self:
        if self.weather is None:
            if self.plant is not None:
                raise ValueError("plant needs weather; add `weather: FILE.csv` with time, dry_bulb_c and wet_bulb_c")
            if self.supply_limit_c is not None:
                raise ValueError("supply_limit_c needs weather; add `weather: FILE.csv` with time and dry_bulb_c")
        elif given := [key for key in PLANT_KEYS if key in self.model_fields_set]:
            raise ValueError(f"{given[0]}: is computed by the plant for each hour of weather; keep one of the two")
        if self.find_start_hour() is not None and not self.list_files():
            raise ValueError("start: is the first hour of hourly files, and there are none; leave it out")
        return self

    def list_files(self) -> list[str]:
        """Return the paths of hourly files."""
        values = (self.weather, self.price_per_kwh, self.carbon_g_per_kwh)
        files = [value.file if isinstance(value, HourlyFile) else value for value in values]
        return [each for each in files if isinstance(each, str)]

    def find_start_hour(self) -> int | None:
        """Return hours since the epoch at `start`; None without it. ValueError for a text that is no time."""
        if self.start is None:
            return None
        try:
            found = datetime.fromisoformat(str(self.start))
        except ValueError:
            raise ValueError(
                f"start: found {self.start}, expected a time such as 2023-07-01 or 2023-07-01T06"
            ) from None
        return ((found if found.tzinfo else found.replace(tzinfo=UTC)) - UNIX_EPOCH) // timedelta(hours=1)
