"""Train by a script that calls `phalanx.session`, as workers of an agent on this machine."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from phalanx.app.budget import BudgetGuard, load_prices, stop_at_budget
from phalanx.app.prepare_run import create_run
from phalanx.app.resume import read_last_attempt
from phalanx.app.supervise import supervise_until_done
from phalanx.app.trackers import feed_trackers
from phalanx.app.train_arguments import TrainArguments
from phalanx.cluster import discover_machine
from phalanx.cluster.discovery import check_workers
from phalanx.errors import UsageError
from phalanx.jobs.agent.attempt import NEVER_JOINED_MESSAGE
from phalanx.jobs.agent.fork_server_client import ForkServerClient
from phalanx.jobs.agent.leader_agent import LeaderAgent, RunOutcome
from phalanx.jobs.agent.recovery_policy import RecoveryPolicy
from phalanx.recipe import load_resolved_recipe
from phalanx.run import Event, Run
from phalanx.run.directory import check_run_path
from phalanx.run.event_types import AttemptStarted, RunWarning
from phalanx.run.lock import lock_run
from phalanx.run.process_messages import Command


def train_script(arguments: TrainArguments, run: Run, show: Callable[[Event], None]) -> RunOutcome:
    """Run the script of `arguments` as workers on this machine, and follow it to its end."""
    if not arguments.path.is_file():
        raise UsageError(f"{arguments.path}: no such file; expected a recipe or a script that calls phalanx.session")
    machine = discover_machine()
    world_size = arguments.nproc_per_node or machine.num_gpus or 1
    check_workers(machine, world_size)
    with ForkServerClient() as fork_server:
        return supervise_script(arguments, run, world_size, fork_server, show)


def supervise_script(
    arguments: TrainArguments, run: Run, world_size: int, fork_server: ForkServerClient, show: Callable[[Event], None]
) -> RunOutcome:
    """Run a script with a loop of its own as `world_size` workers under our agent, and write the run's result."""
    script = arguments.path
    check_run_path(run.path)
    create_run(run)
    with lock_run(run) as note, contextlib.ExitStack() as stack:
        payload = {
            "script": str(script.absolute()),
            "arguments": list(arguments.overrides),
            "run": str(run.path.absolute()),
            "force": arguments.force,
        }
        command = Command(function="phalanx.train.worker:run_script_worker", payload=payload)

        guards: list[BudgetGuard] = []

        def show_and_configure(event: Event) -> None:
            if isinstance(event, AttemptStarted):  # now the recipe is known
                recipe = load_resolved_recipe(run.resolved)
                limits = recipe.fault_tolerance
                agent.recovery = RecoveryPolicy(limits.max_restarts, limits.hang_timeout_s)
                if event.attempt == first_attempt:
                    stack.enter_context(feed_trackers(run, recipe.trackers))
                    if recipe.budget is not None:
                        guards.append(BudgetGuard(run, recipe.budget, world_size, load_prices()))
                        agent.find_stop_reason = partial(guards[0].find_stop_reason, agent.warn)
            show(event)

        def adjust_outcome(outcome: RunOutcome) -> RunOutcome:
            outcome = stop_at_budget(outcome, guards[0] if guards else None)
            if outcome.message != NEVER_JOINED_MESSAGE:
                return outcome
            return replace(outcome, message=f"{script}: {NEVER_JOINED_MESSAGE}")

        agent = LeaderAgent(run, fork_server, show_and_configure)
        agent.preload = "phalanx.app.session:preload_session"
        warnings = [] if note is None else [RunWarning(text=note)]
        first_attempt = read_last_attempt(run) + 1
        return supervise_until_done(agent, world_size, command, first_attempt, warnings, adjust_outcome)
