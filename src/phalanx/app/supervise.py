"""Supervise the workers of a run by an agent until it ends, and write its result."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from phalanx.app.budget import BudgetGuard, load_prices, stop_at_budget
from phalanx.app.prepare_run import PreparedRun
from phalanx.app.resume import read_last_attempt, read_last_step
from phalanx.app.trackers import feed_trackers
from phalanx.autoconfig.micro_batch import next_smaller_micro_size
from phalanx.cluster import discover_machine
from phalanx.cluster.gpu_energy import find_local_gpu_ids, read_local_gpu_joules
from phalanx.cluster.health import run_preflight
from phalanx.errors import ExitCode, describe_os_error, is_storage_error
from phalanx.fleet.telemetry.record import record_telemetry
from phalanx.jobs.agent.fork_server_client import ForkServerClient
from phalanx.jobs.agent.hardware_monitor import HardwareMonitor
from phalanx.jobs.agent.leader_agent import LeaderAgent, RunOutcome
from phalanx.jobs.agent.node_group import NodeGroup
from phalanx.jobs.agent.recovery_policy import RecoveryPolicy
from phalanx.recipe import Recipe, ResolvedRecipe, dump_recipe, load_recipe, load_resolved_recipe
from phalanx.run import Event, Run, read_events, select_final_steps, sum_training_seconds
from phalanx.run.directory import RESULT_FORMAT, write_atomic, write_json
from phalanx.run.event_types import AttemptStarted, EnergyUsed, RunEnded, RunStatus, RunWarning
from phalanx.run.process_messages import Command


def supervise_run(
    prepared: PreparedRun,
    fork_server: ForkServerClient,
    show: Callable[[Event], None],
    force: bool,
    node_group: NodeGroup | None = None,
) -> RunOutcome:
    """Train a prepared run, on this node or on those of `node_group`, and write its result."""
    run, recipe = prepared.run, prepared.recipe
    world_size = recipe.parallelism.world
    payload = {"run": str(run.path.absolute()), "folder": str(prepared.recipe_dir), "force": force}
    command = Command(function="phalanx.train.worker:run_worker", payload=payload)
    machine = discover_machine(device=recipe.device)
    # as many as NVIDIA's and AMD's drivers list
    expected_gpus = machine.device_count if machine.device == "cuda" else None
    agent = LeaderAgent(
        run,
        fork_server,
        show,
        RecoveryPolicy(
            recipe.fault_tolerance.max_restarts,
            recipe.fault_tolerance.hang_timeout_s,
            elastic_replica_size(recipe, machine.device),
        ),
        node_group=node_group,
        hardware=HardwareMonitor(
            preflight=lambda: run_preflight(run.path, expected_gpus),
            # without GPUs in use, do not query them
            meter=read_local_gpu_joules if machine.num_gpus else lambda count: None,
        ),
    )
    num_local_devices = world_size // (1 if node_group is None else node_group.num_nodes)
    with record_telemetry(run, lambda: find_local_gpu_ids(num_local_devices)), feed_trackers(run, recipe.trackers):
        guard = None
        if recipe.budget is not None:
            startup_s = 0.0 if prepared.resolved is None else prepared.resolved.duration_s
            guard = BudgetGuard(run, recipe.budget, world_size, load_prices(), startup_s)
            agent.find_stop_reason = partial(guard.find_stop_reason, agent.warn)
        return supervise_until_done(
            agent,
            world_size,
            command,
            prepared.first_attempt,
            prepared.opening_events(),
            lambda outcome: stop_at_budget(outcome, guard),
        )


def elastic_replica_size(recipe: ResolvedRecipe, device: str) -> int | None:
    """Return the workers of a replica, if the surviving replicas can continue without it; else None.

    They can under `determinism: elastic`: each replica holds the whole state, and sums do not depend on the number of
    replicas. On the CPU only: NCCL does not report a lost rank in the same way.
    """
    parallelism = recipe.parallelism
    if parallelism.replicate == 1 or recipe.determinism != "elastic" or device != "cpu":
        return None
    return parallelism.world // parallelism.replicate


def supervise_until_done(
    agent: LeaderAgent,
    world_size: int,
    command: Command,
    first_attempt: int,
    opening_events: Sequence[Event] = (),
    adjust_outcome: Callable[[RunOutcome], RunOutcome] = lambda outcome: outcome,
) -> RunOutcome:
    """Supervise a run until it ends, and write its result. If memory runs out, restart with smaller micro-batches.

    `adjust_outcome` may replace the outcome.
    """
    run, outcome = agent.run, None
    try:
        with agent:
            for event in opening_events:
                agent.emit(event)
            outcome = agent.supervise(world_size, command, first_attempt)
            while (
                outcome.out_of_memory and not agent.stopping and (message_text := shrink_micro_batch(run)) is not None
            ):
                agent.emit(RunWarning(text=message_text))
                outcome = agent.supervise(world_size, command, read_last_attempt(run) + 1)
            outcome = adjust_outcome(outcome)
            if outcome.result is None:
                agent.emit(RunEnded(status=status_of(outcome), step=read_last_step(run)))
        write_json(run.result, build_result(run, outcome))
    except OSError as error:
        if outcome is None or not is_storage_error(error):
            raise
        outcome_text = f"{outcome.message}; " if outcome.message else ""
        code = ExitCode.UNFINISHED if outcome.code is ExitCode.DONE else outcome.code
        message = f"{outcome_text}cannot write the run's events and result: {describe_os_error(error)}"
        return replace(outcome, code=code, message=message)
    return outcome


def shrink_micro_batch(run: Run) -> str | None:
    """Set the next smaller micro-batch in a run that ran out of memory; return the warning about it.

    None where the recipe sets the micro-batch, or where none is smaller.
    """
    if not run.resolved.is_file():
        return None
    previous = load_recipe(run.recipe).recipe, load_resolved_recipe(run.resolved)
    if previous[0].batch.micro_size != "auto" or (micro := next_smaller_micro_size(previous[1])) is None:
        return None
    previous_micro, values = previous[1].batch.micro_size, previous[1].model_dump()
    values["batch"]["micro_size"] = micro
    reason = f"micro-batches of {previous_micro} ran out of memory in step {read_last_step(run) + 1}"
    plan = run.read_json_or_empty(run.plan)
    for choice in plan.get("auto_choices", []):
        if choice["key"] == "batch.micro_size":
            choice |= {"value": micro, "reason": reason}
    write_atomic(run.resolved, dump_recipe(Recipe.model_validate(values)))
    write_json(run.plan, plan)
    message_text = (
        f"{reason}: restarting with micro-batches of {micro} from the last good checkpoint; the digest will differ"
    )
    if previous[1].determinism == "elastic":
        return f"{message_text}, also under determinism: elastic, which holds for one micro-batch only"
    return f"{message_text} by rounding"


def status_of(outcome: RunOutcome) -> RunStatus:
    """Return the status of a run for which no worker reported a result."""
    return "interrupted" if outcome.code is ExitCode.UNFINISHED else "failed"


def build_result(run: Run, outcome: RunOutcome) -> dict[str, Any]:
    """Build result.json from the worker's report, or from the events when there is none."""
    events = list(read_events(run.events))
    seconds = sum_training_seconds(events)
    energy_events = [event.energy_j for event in events if isinstance(event, EnergyUsed)]
    energy = {"energy_j": sum(energy_events)} if energy_events else {}
    starts = [event for event in events if isinstance(event, AttemptStarted)]
    num_scale_ups = sum(event.scaled_up for event in starts)
    if outcome.result is not None:
        result = {**outcome.result, "duration_s": seconds, **energy}
        if num_scale_ups:  # these restarts lost nothing
            result["num_restarts"] -= num_scale_ups
        return result
    steps = read_last_step(run)
    counted_steps = [event for event in select_final_steps(events) if event.step <= steps and event.skip_reason is None]
    facts: dict[str, Any] = {"format": RESULT_FORMAT, "status": status_of(outcome), "steps": steps}
    facts |= {
        "final_loss": counted_steps[-1].loss if counted_steps else None,
        "num_units": sum(event.units for event in counted_steps),
    }
    facts |= {"duration_s": seconds, "num_restarts": max(0, len(starts) - num_scale_ups - 1), "digest": None}
    return {**facts, **energy, "message": outcome.message}
