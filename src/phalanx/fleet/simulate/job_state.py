"""A job of the simulation, and how far it is."""

from dataclasses import dataclass, field

from phalanx.fleet.simulate.checkpointing import CheckpointCosts
from phalanx.fleet.simulate.node_pool import Placement
from phalanx.fleet.simulate.progress_clock import ProgressClock

NO_CHECKPOINTS = CheckpointCosts(float("inf"))


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """A job. The first fields are given, the others change while it is simulated."""

    submit_s: float
    devices: int
    work_s: float
    """Seconds that it runs without failures, saves and restarts."""
    costs: CheckpointCosts = NO_CHECKPOINTS
    kind: int = 0
    """Index of its kind of job."""
    activity: float = 1.0
    """Power above idle while it trains, over the highest."""
    clock: ProgressClock | None = None
    """How fast it progresses in hours with throttling; None: none of its accelerators throttles."""

    remaining_s: float = field(init=False)
    """Work that is not done, as of the start of the attempt."""
    attained_s: float = 0.0
    """Seconds that it had its devices."""
    first_start_s: float | None = None
    finish_s: float | None = None
    attempt_start_s: float | None = None
    """None while it waits."""
    placement: Placement = ()
    version: int = 0
    """Counts starts and stops: an event of an earlier attempt is void."""
    level: int = 0
    """Queue of least attained service."""
    order: float = 0.0
    """Position in that queue."""
    fair_key: float = float("-inf")
    """Position under finish-time fairness, as of the last round."""
    equal_share: float = 1.0
    """Share of the time on its devices that an equal share of the cluster is, as of the last round."""
    isolated_s: float = 0.0
    """Seconds that the work of ended attempts would have taken on equal shares."""
    num_stops: int = 0
    """Stops by failures."""
    waiting_since_s: float = 0.0

    def __post_init__(self) -> None:
        self.remaining_s = self.work_s

    def elapsed_s(self, now_s: float) -> float:
        """Return how long the running attempt would have taken without throttling until now."""
        start_s = self.attempt_start_s or 0.0
        first_step_s = start_s + self.costs.restart_s
        if self.clock is None or now_s <= first_step_s:
            return now_s - start_s
        return self.costs.restart_s + self.clock.progress_s(now_s) - self.clock.progress_s(first_step_s)

    def find_end_s(self, now_s: float) -> float:
        """Return when an attempt that starts now ends with all work done."""
        wall_s = self.costs.wall_seconds(self.remaining_s)
        if self.clock is None:
            return now_s + wall_s
        restart_s = self.costs.restart_s
        return self.clock.time_s(self.clock.progress_s(now_s + restart_s) + wall_s - restart_s)

    def progress_s(self, now_s: float) -> float:
        """Return the work done in the running attempt, without what saves block."""
        if self.attempt_start_s is None:
            return 0.0
        return max(0.0, self.elapsed_s(now_s) - self.costs.restart_s)

    def left_s(self, now_s: float) -> float:
        """Return the work that is not done."""
        return self.remaining_s - self.progress_s(now_s)

    def service_s(self, now_s: float) -> float:
        """Return the seconds that it had its devices."""
        return self.attained_s + (0.0 if self.attempt_start_s is None else now_s - self.attempt_start_s)
