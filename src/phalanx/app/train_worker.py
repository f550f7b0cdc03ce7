"""Train as one worker of a world that torchrun, srun or mpirun started, without an agent."""

import contextlib
import os
from dataclasses import replace

from phalanx.app.prepare_run import RunRequest, prepare_run
from phalanx.app.resume import describe_finished
from phalanx.app.trackers import feed_trackers
from phalanx.app.train import TrainObserver
from phalanx.app.train_arguments import TrainArguments
from phalanx.errors import ExitCode
from phalanx.jobs.agent.fork_server_client import ForkServerClient, call_timeout
from phalanx.run import EventLog
from phalanx.train.distributed.environment import DistEnv, dist_env_from_environment, select_device
from phalanx.train.distributed.object_collectives import count_nodes_from_environment
from phalanx.train.distributed.process_group import end_at_once as end_at_once
from phalanx.train.distributed.run_announcement import (
    RunAnnouncement,
    announce_run,
    telling_others,
    wait_for_announcement,
)
from phalanx.train.distributed.store import open_attempt_store
from phalanx.train.worker import run_worker


def train_as_worker(arguments: TrainArguments, observer: TrainObserver) -> ExitCode | None:
    """Train as one worker; None when nothing is left to train. Rank 0 prepares the run, writes its events and calls
    `observer`; the others wait for its announcement. End the process by `end_at_once`."""
    dist_env = dist_env_from_environment(device="cpu")  # until the recipe is read
    if not dist_env.is_rank_zero:
        return _follow_rank_zero(arguments, dist_env)
    with contextlib.ExitStack() as stack:
        with telling_others(dist_env):
            if dist_env.world_size > 1:
                open_attempt_store(dist_env)  # where this one hosts it, the others find it from the beginning
            loaded = arguments.load_recipe()
            run = arguments.find_run(loaded.recipe.name)
            if finished_text := describe_finished(run, loaded.recipe):
                announce_run(dist_env, RunAnnouncement(is_finished=True))
                observer.show_finished(finished_text)
                return None
            call_timeout_s = call_timeout(loaded.recipe.fault_tolerance.hang_timeout_s)
            with ForkServerClient(call_timeout_s=call_timeout_s) as fork_server, observer.open_progress() as progress:
                num_nodes = count_nodes_from_environment(dist_env)
                request = RunRequest(loaded, run, dist_env.world_size, num_nodes, arguments.force)
                prepared = stack.enter_context(prepare_run(request, fork_server, progress))
            payload = {"run": str(run.path.absolute()), "folder": str(prepared.recipe_dir), "force": arguments.force}
            announce_run(dist_env, RunAnnouncement(os.path.realpath(run.path), prepared.first_attempt))
        observer.show_prepared(prepared)
        if prepared.recipe.evaluation.tasks:
            prepared.notes.append("evaluation.tasks are not scored without an agent: use `phalanx evaluate --tasks`")
        with contextlib.closing(EventLog(run.events)) as event_log:
            for event in prepared.opening_events():
                event_log.write(event)
                observer.show_event(event)
        with feed_trackers(run, prepared.recipe.trackers):
            return run_worker(payload, replace(dist_env, attempt=prepared.first_attempt), observer.show_event)


def _follow_rank_zero(arguments: TrainArguments, dist_env: DistEnv) -> ExitCode | None:
    """Train the run that rank 0 announces."""
    with telling_others(dist_env):
        loaded = arguments.load_recipe()
        select_device(dist_env.local_rank, os.environ, loaded.recipe.device)  # an error in it is reported at once
        run = arguments.find_run(loaded.recipe.name)
        announcement = wait_for_announcement(dist_env, run.path)
    if announcement.is_finished:
        return None
    payload = {"run": str(run.path.absolute()), "folder": str(loaded.recipe_dir), "force": arguments.force}
    return run_worker(payload, replace(dist_env, attempt=announcement.attempt))
