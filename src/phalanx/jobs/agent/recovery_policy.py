"""What the agent does about a failed attempt: how often it restarts, and which workers may continue from memory."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RecoveryPolicy:
    """Limits on restarts, as in a recipe's `fault_tolerance`, and the size of a replica."""

    max_restarts: int = 3
    """Failed attempts in a row without progress before the run is given up."""
    hang_timeout_s: float = 600.0
    """Seconds without a heartbeat after which workers that seem to hang are restarted."""
    replica_size: int | None = None
    """Workers that together hold the whole state: when one of them is lost, the other replicas continue from memory.
    None: all workers restart."""
