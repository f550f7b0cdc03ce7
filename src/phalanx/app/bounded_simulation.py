"""Simulate a fleet for the live page, within limits of days, seeds, variants, time and memory, in its own process.

Only that process imports the simulation, so that the server starts without it.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import PhalanxError, UsageError
from phalanx.process_lifetime import die_with_parent, prefer_oom_kill

MAX_VARIANTS = 4
MAX_DAYS = 366.0
MAX_SEEDS = 5
TIME_LIMIT_S = 60.0
MEMORY_LIMIT_BYTES = 4 << 30
"""Of address space, of which numpy reserves more than it uses."""


@dataclass(frozen=True)
class SimulationRequest:
    """What to simulate: the fleet file as it is, and each variant of it."""

    fleet: str
    variants: Sequence[str]
    days: float
    seeds: int


def check_request(request: SimulationRequest) -> None:
    """Raise UsageError for a request beyond the limits."""
    if len(request.variants) > MAX_VARIANTS:
        raise UsageError(f"{len(request.variants)} variants, expected at most {MAX_VARIANTS}")
    if not 0 < request.days <= MAX_DAYS:
        raise UsageError(f"{request.days:g} days, expected more than 0 and at most {MAX_DAYS:g}")
    if not 1 <= request.seeds <= MAX_SEEDS:
        raise UsageError(f"{request.seeds} seeds, expected 1 to {MAX_SEEDS}")


def simulate_bounded(request: SimulationRequest, time_limit_s: float = TIME_LIMIT_S) -> str:
    """Return the page of a simulation, without its frame. UsageError beyond a limit, or with what is wrong."""
    check_request(request)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "phalanx.app.bounded_simulation"],
            input=json.dumps(request.__dict__),
            capture_output=True,
            text=True,
            timeout=time_limit_s,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"took more than {time_limit_s:g} s; ask for fewer days, seeds or variants") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise UsageError(f"the simulation ended with {lines[-1] if lines else f'exit code {done.returncode}'}")
    answer = json.loads(done.stdout)
    if "problem" in answer:
        raise UsageError(answer["problem"])
    return str(answer["body"])


def answer_request(request: SimulationRequest) -> dict[str, str]:
    """Simulate in this process. Variants may not name files that the fleet file does not."""
    from phalanx.app.simulate import simulate_variants
    from phalanx.app.simulation_page import render_simulation_body

    try:
        days = min(request.days, MAX_DAYS)
        variants = simulate_variants(
            Path(request.fleet),
            request.variants,
            None,
            request.seeds,
            [f"simulate.days={days:g}"],
            reads_more_files=False,
        )
    except PhalanxError as error:
        return {"problem": str(error)}
    except MemoryError:
        return {"problem": f"needs more than {MEMORY_LIMIT_BYTES >> 30} GiB; ask for fewer days or nodes"}
    return {"body": render_simulation_body(variants)}


if __name__ == "__main__":
    die_with_parent(os.getppid())
    prefer_oom_kill()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    print(json.dumps(answer_request(SimulationRequest(**json.load(sys.stdin)))))
