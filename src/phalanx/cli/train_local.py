"""What `phalanx train` prints around a run, on this machine or as one worker of an outside launcher."""

import contextlib
import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import TextIO

from phalanx.app.session import DeferredDisplay, supervise_script
from phalanx.app.train import (
    PreparedRun,
    RunRequest,
    check_start,
    describe_finished,
    find_machine,
    prepare_run,
    supervise_run,
)
from phalanx.app.train_arguments import TrainArguments
from phalanx.cli.data import show_progress
from phalanx.cluster import discover_machine
from phalanx.cluster.discovery import check_workers
from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.formatting import format_count, format_duration
from phalanx.jobs.agent.fork_server_client import ForkServerClient, call_timeout
from phalanx.jobs.agent.node_agent import NodeAgent, report_departure
from phalanx.jobs.agent.node_group import LocalNode, NodeGroup
from phalanx.observe.progress import make_display
from phalanx.observe.run_progress import read_run_facts
from phalanx.recipe import dump_recipe, num_workers_for
from phalanx.recipe.load import LoadedRecipe
from phalanx.run import EventLog, Run
from phalanx.run.authentication import load_token
from phalanx.run.control_channel import ControlServer
from phalanx.run.directory import check_run_path
from phalanx.run.node_env import NodeEnv
from phalanx.std_streams import escape_control_chars, word_of

LOCK_TIMEOUT_S = 300.0
"""Seconds for which a run on several nodes waits for the lock of its former leader. A leader without network holds
it until it notices, and on a network file system until the lease of the lock ends."""


def train_locally(arguments: TrainArguments, dry_run: bool, out: TextIO, node_env: NodeEnv) -> int:
    """Start a run under our own agent and follow it; return its exit code. With several nodes this is the leading one,
    and `nproc_per_node` workers are started on each."""
    loaded, nproc_per_node = arguments.load_recipe(), arguments.nproc_per_node
    loaded.check_required()
    run = arguments.find_run(loaded.recipe.name)
    check_run_path(run.path)
    if not dry_run and (finished_text := describe_finished(run, loaded.recipe)):
        print(finished_text, file=out)
        return int(ExitCode.DONE)
    if node_env.num_nodes == 1:  # of several the others hear of it, below
        check_start(loaded, nproc_per_node, begins=not run.has_checkpoint())
    with (
        ForkServerClient(call_timeout_s=call_timeout(loaded.recipe.fault_tolerance.hang_timeout_s)) as fork_server,
        contextlib.ExitStack() as stack,
    ):
        node_group = stack.enter_context(open_node_group(fork_server, node_env))
        num_workers = count_workers(loaded, nproc_per_node, node_env.num_nodes)
        with show_progress() as progress:
            prepared = stack.enter_context(
                prepare_run(
                    RunRequest(loaded, run, num_workers, node_env.num_nodes, arguments.force),
                    fork_server,
                    progress,
                    write=not dry_run,
                    lock_timeout_s=LOCK_TIMEOUT_S if node_env.num_nodes > 1 else 0.0,
                )
            )
        print(escape_control_chars(format_introduction(prepared)), file=out)
        if dry_run:
            print(dump_recipe(prepared.recipe), end="")
            node_group.exit_code = ExitCode.DONE
            return int(ExitCode.DONE)
        display = make_display(out, prepared.recipe.steps, read_run_facts(run))
        stack.callback(display.close)
        outcome = supervise_run(prepared, fork_server, display.show_event, arguments.force, node_group)
        node_group.exit_code = outcome.code
    if outcome.message:
        print(f"error: {escape_control_chars(outcome.message)}", file=out)
    print(escape_control_chars(format_conclusion(run, outcome.code, arguments)), file=out)
    return int(outcome.code)


@contextlib.contextmanager
def open_node_group(fork_server: ForkServerClient, node_env: NodeEnv) -> Iterator[NodeGroup]:
    """All nodes of a run, of which this is the leading one. When this ends with an error, the others end with its
    code."""
    token = load_token() if node_env.leader_address is not None else b""
    local_node = LocalNode(fork_server.control, fork_server.events, fork_server.heartbeat_table, token)
    with contextlib.ExitStack() as stack:
        server = None
        if node_env.leader_address is not None:
            server = stack.enter_context(ControlServer(node_env.leader_address, token))
        node_group = stack.enter_context(NodeGroup(local_node, node_env.num_nodes, server))
        try:
            yield node_group
        except PhalanxError as error:
            node_group.exit_code = error.code
            raise


def count_workers(loaded: LoadedRecipe, nproc_per_node: int | None, num_nodes: int) -> int | None:
    """Workers of all nodes together; None leaves it to the recipe and this machine alone. UsageError when they cannot
    be shared evenly."""
    if num_nodes == 1:
        return nproc_per_node
    workers_per_node = nproc_per_node or find_machine(loaded).num_gpus or 1
    total = (
        workers_per_node * num_nodes
        if nproc_per_node is not None
        else num_workers_for(loaded.recipe, workers_per_node * num_nodes)
    )
    if total % num_nodes:
        raise UsageError(
            f"{total} workers, as the recipe's parallelism requires, cannot be divided among {num_nodes} nodes"
        )
    return total


def run_node_agent(arguments: TrainArguments, dry_run: bool, out: TextIO, node_env: NodeEnv) -> int:
    """Run the agent of a node that does not lead; return the run's exit code.

    Raises RecipeError at once for a recipe that is wrong: the leading node ends because of it before another node can
    ask. The same holds for a run with nothing left to do.
    """
    try:
        loaded = arguments.load_recipe()
        run = arguments.find_run(loaded.recipe.name)
        if not dry_run and (finished_text := describe_finished(run, loaded.recipe)):
            print(finished_text, file=out)
            return int(ExitCode.DONE)
        with NodeAgent(node_env, load_token(), out, nproc_per_node=arguments.nproc_per_node) as node_agent:
            return int(node_agent.serve())
    except PhalanxError as error:
        with contextlib.suppress(UsageError):  # without a token no connection can be made
            report_departure(node_env, load_token(), error)
        raise


def train_script_locally(arguments: TrainArguments, out: TextIO) -> int:
    """Run a script that calls `phalanx.session` under our own agent and follow it; return its exit code."""
    script = arguments.path
    if not script.is_file():
        raise UsageError(f"{script}: no such file; expected a recipe or a script that calls phalanx.session")
    run = arguments.find_run(script.stem)
    machine = discover_machine()
    world_size = arguments.nproc_per_node or machine.num_gpus or 1
    check_workers(machine, world_size)
    with ForkServerClient() as fork_server, DeferredDisplay(run, out) as display:
        outcome = supervise_script(
            script, arguments.overrides, run, world_size, fork_server, display.show_event, arguments.force
        )
    if outcome.message:
        print(f"error: {escape_control_chars(outcome.message)}", file=out)
    print(escape_control_chars(format_conclusion(run, outcome.code, arguments)), file=out)
    return int(outcome.code)


def format_introduction(prepared: PreparedRun) -> str:
    """What will be trained and what was chosen for it, in a few lines."""
    plan, cluster, recipe = prepared.plan, prepared.cluster, prepared.recipe
    rates = cluster.get("measured_matmul_tflops") or {}
    rates_text = ", ".join(f"{name} {rate:.2f}" for name, rate in rates.items())
    num_workers = recipe.parallelism.world
    lines = [
        f"run      {prepared.run.path}",
        f"model    {recipe.model.build}, {format_count(plan.get('trainable_parameters', 0))} parameters",
        f"machine  {cluster.get('device_name')}, {cluster.get('physical_cores')} cores; "
        f"measured matmul TFLOP/s: {rates_text}",
        f"workers  {num_workers} x {recipe.num_threads} {'thread' if recipe.num_threads == 1 else 'threads'}",
    ]
    for choice in plan.get("auto_choices", []):
        if choice["reason"] != "given" and choice["key"] != "num_threads":
            value = choice["value"]
            shown = str(value).lower() if isinstance(value, bool) else value
            lines.append(f"auto     {choice['key']} = {shown}: {choice['reason']}")
    if predicted := plan.get("predicted_step_s"):
        lines.append(
            f"predicted {format_duration(predicted)}/step, {format_duration(predicted * recipe.steps)} "
            f"for {recipe.steps} steps"
        )
    return "\n".join(lines)


def format_conclusion(run: Run, code: ExitCode, arguments: TrainArguments) -> str:
    """Say how a run ended, and what to type next."""
    result = run.read_json_or_empty(run.result)
    resume_command = f"phalanx train {word_of(arguments.path)} {shlex.join(arguments.format_options(run.path))}"
    if code is ExitCode.DONE:
        return f"digest   {result.get('digest')}\nreport   phalanx report {word_of(run.path)}"
    if code is ExitCode.UNFINISHED:
        # Only a state that was saved has a digest: a second Ctrl-C or a full disk leaves the checkpoint before.
        saved_text = f"saved at step {result.get('steps')}" if result.get("digest") else "the last steps were not saved"
        return f"{saved_text}; resume with: {resume_command}"
    return f"details  {run.logs}"


def train_as_worker(arguments: TrainArguments, out: TextIO) -> int:
    """Run one worker of a world that torchrun, srun or mpirun started; return its exit code. Rank 0 prepares the run,
    follows it and writes its events; the others wait for its announcement."""
    from phalanx.train.distributed.environment import (
        dist_env_from_environment,
        end_at_once,
        open_attempt_store,
        select_device,
    )
    from phalanx.train.distributed.object_collectives import count_nodes_from_environment
    from phalanx.train.distributed.run_announcement import (
        RunAnnouncement,
        announce_run,
        telling_others,
        wait_for_announcement,
    )
    from phalanx.train.worker import run_worker

    dist_env = dist_env_from_environment(device="cpu")  # until the recipe is read
    if not dist_env.is_rank_zero:
        with telling_others(dist_env):
            loaded = arguments.load_recipe()
            select_device(
                dist_env.local_rank, os.environ, loaded.recipe.device
            )  # what is wrong with it is said at once
            run = arguments.find_run(loaded.recipe.name)
            announcement = wait_for_announcement(dist_env, run.path)
        if announcement.is_finished:
            return int(ExitCode.DONE)
        payload = {"run": str(run.path.absolute()), "folder": str(loaded.recipe_dir), "force": arguments.force}
        return end_at_once(int(run_worker(payload, replace(dist_env, attempt=announcement.attempt))))
    with contextlib.ExitStack() as stack:
        with telling_others(dist_env):
            if dist_env.world_size > 1:
                open_attempt_store(dist_env)  # where this one hosts it, the others find it from the beginning
            loaded = arguments.load_recipe()
            run = arguments.find_run(loaded.recipe.name)
            if finished_text := describe_finished(run, loaded.recipe):
                announce_run(dist_env, RunAnnouncement(is_finished=True))
                print(finished_text, file=out)
                return int(ExitCode.DONE)
            with (
                ForkServerClient(
                    call_timeout_s=call_timeout(loaded.recipe.fault_tolerance.hang_timeout_s)
                ) as fork_server,
                show_progress() as progress,
            ):
                num_nodes = count_nodes_from_environment(dist_env)
                request = RunRequest(loaded, run, dist_env.world_size, num_nodes, arguments.force)
                prepared = stack.enter_context(prepare_run(request, fork_server, progress))
            payload = {"run": str(run.path.absolute()), "folder": str(prepared.recipe_dir), "force": arguments.force}
            announce_run(dist_env, RunAnnouncement(os.path.realpath(run.path), prepared.first_attempt))
        print(escape_control_chars(format_introduction(prepared)), file=out)
        display = make_display(out, prepared.recipe.steps, read_run_facts(run))
        stack.callback(display.close)
        with contextlib.closing(EventLog(run.events)) as event_log:
            for event in prepared.opening_events():
                event_log.write(event)
                display.show_event(event)
        code = run_worker(payload, replace(dist_env, attempt=prepared.first_attempt), display.show_event)
    if code is ExitCode.UNFINISHED:
        print("not finished; resume with the same command", file=out)
    else:
        print(escape_control_chars(format_conclusion(run, code, arguments)), file=out)
    return end_at_once(int(code))
