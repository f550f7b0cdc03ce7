"""The nodes of a run: this one leads the others, or serves the one that leads."""

import contextlib
import time
from collections.abc import Iterator
from typing import TextIO

from phalanx.app.prepare_run import check_node, check_upload, find_machine
from phalanx.app.resume import check_min_nodes, describe_finished
from phalanx.app.train_arguments import TrainArguments
from phalanx.cluster.discovery import find_local_gpu_ids
from phalanx.deadline import Deadline
from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.jobs.agent.fork_server_client import ForkServerClient
from phalanx.jobs.agent.node_agent import (
    CONNECT_RETRY_INTERVAL_S,
    LEADER_START_TIMEOUT_S,
    TAKEOVER_LAST_CALL_S,
    NodeAgent,
    Takeover,
    report_departure,
)
from phalanx.jobs.agent.node_group import LocalNode, NodeGroup
from phalanx.recipe.checks import num_workers_for
from phalanx.recipe.load import LoadedRecipe
from phalanx.run.authentication import load_token
from phalanx.run.control_channel import ControlServer, connect_to_leader
from phalanx.run.leader_address import SharedLeadership
from phalanx.run.node_env import NodeEnv
from phalanx.storage.stored_run import keep_at_url
from phalanx.telemetry.record import record_telemetry


@contextlib.contextmanager
def open_node_group(fork_server: ForkServerClient, node_env: NodeEnv, last_call_s: float) -> Iterator[NodeGroup]:
    """All nodes of a run, of which this is the leading one. When this ends with an error, the others end with its
    code."""
    token = load_token() if node_env.leader_address is not None else b""
    local_node = LocalNode(fork_server.control, fork_server.events, fork_server.heartbeat_table, token)
    with contextlib.ExitStack() as stack:
        server = None
        if node_env.leader_address is not None:
            server = stack.enter_context(ControlServer(node_env.leader_address, token))
        group = NodeGroup(
            local_node,
            node_env.num_nodes,
            server,
            node_env.min_nodes,
            node_env.node_rank,
            node_env.num_expected,
            TAKEOVER_LAST_CALL_S if node_env.took_over else last_call_s,
        )
        node_group = stack.enter_context(group)
        try:
            yield node_group
        except PhalanxError as error:
            node_group.exit_code = error.code
            raise


def count_workers(loaded: LoadedRecipe, nproc_per_node: int | None, node_env: NodeEnv) -> int | None:
    """Workers of all nodes together; None leaves it to the recipe and this machine alone. UsageError when they cannot
    be shared evenly, RecipeError when the recipe cannot be divided among the least number of nodes."""
    num_nodes = node_env.num_nodes
    if num_nodes == 1:
        return nproc_per_node
    workers_per_node = nproc_per_node or find_machine(loaded).num_gpus or 1
    total = workers_per_node * num_nodes
    if nproc_per_node is None:
        total = num_workers_for(loaded.recipe, total)
    if total % num_nodes:
        raise UsageError(
            f"{total} workers, as the recipe's parallelism requires, cannot be divided among {num_nodes} nodes"
        )
    if node_env.min_nodes is not None:
        check_min_nodes(loaded, total, num_nodes, node_env.min_nodes)
    return total


def is_led_by_another(arguments: TrainArguments, node_env: NodeEnv) -> bool:
    """Whether another node leads the run since this one was lost. Asks only in a run that may train on fewer nodes."""
    if node_env.min_nodes is None:
        return False
    run = arguments.find_run(arguments.load_recipe().recipe.name)
    deadline = Deadline("the leader of this run", LEADER_START_TIMEOUT_S)
    with keep_at_url(run, leads=False, writes=False) as stored:
        leadership = stored or SharedLeadership(run)
        while (leader := leadership.read_leader()) is not None and leader.node_rank != node_env.node_rank:
            try:
                connect_to_leader(leader.address, load_token()).close()
                return True
            except OSError:
                assert node_env.leader_address is not None
                is_own = leadership.claim(leader, node_env.leader_address, node_env.node_rank)
                if is_own or deadline.check_expired():
                    return False
            time.sleep(CONNECT_RETRY_INTERVAL_S)  # another node has taken over just now
    return False


def run_node_agent(arguments: TrainArguments, dry_run: bool, out: TextIO, node_env: NodeEnv) -> ExitCode | Takeover:
    """Run the agent of a node that does not lead; return the run's exit code, or that this node leads now.

    Raises RecipeError at once for a recipe that is wrong: the leading node ends because of it before another node can
    ask. The same holds for a run with nothing left to do.
    """
    try:
        loaded = arguments.load_recipe()
        run = arguments.find_run(loaded.recipe.name)
        with keep_at_url(run, leads=False, writes=not dry_run) as stored:
            if not dry_run and (finished_text := describe_finished(run, loaded.recipe)):
                print(finished_text, file=out)
                return ExitCode.DONE
            nproc_per_node = arguments.nproc_per_node
            count_workers(loaded, nproc_per_node, node_env)
            check_upload(loaded.recipe)
            node_agent = NodeAgent(node_env, load_token(), out, nproc_per_node=nproc_per_node, run=run, stored=stored)
            node_agent.check_node = check_node
            with node_agent, record_telemetry(run, lambda: find_local_gpu_ids(nproc_per_node)):
                ended = node_agent.serve()
        if isinstance(ended, Takeover) and node_agent.signals.received:
            raise KeyboardInterrupt  # asked to leave while it took over
        return ended
    except PhalanxError as error:
        with contextlib.suppress(UsageError):  # without a token no connection can be made
            report_departure(node_env, load_token(), error)
        raise
