"""The thermal model file: constants by kind of device, as `phalanx thermal fit` writes them and `check` reads them."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from phalanx.cluster.spec import Figure, Measure, StrictModel
from phalanx.recipe.field_types import NUMBER_NOT_BOOL, Count
from phalanx.recipe.load import to_plain_values
from phalanx.recipe.validation_errors import read_user_mapping, validate_value
from phalanx.recipe.yaml_loader import to_yaml
from phalanx.run.directory import write_output

Celsius = Annotated[float, Field(ge=-50, le=200), NUMBER_NOT_BOOL]


class KindConstants(StrictModel):
    """A kind of device: T = t0_c + r_k_per_w P when steady."""

    t0_c: Celsius
    """Core temperature without power, as a mean: inlet and what other parts add."""
    t0_over_inlet_k: Annotated[float, Field(ge=-50, le=100), NUMBER_NOT_BOOL] | None = None
    """T0 over the measured inlet, which then replaces t0_c; None where the inlet was not measured."""
    r_k_per_w: Figure
    """Resistance from inlet to core."""
    rmse_k: Measure
    max_power_w: Figure
    """Most power that was seen."""
    num_devices: Count
    num_samples: Count


class ThermalModelFile(StrictModel):
    """Kinds by name."""

    format: Literal[1] = 1
    kinds: dict[str, KindConstants]


def load_thermal_model(path: Path) -> ThermalModelFile:
    """Load the file at `path`. Raises RecipeError with a line for each problem."""
    value, locations = read_user_mapping(path, "`kinds:`; `phalanx thermal fit` writes such a file")
    return validate_value(value, locations, ThermalModelFile)


def save_thermal_model(model: ThermalModelFile, path: Path) -> None:
    """Write the file; whole, or not at all."""
    write_output(
        path,
        "# Thermal constants by kind of device: T = t0_c + r_k_per_w * P; `phalanx thermal fit` wrote them.\n"
        + to_yaml(to_plain_values(model, lambda name, field: False)),
    )
