"""The account of device time under the names of Google's library ml-goodput-measurement, and ETTR; with definitions.

Google's names are those of `GoodputType` and `BadputType`. Types that events do not separate are left out, and their
time is in the type that its definition names.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.observe.durations import RunDurations
from phalanx.observe.goodput import DeviceTime

ETTR_DEFINITION = (
    "effective training time ratio: wall time of steps that counted, without waiting, and of evaluations, divided by "
    "wall time from the first start to the end, without queueing and without the time between a clean stop and the "
    "next start"
)
GOODPUT_DEFINITIONS = {
    "TOTAL": "productive: steps that counted, without waiting for data and checkpoints, and evaluations",
}
BADPUT_DEFINITIONS = {
    "PROGRAM_STARTUP": (
        "from each start of the workers to its first step; includes what Google separates as TPU_INITIALIZATION, "
        "TRAINING_PREP and UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME"
    ),
    "DATA_LOADING_SYNC": "steps that counted waited for data",
    "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME": "training waited for checkpoints, on disk and in memory",
    "WASTED_PROGRESS_FROM_DISRUPTION": "steps and evaluations that were repeated after a restart or a rollback",
    "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION": (
        "from the last work of an attempt that died to the next start, or to the end if there was none"
    ),
    "OTHER": "alive and none of these: between steps, and ending",
}


@dataclass(frozen=True)
class GoodputEntry:
    """One type of Google's, in seconds x devices. `share`: of the allocation; None without one."""

    seconds: float
    share: float | None
    definition: str


def google_goodput_to_json(device_time: DeviceTime) -> dict[str, Any]:
    """The account by type: `goodput_time` and `badput_time` together are `total_elapsed_time`."""
    badput = {
        "PROGRAM_STARTUP": device_time.startup_s,
        "DATA_LOADING_SYNC": device_time.data_wait_s,
        "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME": device_time.checkpoint_stall_s,
        "WASTED_PROGRESS_FROM_DISRUPTION": device_time.wasted_s,
        "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION": device_time.unavailable_s,
        "OTHER": device_time.other_blocked_s,
    }
    return {
        "unit": "seconds x devices",
        "total_elapsed_time": device_time.allocated_s,
        "disruption_count": len(device_time.failure_costs),
        "goodput_time": _make_entries({"TOTAL": device_time.productive_s}, GOODPUT_DEFINITIONS, device_time),
        "badput_time": _make_entries(badput, BADPUT_DEFINITIONS, device_time),
    }


def ettr_to_json(durations: RunDurations) -> dict[str, Any]:
    """ETTR with its definition."""
    value = durations.productive_s / durations.wall_s if durations.wall_s > 0 else None
    return {"value": value, "definition": ETTR_DEFINITION}


def _make_entries(
    seconds: Mapping[str, float], definitions: Mapping[str, str], device_time: DeviceTime
) -> dict[str, dict[str, Any]]:
    allocated = device_time.allocated_s
    return {
        name: asdict(GoodputEntry(value, value / allocated if allocated > 0 else None, definitions[name]))
        for name, value in seconds.items()
    }
