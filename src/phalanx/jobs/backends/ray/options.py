"""Options of a job on Ray."""

from dataclasses import dataclass

from phalanx.errors import UsageError
from phalanx.jobs.backends.options import backend_option, option_names
from phalanx.jobs.spec import Job

PLACEMENT_STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")


@dataclass(frozen=True)
class RayOptions:
    """A job's options, checked."""

    address: str | None = backend_option(
        "Address of the dashboard.", "URL", shown_default="RAY_API_SERVER_ADDRESS, RAY_ADDRESS, else port 8265 here"
    )
    strategy: str | None = backend_option(
        "Placement strategy of the nodes.",
        "|".join(PLACEMENT_STRATEGIES),
        shown_default="STRICT_SPREAD with several nodes, else PACK",
    )
    patience: int = backend_option("Seconds to wait for machines.", "NUMBER", 600)
    max_restarts: int = backend_option("Maximum number of restarts.", "NUMBER", 10)
    python: str = backend_option("Python of the cluster's machines, which has Phalanx.", "PATH", "python")


def parse_options(job: Job) -> RayOptions:
    """A job's options; UsageError names the first that is wrong, and what would be right."""
    job_text, given = f"job {job.name}", job.backend_options
    names = option_names(RayOptions)
    for option in given:
        if option not in names:
            raise UsageError(f"{job_text}: ray has no option {option!r}; known are {', '.join(names)}")
    if given.get("strategy", PLACEMENT_STRATEGIES[0]) not in PLACEMENT_STRATEGIES:
        raise UsageError(
            f"{job_text}: option strategy={given['strategy']}: expected one of {', '.join(PLACEMENT_STRATEGIES)}"
        )
    for name in ("patience", "max-restarts"):
        if not given.get(name, "0").isascii() or not given.get(name, "0").isdigit():
            raise UsageError(f"{job_text}: option {name}={given[name]}: expected a whole number, 0 or more")
    return RayOptions(
        address=given.get("address"),
        strategy=given.get("strategy"),
        patience=int(given.get("patience", RayOptions.patience)),
        max_restarts=int(given.get("max-restarts", RayOptions.max_restarts)),
        python=given.get("python", RayOptions.python),
    )
