"""A worker: one process of a run, from its environment to an exit code. It starts, trains, and reconfigures.

The agent forks it with `run_worker({"run": DIR, "folder": DIR})`; where torchrun or srun started `phalanx train`, that
calls it, too. Everything a worker trains with stands in the run's `resolved.yaml`.
"""

import contextlib
import faulthandler
import logging
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phalanx.compat import set_deterministic
from phalanx.data import is_dataset, open_data, prepare_all_sources
from phalanx.errors import ExitCode, PhalanxError, describe_os_error, is_storage_error
from phalanx.recipe import ResolvedRecipe, load_recipe, load_resolved_recipe
from phalanx.recipe.devices import device_kind_of
from phalanx.run import Event, Run
from phalanx.run.event_types import RunWarning, WorkerStarted
from phalanx.run.heartbeat import open_heartbeat
from phalanx.run.node_env import find_node_name
from phalanx.run.process_messages import StandbyReady, WorkerFinishing
from phalanx.train.builder import build_context, make_evaluator
from phalanx.train.callbacks import Callbacks
from phalanx.train.checkpoint import clean_checkpoint_dir, list_checkpoints
from phalanx.train.compile_warmup import warm_up_compile
from phalanx.train.distributed.environment import DistEnv, dist_env_from_environment, select_device
from phalanx.train.distributed.failures import naming_causes
from phalanx.train.distributed.object_collectives import all_gather_json, assert_same_on_all_ranks
from phalanx.train.distributed.oom import OutOfMemory, explain_out_of_memory
from phalanx.train.distributed.process_group import (
    init_process_group,
    set_collective_timeout,
    shut_down_process_group,
)
from phalanx.train.distributed.run_announcement import come_together, telling_others
from phalanx.train.elastic.membership import MembershipUpdates, SocketRegistry, open_membership_updates
from phalanx.train.elastic.reconfigure import (
    Reconfiguration,
    RecoveryMode,
    ReplicatedRecovery,
    requires_reconfiguration,
)
from phalanx.train.elastic.sharded_recovery import ShardedRecovery
from phalanx.train.hf.image_processor import find_image_inputs, to_meta
from phalanx.train.model_builder import describe_model
from phalanx.train.precision import set_matmul_precision
from phalanx.train.reporter import make_reporter
from phalanx.train.resume import make_result, report_start, resume_training
from phalanx.train.signals import StopRequest
from phalanx.train.tasks import Classification, load_task
from phalanx.train.train_context import TrainContext, WorkerProcess
from phalanx.train.train_state import SurvivorState, TrainState
from phalanx.train.trainer import Trainer

logger = logging.getLogger(__name__)

SAME_DATA_HINT = (
    "all nodes must read the same; give the recipe a source that is the same on each, or share the file system"
)
STANDBY_VARIABLE = "PHALANX_STANDBY"
"""Set to 1 for a worker that takes the place of one that was lost while the others train on."""


def run_worker(
    payload: Mapping[str, Any], dist_env: DistEnv | None = None, on_event: Callable[[Event], None] | None = None
) -> ExitCode:
    """Train as one worker of the run. Without an agent rank 0 passes `on_event` every event that it writes."""
    dist_env = dist_env or dist_env_from_environment(device="cpu")  # the device is known when the recipe is read
    process = _start_process(payload, dist_env, on_event)
    with _reporting_errors(process) as ending:
        attempt = Attempt(process, force=bool(payload.get("force")))
        with attempt.explaining_memory():
            context, state = attempt.begin()
            while True:
                trainer = Trainer(attempt.watch_membership(context), state, attempt.checkpoint_meta)
                try:
                    status = trainer.fit()
                    break
                except Exception as error:
                    if not attempt.can_reconfigure(error, trainer):
                        raise
                survivor_state = attempt.detach(trainer)
                del trainer  # it holds what the next one needs memory for
                context, state = attempt.rejoin(context, survivor_state)
        if context.dist_env.is_rank_zero:
            process.reporter.report_result(make_result(context, trainer.train_state, status))
        ending.code = ExitCode.DONE if status == "done" else ExitCode.UNFINISHED
    if ending.is_orderly:
        shut_down_process_group(collect=not _is_forked_by_agent())  # the fork server ends its children by os._exit
    process.reporter.send_control(WorkerFinishing(rank=dist_env.rank, exit_code=int(ending.code)))
    return ending.code


def _start_process(
    payload: Mapping[str, Any], dist_env: DistEnv, on_event: Callable[[Event], None] | None
) -> WorkerProcess:
    """Install signal handlers, and report that this worker exists."""
    run = Run(Path(payload["run"]))
    stop_request = StopRequest()
    stop_request.install_handlers()
    reporter = make_reporter(run, dist_env.is_rank_zero, os.environ.get("PHALANX_EVENTS_FD"), on_event)
    logger.info("worker %d of %d trains %s", dist_env.rank, dist_env.world_size, run.path)
    faulthandler.register(signal.SIGUSR2)  # the agent asks where we are; the answer goes to our log
    heartbeat = open_heartbeat(dist_env.local_rank)
    heartbeat.record("starting")
    reporter.report_event(worker_started(dist_env, joins_late=_is_standby()))
    return WorkerProcess(run, Path(payload["folder"]), dist_env, reporter, stop_request, heartbeat)


@dataclass
class _Ending:
    """How a worker ends. `is_orderly`: no other thread may still wait for the process group."""

    code: ExitCode = ExitCode.GAVE_UP
    is_orderly: bool = True


@contextlib.contextmanager
def _reporting_errors(process: WorkerProcess) -> Iterator[_Ending]:
    """Report what ends a worker, and turn it into an exit code where its cause is known."""
    reporter, ending, by_agent = process.reporter, _Ending(), _is_forked_by_agent()
    try:
        with naming_causes():
            yield ending
    except PhalanxError as error:
        reporter.report_error(str(error), int(error.code), out_of_memory=isinstance(error, OutOfMemory))
        ending.code, ending.is_orderly = error.code, by_agent or error.__cause__ is None
    except SystemExit as error:
        message = describe_early_exit(error, f"worker {process.dist_env.rank}, in step {process.heartbeat.step}")
        if by_agent:  # to which it is an exception like others
            raise RuntimeError(message) from error
        reporter.report_error(message, int(ExitCode.GAVE_UP))
        ending.code = ExitCode.GAVE_UP
    except OSError as error:
        if is_storage_error(error):
            reporter.report_error(describe_os_error(error), int(ExitCode.UNFINISHED))
        raise
    finally:
        reporter.close()


def worker_started(place: DistEnv, joins_late: bool = False) -> WorkerStarted:
    """The event of this process."""
    host = find_node_name()
    return WorkerStarted(pid=os.getpid(), rank=place.rank, host=host, attempt=place.attempt, joins_late=joins_late)


def describe_early_exit(error: SystemExit, worker_name: str) -> str:
    """The message for `sys.exit` in the middle of a run, and where it was called."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    called = f"sys.exit({'' if error.code is None else repr(error.code)})"
    return (
        f"{worker_name}: {called} was called before the run was done ({frame.filename}:{frame.lineno}, in {frame.name})"
    )


def _is_forked_by_agent() -> bool:
    """Whether the agent's fork server forked this process; otherwise a launcher such as torchrun started it."""
    return bool(os.environ.get("PHALANX_EVENTS_FD"))


def _is_standby() -> bool:
    """Whether this worker takes the place of one that was lost, while the others train."""
    return os.environ.get(STANDBY_VARIABLE) == "1"


class Attempt:
    """What a worker has for as long as it lives: the recipe, the data, and the connections to the other workers. It
    builds what is trained, in the world of now and after each reconfiguration. RecipeError, DataError where these do
    not fit the others'."""

    def __init__(self, process: WorkerProcess, force: bool):
        run, dist_env = process.run, process.dist_env
        with telling_others(dist_env):
            recipe = load_resolved_recipe(run.resolved)
            dist_env = replace(dist_env, device=select_device(dist_env.local_rank, os.environ, recipe.device))
            configure_torch(recipe, dist_env)
        self._parallelism, self._force, self._is_standby = recipe.parallelism, force, _is_standby()
        self._inter_replica_sockets, self._intra_replica_sockets = SocketRegistry(), SocketRegistry()
        # Not those within a replica: all its workers are there, and gloo may wait forever when a message is cut short.
        # A worker that is interrupted in a collective with other replicas cuts these, too.
        self._membership_updates = open_membership_updates(self._inter_replica_sockets.shut_down)
        self._replica_size = self._parallelism.world // self._parallelism.replicate
        self._worker_id = dist_env.rank
        if self._is_standby:  # the others train meanwhile
            assert self._membership_updates is not None
            dist_env = replace(dist_env, rank=0, world_size=1)
        else:
            with telling_others(dist_env):
                init_process_group(dist_env, connection_scope=self._inter_replica_sockets, before=come_together)
            process.heartbeat.record("rendezvous")
            if dist_env.is_rank_zero:
                clean_checkpoint_dir(run.checkpoints)
        self.process = replace(process, dist_env=dist_env)
        self.recipe = recipe = ensure_data_prepared(recipe, run, process.folder)
        self.data = open_data(recipe.data, recipe.evaluation, recipe.seed, recipe.batch.global_size)
        assert_same_on_all_ranks(dist_env, self.data.fingerprint, "data", SAME_DATA_HINT)
        self.checkpoint_meta: dict[str, Any] = {
            "fingerprint": self.data.fingerprint,
            "recipe": recipe.model_dump(mode="json"),
            **self._describe_image_inputs(),
            "model": describe_model(recipe.model, self.data.info, process.folder),
        }
        self._reconfiguration: Reconfiguration | None = None

    def _describe_image_inputs(self) -> dict[str, Any]:
        """Return what checkpoints hold of a Hugging Face model's image preprocessing, and warn of what training does
        not follow."""
        recipe, folder = self.recipe, self.process.folder
        if self.data.info.kind != "images" or not isinstance(load_task(recipe.task, folder), Classification):
            return {}
        inputs = find_image_inputs(recipe.model.build, folder, self.data.info)
        if inputs is None:
            return {"image_normalization": None}
        if inputs.not_followed and self.process.dist_env.is_rank_zero:
            text = (
                f"the model's own image preprocessing also has {', '.join(inputs.not_followed)}, which is not followed"
            )
            self.process.reporter.report_event(RunWarning(text=text))
        return {"image_normalization": to_meta(inputs.normalization)}

    def explaining_memory(self) -> contextlib.AbstractContextManager[None]:
        """Turn an allocation failure into an error that names a micro-batch that would fit."""
        micro_size, run = self.recipe.batch.micro_size, self.process.run
        return explain_out_of_memory(micro_size, run.read_json_or_empty(run.plan))

    def build(self, dist_env: DistEnv, callbacks: Callbacks | None = None, init_weights: bool = False) -> TrainContext:
        """Build what is trained in the world that `dist_env` describes."""
        recipe = self.recipe
        if self._membership_updates is not None:
            replicate = dist_env.world_size // self._replica_size
            parallelism = self._parallelism.model_copy(update={"replicate": replicate})
            recipe = recipe.model_copy(update={"parallelism": parallelism})
        process = replace(self.process, dist_env=dist_env)
        return build_context(process, recipe, self.data, init_weights, callbacks, self._sockets_of)

    def _sockets_of(self, dimension: str) -> SocketRegistry:
        return self._inter_replica_sockets if dimension == "replicate" else self._intra_replica_sockets

    def begin(self) -> tuple[TrainContext, TrainState | SurvivorState]:
        """Build, and resume from a checkpoint or from the memory of the other workers."""
        process, recipe = self.process, self.recipe
        dist_env, heartbeat, num_samples = process.dist_env, process.heartbeat, self.data.num_train_samples
        # All or none draw weights: one that does not see the checkpoints yet would else begin with its own.
        has_checkpoint = self._is_standby or any(
            all_gather_json(dist_env, bool(list_checkpoints(process.run.checkpoints)))
        )
        # Without the other workers of its replica none can divide a model.
        postponed = self._is_standby and self._replica_size > 1
        context = None if postponed else self.build(dist_env, init_weights=not has_checkpoint)
        if self._membership_updates is not None:
            self._reconfiguration = self._make_reconfiguration(self._membership_updates, context)
        train_state = TrainState()
        if not self._is_standby:
            assert context is not None
            train_state = resume_training(context, self.data.fingerprint, self._force, needs_checkpoint=has_checkpoint)
            if dist_env.is_rank_zero:
                report_start(context, num_samples, train_state)
        heartbeat.record("restoring")
        if recipe.compile and context is not None:
            warm_up_compile(context, train_state)
            heartbeat.record("compiling")
        if self._is_standby:
            assert self._reconfiguration is not None
            process.reporter.send_control(StandbyReady(rank=self._worker_id))
            return self._reconfiguration.rejoin(context, None, num_samples)
        assert context is not None
        return context, train_state

    def _make_reconfiguration(self, updates: MembershipUpdates, context: TrainContext | None) -> Reconfiguration:
        mode: RecoveryMode
        if self._replica_size > 1:
            mode = ShardedRecovery(self._replica_size, self.build, context)
        else:
            assert context is not None
            assert context.loss_module is not None
            mode = ReplicatedRecovery(
                partial(make_evaluator, self.process, self.recipe, self.data, context.loss_module)
            )
        return Reconfiguration(
            updates,
            self._inter_replica_sockets,
            self._intra_replica_sockets,
            self._worker_id,
            self.process,
            mode,
            self.data.fingerprint,
        )

    def watch_membership(self, context: TrainContext) -> TrainContext:
        """Have training interrupted when the agent names other workers."""
        updates, reconfiguration = self._membership_updates, self._reconfiguration
        if updates is not None and reconfiguration is not None:
            context.membership_changed = lambda: updates.has_update
            context.check_membership = reconfiguration.check_membership
            reconfiguration.install_membership_hooks(context.parallel_model.modules, bool(self.recipe.compile))
        return context

    def can_reconfigure(self, error: Exception, trainer: Trainer) -> bool:
        """Whether training can continue in another world after this error."""
        can = self._reconfiguration is not None and requires_reconfiguration(error)
        return can and trainer.state_is_consistent

    def detach(self, trainer: Trainer) -> SurvivorState:
        """Leave the world, and undo what was begun."""
        assert self._reconfiguration is not None
        self.process.heartbeat.record("restoring")
        return self._reconfiguration.detach(trainer)

    def rejoin(self, context: TrainContext, survivor_state: SurvivorState) -> tuple[TrainContext, SurvivorState]:
        """Form another world, and share the state."""
        assert self._reconfiguration is not None
        return self._reconfiguration.rejoin(context, survivor_state, self.data.num_train_samples)


def ensure_data_prepared(recipe: ResolvedRecipe, run: Run, folder: Path) -> ResolvedRecipe:
    """The recipe with data that this node has: what the leading node prepared into its cache is prepared here as well
    where the nodes do not share it."""
    sources = recipe.data.source if isinstance(recipe.data.source, list) else [recipe.data.source]
    all_sources = [*sources, *([recipe.evaluation.source] if recipe.evaluation.source else [])]
    if all(is_dataset(folder / source.prepared) for source in all_sources if source.prepared is not None):
        return recipe
    given_recipe = load_recipe(run.recipe).recipe
    data, evaluate = prepare_all_sources(given_recipe.data, given_recipe.evaluation, folder)
    data = data.model_copy(update={"order": recipe.data.order})
    return recipe.model_copy(update={"data": data, "evaluation": evaluate})


def configure_torch(recipe: ResolvedRecipe, dist_env: DistEnv) -> None:
    """Settings of this process on which speed and bits depend, and how long it waits for others."""
    set_collective_timeout(recipe.fault_tolerance.hang_timeout_s)
    torch.set_num_threads(recipe.num_threads)
    configure_kernels(dist_env.device, recipe.precision, recipe.determinism != "off")


def configure_kernels(device: torch.device, precision: str, deterministic: bool) -> None:
    """Which kernels of a GPU this process may use: the rounding of fp32 products, and deterministic ones only. On a CPU
    all are deterministic."""
    set_matmul_precision(precision, device)
    if device_kind_of(device.type).is_gpu and deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        set_deterministic(True)


def run_script_worker(payload: dict[str, Any]) -> None:
    """Run a training script as one worker of the run, as `python SCRIPT ARGUMENTS` does."""
    script = payload["script"]
    os.environ["PHALANX_RUN_DIR"] = payload["run"]
    if payload["force"]:
        os.environ["PHALANX_FORCE"] = "1"
    sys.argv = [script, *payload["arguments"]]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
