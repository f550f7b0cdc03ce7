"""A worker: one process of a run, from its environment to an exit code. It starts, trains, and ends.

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
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.compat import count_graph_breaks, is_compiled, set_deterministic
from phalanx.data import RunData, is_dataset, open_data, prepare_all_sources
from phalanx.data.cache import holdout_fraction
from phalanx.data.source_files import pin_sources
from phalanx.errors import ExitCode, PhalanxError, describe_os_error, is_storage_error
from phalanx.recipe import ResolvedRecipe, load_recipe, load_resolved_recipe
from phalanx.recipe.data_schema import list_sources
from phalanx.recipe.devices import device_kind_of
from phalanx.run import Event, Run
from phalanx.run.event_types import Compiled, RunWarning, WorkerStarted
from phalanx.run.heartbeat import open_heartbeat
from phalanx.run.node_env import find_node_name
from phalanx.run.process_messages import WorkerFinishing
from phalanx.storage.url import is_url
from phalanx.train.builder import build_context
from phalanx.train.checkpoint.durable import clean_checkpoint_dir
from phalanx.train.checkpoint.restore import has_checkpoint
from phalanx.train.data_sharing import DataSharing, sharing_data
from phalanx.train.distributed.environment import DistEnv, dist_env_from_environment, select_device
from phalanx.train.distributed.failures import OutOfMemory, explain_out_of_memory, naming_causes
from phalanx.train.distributed.module_state import get_extra_state, load_extra_state
from phalanx.train.distributed.object_collectives import assert_same_on_all_ranks
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.distributed.pipeline.build import PipelineRunner
from phalanx.train.distributed.process_group import init_process_group, set_collective_timeout, shut_down_process_group
from phalanx.train.distributed.run_announcement import come_together, telling_others
from phalanx.train.hf.image_processor import find_image_inputs
from phalanx.train.model_builder import describe_model
from phalanx.train.precision import set_matmul_precision
from phalanx.train.reference import ensure_reference
from phalanx.train.reporter import make_reporter
from phalanx.train.resume import make_result, report_start, resume_training
from phalanx.train.step_timer import HostStepTimer
from phalanx.train.tasks import Classification, load_task
from phalanx.train.train_context import StopRequest, TrainContext, WorkerProcess
from phalanx.train.train_state import TrainState
from phalanx.train.trainer import Trainer

logger = logging.getLogger(__name__)

SAME_DATA_HINT = (
    "all nodes must read the same; give the recipe a source that is the same on each, or share the file system"
)


def run_worker(
    payload: Mapping[str, Any], dist_env: DistEnv | None = None, on_event: Callable[[Event], None] | None = None
) -> ExitCode:
    """Train as one worker of the run. Without an agent rank 0 passes `on_event` every event that it writes."""
    dist_env = dist_env or dist_env_from_environment(device="cpu")  # the device is known when the recipe is read
    process = _start_process(payload, dist_env, on_event)
    with _reporting_errors(process) as ending:
        process, recipe = _join_world(process)
        datasets = [source.prepared for source in list_sources(recipe.data, recipe.evaluation)]
        is_shared = recipe.data.prepare == "stream" or any(map(is_url, datasets))
        with sharing_data(process.dist_env, is_shared) as sharing, explain_out_of_memory(recipe.batch.micro_size):
            recipe = ensure_data_prepared(recipe, process.run, process.folder, sharing)
            data = open_data(recipe.data, recipe.evaluation, recipe.seed, recipe.batch.global_size)
            assert_same_on_all_ranks(process.dist_env, data.fingerprint, "data", SAME_DATA_HINT)
            trainer = _make_trainer(process, recipe, data, force=bool(payload.get("force")))
            status = trainer.fit()
        if dist_env.is_rank_zero:
            process.reporter.report_result(make_result(trainer.context, trainer.train_state, status))
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
    reporter.report_event(worker_started(dist_env))
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


def worker_started(place: DistEnv) -> WorkerStarted:
    """The event of this process."""
    return WorkerStarted(pid=os.getpid(), rank=place.rank, host=find_node_name(), attempt=place.attempt)


def describe_early_exit(error: SystemExit, worker_name: str) -> str:
    """The message for `sys.exit` in the middle of a run, and where it was called."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    called = f"sys.exit({'' if error.code is None else repr(error.code)})"
    place = f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return f"{worker_name}: {called} was called before the run was done ({place})"


def _is_forked_by_agent() -> bool:
    """Whether the agent's fork server forked this process; otherwise a launcher such as torchrun started it."""
    return bool(os.environ.get("PHALANX_EVENTS_FD"))


def _join_world(process: WorkerProcess) -> tuple[WorkerProcess, ResolvedRecipe]:
    """Read the recipe, and find the other workers. Returns the process with its device, and the recipe."""
    run, dist_env = process.run, process.dist_env
    with telling_others(dist_env):
        recipe = load_resolved_recipe(run.resolved)
        dist_env = replace(dist_env, device=select_device(dist_env.local_rank, os.environ, recipe.device))
        configure_torch(recipe, dist_env)
        init_process_group(dist_env, before=come_together)
    process.heartbeat.record("rendezvous")
    if dist_env.is_rank_zero:
        clean_checkpoint_dir(run.checkpoints)
    return replace(process, dist_env=dist_env), recipe


def _make_trainer(process: WorkerProcess, recipe: ResolvedRecipe, data: RunData, force: bool) -> Trainer:
    """Build what is trained, and resume from the newest state in the memory of the nodes or on disk."""
    dist_env, heartbeat = process.dist_env, process.heartbeat
    checkpoint_meta = {
        "fingerprint": data.fingerprint,
        "recipe": recipe.model_dump(mode="json"),
        **_describe_image_inputs(process, recipe, data),
        "model": describe_model(recipe.model, data.info, process.folder),
    }
    # All or none draw weights: one that does not see the checkpoints yet would else begin with its own.
    resumes = has_checkpoint(process.run, recipe.checkpoint, dist_env)
    context = build_context(process, recipe, data, init_weights=not resumes)
    train_state = resume_training(context, data.fingerprint, force, needs_checkpoint=resumes)
    ensure_reference(context, data, resumes)
    if dist_env.is_rank_zero:
        report_start(context, data.num_train_samples, train_state)
    heartbeat.record("restoring")
    if recipe.compile:
        warm_up_compile(context, train_state)
        heartbeat.record("compiling")
    return Trainer(context, train_state, checkpoint_meta)


def _describe_image_inputs(process: WorkerProcess, recipe: ResolvedRecipe, data: RunData) -> dict[str, Any]:
    """Return what checkpoints hold of a Hugging Face model's image preprocessing, and warn of what training does not
    follow."""
    folder = process.folder
    if data.info.kind != "images" or not isinstance(load_task(recipe.task, folder), Classification):
        return {}
    inputs = find_image_inputs(recipe.model.build, folder, data.info)
    if inputs is None:
        return {"image_normalization": None}
    if inputs.not_followed and process.dist_env.is_rank_zero:
        text = f"the model's own image preprocessing also has {', '.join(inputs.not_followed)}, which is not followed"
        process.reporter.report_event(RunWarning(text=text))
    return {"image_normalization": asdict(inputs.normalization)}


def ensure_data_prepared(recipe: ResolvedRecipe, run: Run, folder: Path, sharing: DataSharing) -> ResolvedRecipe:
    """The recipe with data that this node has: what the leading node prepared into its cache is prepared here as well
    where the nodes do not share it. Of a stream each node prepares a part, and copies the others."""
    prepared = [each.prepared for each in list_sources(recipe.data, recipe.evaluation) if each.prepared is not None]
    is_here = all(is_url(location) or is_dataset(folder / location) for location in prepared)
    if is_here and recipe.data.prepare == "first":
        return recipe
    given_recipe = load_recipe(run.recipe).recipe
    data, evaluate, _ = pin_sources(given_recipe.data, given_recipe.evaluation, run)
    data, evaluate = prepare_all_sources(data, evaluate, folder, seed=given_recipe.seed, part=sharing.part)
    for source in data.sources if recipe.data.prepare == "stream" else ():
        sharing.share_stream(folder / (source.prepared or ""), holdout_fraction(evaluate), given_recipe.seed)
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


def warm_up_compile(
    context: TrainContext, train_state: TrainState, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Compile what a step needs, and report how long it took. All workers must call it: sharded models communicate."""
    start_time, breaks = clock(), count_graph_breaks()
    step, timer = train_state.step + 1, HostStepTimer()
    timer.start()
    train_step, micro_size = context.make_train_step(timer), context.recipe.batch.micro_size
    micro_batches = [
        context.data.read_training(train_state.samples_consumed + index * micro_size, micro_size)
        for index in context.accumulator.own_micro_batches
    ]
    with _restoring_state(context.parallel_model, context.dist_env.device):
        # The first run compiles, and the second records a CUDA graph.
        for _ in range(3 if context.recipe.compile == "cuda-graphs" else 1):
            if isinstance(context.loss_module, PipelineRunner):
                train_step.accumulate(step, micro_batches)
            else:
                train_step.zero_grad(step)
                loss_sum, _ = train_step.forward(context.prepare_batch(micro_batches[0]))
                _run_backward(loss_sum, context.parallel_model)
        if device_kind_of(context.dist_env.device.type).is_gpu:
            torch.accelerator.synchronize(context.dist_env.device)
    train_step.zero_grad(step)  # drops what gradients there are
    if context.dist_env.is_rank_zero:
        compiled = sum(is_compiled(part) for module in context.parallel_model.modules for part in module.modules())
        seconds, breaks = clock() - start_time, count_graph_breaks() - breaks
        context.reporter.report_event(Compiled(duration_s=seconds, num_blocks=compiled, num_graph_breaks=breaks))


def _run_backward(loss: Tensor, parallel_model: ParallelModel) -> None:
    if parallel_model.mesh.fsdp_mesh is not None:  # it works through the hooks of an ordinary backward
        loss.backward()
    else:  # past the hooks of an exchange, which expects a whole step
        torch.autograd.grad(loss, list(parallel_model.trainable_parameters().values()), allow_unused=True)


@contextmanager
def _restoring_state(parallel_model: ParallelModel, device: torch.device) -> Iterator[None]:
    """Put buffers, extra state and random numbers back."""
    parts = [part for module in parallel_model.modules for part in module.modules()]
    buffers = ((part, *named) for part in parts for named in part.named_buffers(recurse=False))
    before = [(part, name, buffer, buffer.clone()) for part, name, buffer in buffers]
    extra = [(module, get_extra_state(module)) for module in parallel_model.modules]
    with torch.random.fork_rng([device] if device_kind_of(device.type).is_gpu else [], device_type=device.type):
        yield
    with torch.no_grad():
        for part, name, buffer, value in before:
            buffer.copy_(value)
            setattr(part, name, buffer)  # the forward may have replaced it
    for module, saved_extra_state in extra:
        load_extra_state(module, saved_extra_state, "memory")
