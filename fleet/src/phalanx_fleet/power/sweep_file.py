"""What a sweep has measured, stored with the run."""

from dataclasses import dataclass, field
from pathlib import Path

from phalanx.errors import DataError
from phalanx.run.boot_clock import unix_now
from phalanx.run.directory import Run, write_json
from phalanx.run.fields import TypedMessage, read_as, to_fields
from phalanx.safe_files import read_json
from phalanx_fleet.power.speed_curve import SpeedCurve, SweepPoint

FILE_NAME = "power_sweep.json"


@dataclass(frozen=True)
class SweptCap:
    """What a job did at a cap. `rate`: steps a second; `draw_w` and `most_draw_w`: mean and most of a device, None
    without a sensor; `is_steady`: whether temperatures were steady, None without a sensor."""

    node_type: str
    cap_w: float
    rate: float
    draw_w: float | None
    most_draw_w: float | None
    is_steady: bool | None
    num_steps: int


class PowerSweep(TypedMessage, kw_only=False):
    """A sweep of a run."""

    caps: tuple[SweptCap, ...]
    time: float = field(default_factory=unix_now)

    def fit_curves(self) -> dict[str, SpeedCurve]:
        """Return the monotone curve of each node type. A device without a power sensor counts as drawing its cap.

        Raises:
            DataError: Fewer than 2 caps, values that are not positive, or a rate that falls by more than noise.
        """
        types = dict.fromkeys(each.node_type for each in self.caps)
        return {
            name: SpeedCurve.fit(
                [
                    SweepPoint(each.cap_w, each.rate, each.cap_w if each.draw_w is None else each.draw_w)
                    for each in self.caps
                    if each.node_type == name
                ]
            )
            for name in types
        }


def save_sweep(run: Run, sweep: PowerSweep) -> Path:
    """Write a sweep into the directory of its run."""
    path = run.path / FILE_NAME
    write_json(path, to_fields(sweep))
    return path


def load_sweep(run: Path) -> PowerSweep:
    """Read the sweep of the run at `run`. Raises DataError where there is none, or a damaged one."""
    path = run / FILE_NAME
    try:
        sweep: PowerSweep = read_as(PowerSweep, read_json(path))
    except FileNotFoundError:
        raise DataError(f"{path}: no sweep there; `phalanx power sweep FLEET {run} --yes` makes one") from None
    except (ValueError, OverflowError) as error:
        raise DataError(f"{path}: no sweep ({error})") from None
    return sweep
