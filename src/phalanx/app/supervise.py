"""Supervise the workers of a run, of a recipe or of a script with a session, by an agent until it ends, and write its
result."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.app.prepare_run import PreparedRun, create_run
from phalanx.app.resume import ElasticWorld, read_last_attempt, read_last_step
from phalanx.app.task_evaluations import EvaluationProcess, TaskEvaluations, choose_device
from phalanx.app.trackers import feed_trackers
from phalanx.app.train_arguments import TrainArguments
from phalanx.autoconfig.memory_choice import next_smaller_micro_size
from phalanx.cluster import discover_machine
from phalanx.cluster.discovery import check_workers, find_local_gpu_ids
from phalanx.cluster.health import run_preflight
from phalanx.errors import ExitCode, PhalanxError, SubprocessError, UsageError, describe_os_error, is_storage_error
from phalanx.jobs.agent.attempt import NEVER_JOINED_MESSAGE
from phalanx.jobs.agent.fork_server_client import ForkServerClient
from phalanx.jobs.agent.leader_agent import LeaderAgent, RunOutcome
from phalanx.jobs.agent.leader_state import RecoveryPolicy
from phalanx.jobs.agent.node_group import NodeGroup
from phalanx.recipe import Recipe, load_recipe, load_resolved_recipe
from phalanx.recipe.load import dump_recipe
from phalanx.run import Event, Run, read_events, select_final_steps, sum_training_seconds
from phalanx.run.directory import RESULT_FORMAT, check_run_path, write_atomic, write_json
from phalanx.run.event_types import AttemptStarted, RunEnded, RunStatus, RunWarning
from phalanx.run.lock import lock_run
from phalanx.run.process_messages import Command
from phalanx.storage.stored_run import StoredRun, keep_at_url
from phalanx.telemetry.record import record_telemetry


def supervise_run(
    prepared: PreparedRun,
    fork_server: ForkServerClient,
    show: Callable[[Event], None],
    force: bool,
    node_group: NodeGroup | None = None,
    stored: StoredRun | None = None,
) -> RunOutcome:
    """Train a prepared run, on this node or on those of `node_group`, and write its result. `stored`: keeps it at a
    URL."""
    run = prepared.run
    recipe = prepared.recipe
    limits = prepared.recipe.fault_tolerance
    world_size = recipe.parallelism.world
    payload = {"run": str(run.path.absolute()), "folder": str(prepared.recipe_dir), "force": force}
    command = Command(function="phalanx.train.worker:run_worker", payload=payload)
    machine = discover_machine(device=recipe.device)
    # as many as NVIDIA's and AMD's drivers list
    expected_gpus = machine.device_count if machine.device == "cuda" else None
    num_local_devices = world_size // (1 if node_group is None else node_group.num_nodes)
    start = partial(EvaluationProcess, run, *choose_device(machine, num_local_devices))
    tasks = TaskEvaluations(run, recipe.evaluation, prepared.recipe_dir, start)

    def show_and_evaluate(event: Event) -> None:
        show(event)
        tasks.add_event(event)

    def wait_for_signal(seconds: float) -> bool:
        agent.signals.wait(seconds)
        return bool(agent.signals.received)

    def finish_tasks(outcome: RunOutcome) -> RunOutcome:
        is_done = outcome.code is ExitCode.DONE
        tasks.finish(is_done, wait_for_signal, agent.emit)
        if is_done and recipe.evaluation.tasks and tasks.newest_step:  # one may have been kept longer for them
            kept = {"run": str(run.path.absolute()), "keep": recipe.checkpoint.keep, "step": tasks.newest_step}
            with contextlib.suppress(PhalanxError, SubprocessError):
                fork_server.call("phalanx.train.checkpoint.checkpointer:remove_old_checkpoints", kept)
        return outcome

    agent = LeaderAgent(
        run,
        fork_server,
        show_and_evaluate,
        RecoveryPolicy(limits.max_restarts, limits.hang_timeout_s, limits.rejoin_after_s),
        node_group=node_group,
        preflight=lambda: run_preflight(run.path, expected_gpus),
        stored=stored,
    )
    if node_group is not None and node_group.min_nodes < node_group.num_nodes:
        given = load_recipe(run.recipe).recipe
        agent.world_divider = ElasticWorld(run, given, recipe, node_group.num_nodes, node_group.min_nodes)
    agent.on_check = lambda: tasks.poll(agent.emit)
    with (
        record_telemetry(run, lambda: find_local_gpu_ids(num_local_devices)),
        feed_trackers(run, recipe.trackers),
        tasks,
    ):
        opening_events = prepared.opening_events()
        return supervise_until_done(
            agent, world_size, command, prepared.first_attempt, opening_events, adjust_outcome=finish_tasks
        )


def train_script(
    arguments: TrainArguments, run: Run, show: Callable[[Event], None], fork_server: ForkServerClient | None = None
) -> RunOutcome:
    """Run the script of `arguments` as workers on this machine, and follow it to its end. `fork_server`: one that was
    started before; it is closed at the end."""
    if not Path(arguments.path).is_file():
        raise UsageError(f"{arguments.path}: no such file; expected a recipe or a script that calls phalanx.session")
    machine = discover_machine()
    world_size = arguments.nproc_per_node or machine.num_gpus or 1
    check_workers(machine, world_size)
    with fork_server or ForkServerClient() as server:
        return supervise_script(arguments, run, world_size, server, show)


def supervise_script(
    arguments: TrainArguments, run: Run, world_size: int, fork_server: ForkServerClient, show: Callable[[Event], None]
) -> RunOutcome:
    """Run a script with a loop of its own as `world_size` workers under our agent, and write the run's result."""
    script = Path(arguments.path)
    check_run_path(run.path)
    create_run(run)
    with keep_at_url(run, leads=True) as stored, lock_run(run) as note, contextlib.ExitStack() as stack:
        payload = {
            "script": str(script.absolute()),
            "arguments": list(arguments.overrides),
            "run": str(run.path.absolute()),
            "force": arguments.force,
        }
        command = Command(function="phalanx.train.worker:run_script_worker", payload=payload)

        def show_and_configure(event: Event) -> None:
            if isinstance(event, AttemptStarted):  # now the recipe is known
                recipe = load_resolved_recipe(run.resolved)
                limits = recipe.fault_tolerance
                agent.recovery = RecoveryPolicy(limits.max_restarts, limits.hang_timeout_s)
                if event.attempt == first_attempt:
                    stack.enter_context(feed_trackers(run, recipe.trackers))
            show(event)

        def adjust_outcome(outcome: RunOutcome) -> RunOutcome:
            if outcome.message != NEVER_JOINED_MESSAGE:
                return outcome
            return replace(outcome, message=f"{script}: {NEVER_JOINED_MESSAGE}")

        agent = LeaderAgent(run, fork_server, show_and_configure, stored=stored)
        agent.preload = "phalanx.app.session:preload_session"
        stack.enter_context(record_telemetry(run, lambda: find_local_gpu_ids(world_size)))
        warnings = [] if note is None else [RunWarning(text=note)]
        first_attempt = read_last_attempt(run) + 1
        return supervise_until_done(agent, world_size, command, first_attempt, warnings, adjust_outcome)


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
            if outcome.out_of_memory and agent.is_reduced:
                message = f"{outcome.message}; it was left with fewer nodes: start again with all of them"
                outcome = replace(outcome, code=ExitCode.UNFINISHED, message=message)
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
    restart = f"restarting with micro-batches of {micro} from the last good checkpoint; the digest will differ"
    if previous[1].determinism == "elastic":
        return f"{reason}: {restart}, also under determinism: elastic, which holds for one micro-batch only"
    return f"{reason}: {restart} by rounding"


def status_of(outcome: RunOutcome) -> RunStatus:
    """Return the status of a run for which no worker reported a result."""
    return "interrupted" if outcome.code is ExitCode.UNFINISHED else "failed"


def build_result(run: Run, outcome: RunOutcome) -> dict[str, Any]:
    """Build result.json from the worker's report, or from the events when there is none."""
    events = list(read_events(run.events))
    seconds = sum_training_seconds(events)
    num_starts = sum(isinstance(event, AttemptStarted) for event in events)
    if outcome.result is not None:
        return {**outcome.result, "duration_s": seconds}
    steps = read_last_step(run)
    counted_steps = [event for event in select_final_steps(events) if event.step <= steps and event.skip_reason is None]
    return {
        "format": RESULT_FORMAT,
        "status": status_of(outcome),
        "steps": steps,
        "final_loss": counted_steps[-1].loss if counted_steps else None,
        "num_units": sum(event.units for event in counted_steps),
        "duration_s": seconds,
        "num_restarts": max(0, num_starts - 1),
        "digest": None,
        "message": outcome.message,
    }
