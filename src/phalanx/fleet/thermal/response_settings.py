"""What counts as a fault of the cooling: key `cooling_response` of the nodes file."""

from typing import Annotated

from pydantic import Field

from phalanx.cluster.spec import StrictModel
from phalanx.recipe.field_types import NUMBER_NOT_BOOL


class CoolingResponseSettings(StrictModel):
    """Limits of what is usual."""

    min_flow_share: Annotated[float, Field(gt=0, lt=1), NUMBER_NOT_BOOL] = 0.2
    """Of its usual flow, below which a rack or CDU has lost it."""
