"""The `simulate` section of a fleet file: jobs, failures, repairs, checkpoints and the site."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from phalanx.cluster.spec import Measure, StrictModel
from phalanx.recipe.field_types import NUMBER_NOT_BOOL
from phalanx_fleet.site_settings import SiteConditions

FailureLevel = Literal["node", "rack", "row", "feed"]
NODE_RATE_KEYS = ("per_1000_node_days", "per_1000_device_years", "batch_factors", "age_factors")
RATE_KEYS = ("per_1000_node_days", "per_1000_device_years", "per_1000_level_years")
PolicyName = Literal["fifo", "srtf", "las"]
Share = Annotated[float, Field(ge=0, le=1), NUMBER_NOT_BOOL]
Positive = Annotated[float, Field(gt=0, le=1e12), NUMBER_NOT_BOOL]
Deviation = Annotated[float, Field(ge=0, le=10), NUMBER_NOT_BOOL]
"""Of a logarithm: at 10 one of 20 is over 1e8 times the median."""
REPLAY_CLASS = "replay"
"""Kind of job that jobs of a trace are, with its REPLAY_KEYS."""
REPLAY_KEYS = ("checkpoint", "activity", "speed_by_cap")
"""Keys of a kind of job that jobs of a trace have. A trace says when and how long they run, and on how much."""


class CheckpointEntry(StrictModel):
    """How jobs save."""

    mode: Literal["sync", "async"] = "sync"
    """A synchronous save blocks training for `save_s`, an asynchronous one for `stall_s`."""
    interval_s: Positive | Literal["daly"] = "daly"
    """Productive seconds between saves; `daly`: the optimum for the failure rate of the job's nodes."""
    save_s: Measure = 60.0
    stall_s: Measure = 2.0
    restart_s: Measure = 300.0
    """From a start to the first step."""


class JobClassEntry(StrictModel):
    """Jobs of one kind, from distributions."""

    node_type: str | None = None
    """Kind of node that they run on; by default the fleet's first."""
    devices: dict[Annotated[int, Field(gt=0)], Positive] = Field(default_factory=lambda: {8: 1.0}, min_length=1)
    """Numbers of accelerators, with the weight of each."""
    per_day: Measure = 0.0
    """Jobs submitted per day, as a Poisson process."""
    count: int = Field(0, ge=0)
    """Jobs submitted at the start."""
    median_h: Positive = 1.0
    """Median hours of work of a log-normal distribution."""
    hours: dict[Annotated[int, Field(gt=0)], Positive] = Field(default_factory=dict)
    """Median hours by number of accelerators, instead of `median_h`."""
    sigma: Deviation = 0.0
    """Standard deviation of the logarithm of the hours; 0: all are equal."""
    activity: Share = 0.9
    """Mean over jobs of the power above idle while they train, as a share of the highest."""
    activity_spread: Measure = 0.0
    """1 / (a + b) of the Beta distribution of the activity over jobs; 0: all are equal."""
    speed_by_cap: dict[Annotated[float, Field(gt=0.1, le=1)], Annotated[float, Field(gt=0, le=1.5)]] = Field(
        default_factory=dict
    )
    """Speed under power caps over the speed without, such as {0.6: 0.86, 0.8: 0.97, 1: 1} of `phalanx power sweep`,
    with straight lines between; by default, and below the lowest cap, (P - P idle)^(1/2.5)."""
    checkpoint: CheckpointEntry = CheckpointEntry()

    @model_validator(mode="after")
    def _check_hours(self) -> Self:
        if self.hours and (missing := sorted(set(self.devices).difference(self.hours))):
            raise ValueError(f"hours: none for {missing[0]} accelerators, which `devices` has")
        if unused := sorted(set(self.hours).difference(self.devices)):
            raise ValueError(f"hours: {unused[0]} accelerators are none of `devices`; add them there with their weight")
        return self


class FailureEntry(StrictModel):
    """Failures of one cause: of a node, or of all nodes of a rack, row or feed at once."""

    level: FailureLevel = "node"
    per_1000_node_days: Measure = 0.0
    per_1000_device_years: Measure = 0.0
    per_1000_level_years: Measure = 0.0
    """Failures of 1,000 racks, rows or feeds in a year. Only with such a `level`."""
    repair_share: Share = 1.0
    """Share of failures after which the node is repaired; after others it can be used again at once."""
    repair_h: Positive = 24.0
    """Median hours of a repair."""
    repair_sigma: Deviation = 0.5
    batch_factors: dict[str, Measure] = Field(default_factory=dict)
    """Factors of the rate for nodes of batches."""
    age_factors: dict[Annotated[float, Field(ge=0, le=1000)], Measure] = Field(default_factory=dict)
    """Factors of the rate from an age in years on."""

    @model_validator(mode="after")
    def _check_level(self) -> Self:
        if not self.model_fields_set.intersection(RATE_KEYS):
            raise ValueError(f"has no rate; expected {' or '.join(RATE_KEYS)}")
        wrong = NODE_RATE_KEYS if self.level != "node" else ("per_1000_level_years",)
        if given := sorted(self.model_fields_set.intersection(wrong)):
            right = "per_1000_level_years" if self.level != "node" else "level: rack, row or feed"
            raise ValueError(f"{given[0]} is not for level: {self.level}; expected {right}")
        return self


class BatchEntry(StrictModel):
    """Racks that were bought together."""

    racks: str
    """Their names, such as r[01-04], or r[01-04],s2."""
    age_years: Measure = 0.0
    """Age at the start."""


class SimulationSettings(StrictModel):
    """What `phalanx simulate` needs of a fleet besides its nodes."""

    days: Annotated[float, Field(gt=0), NUMBER_NOT_BOOL] = 365.0
    seeds: int = Field(5, ge=1, le=1000)
    """Simulations, each with random numbers of its own."""
    policy: PolicyName = "fifo"
    spares: Share = 0.0
    """Share of the nodes that is kept back for those in repair."""
    power_cap: Annotated[float, Field(gt=0.1, le=1), NUMBER_NOT_BOOL] = 1.0
    """Power cap of each accelerator, as a share of its highest power."""
    jobs: dict[str, JobClassEntry] = Field(default_factory=dict)
    failures: dict[str, FailureEntry] = Field(default_factory=dict)
    batches: dict[str, BatchEntry] = Field(default_factory=dict)
    site: SiteConditions = SiteConditions()

    @model_validator(mode="after")
    def _check_jobs(self) -> Self:
        for name, entry in self.jobs.items():
            if name != REPLAY_CLASS and not entry.model_fields_set.intersection({"count", "per_day"}):
                raise ValueError(f"jobs.{name}: has no jobs; expected count or per_day")
        return self

    @model_validator(mode="after")
    def _check_batches(self) -> Self:
        for name, entry in self.failures.items():
            for batch in entry.batch_factors:
                if batch not in self.batches:
                    known = ", ".join(self.batches) or "none"
                    raise ValueError(f"failures.{name}.batch_factors: {batch}: no such batch; there are {known}")
        return self
