"""The nodes of a run: this one leads the others, or serves the one that leads."""

import contextlib
from collections.abc import Iterator
from typing import TextIO

from phalanx.app.prepare_run import find_machine
from phalanx.app.resume import describe_finished
from phalanx.app.train_arguments import TrainArguments
from phalanx.cluster.gpu_energy import find_local_gpu_ids
from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.fleet.telemetry.record import record_telemetry
from phalanx.jobs.agent.fork_server_client import ForkServerClient
from phalanx.jobs.agent.node_agent import NodeAgent, report_departure
from phalanx.jobs.agent.node_group import LocalNode, NodeGroup
from phalanx.recipe import num_workers_for
from phalanx.recipe.load import LoadedRecipe
from phalanx.run.authentication import load_token
from phalanx.run.control_channel import ControlServer
from phalanx.run.node_env import NodeEnv


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
    total = workers_per_node * num_nodes
    if nproc_per_node is None:
        total = num_workers_for(loaded.recipe, total)
    if total % num_nodes:
        raise UsageError(
            f"{total} workers, as the recipe's parallelism requires, cannot be divided among {num_nodes} nodes"
        )
    return total


def run_node_agent(arguments: TrainArguments, dry_run: bool, out: TextIO, node_env: NodeEnv) -> ExitCode:
    """Run the agent of a node that does not lead; return the run's exit code.

    Raises RecipeError at once for a recipe that is wrong: the leading node ends because of it before another node can
    ask. The same holds for a run with nothing left to do.
    """
    try:
        loaded = arguments.load_recipe()
        run = arguments.find_run(loaded.recipe.name)
        if not dry_run and (finished_text := describe_finished(run, loaded.recipe)):
            print(finished_text, file=out)
            return ExitCode.DONE
        nproc_per_node = arguments.nproc_per_node
        node_agent = NodeAgent(node_env, load_token(), out, nproc_per_node=nproc_per_node)
        with node_agent, record_telemetry(run, lambda: find_local_gpu_ids(nproc_per_node)):
            return ExitCode(node_agent.serve())
    except PhalanxError as error:
        with contextlib.suppress(UsageError):  # without a token no connection can be made
            report_departure(node_env, load_token(), error)
        raise
