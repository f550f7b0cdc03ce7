"""A worker: one process of a run, from its environment to an exit code.

The agent forks it with `run_worker({"run": DIR, "folder": DIR})`; where torchrun or srun started `phalanx train`, that
calls `run_training`. Everything a worker trains with stands in the run's `resolved.yaml`.
"""

import contextlib
import faulthandler
import logging
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.compat import set_deterministic
from phalanx.data import DataInfo, RunData, is_dataset, open_data, prepare_all_sources
from phalanx.errors import ExitCode, PhalanxError, describe_os_error, is_storage_error
from phalanx.recipe import Recipe, huggingface_directory, load_recipe
from phalanx.recipe.devices import device_kind_of
from phalanx.recipe.schema import Parallelism
from phalanx.run import Event, Run
from phalanx.run.event_types import WorkerStarted
from phalanx.run.heartbeat import HeartbeatWriter, NullHeartbeat, open_heartbeat
from phalanx.run.messages import StandbyReady, WorkerFinishing
from phalanx.train.builder import make_norm_fn, make_result, make_train_step, report_start, resume_training
from phalanx.train.callbacks import Callbacks, RunContext, load_callbacks
from phalanx.train.checkpoint import clean_checkpoint_dir, list_checkpoints
from phalanx.train.checkpoint.init_weights import (
    InitialWeights,
    allocate_meta_parameters,
    open_hf_weights,
    open_initial_weights,
)
from phalanx.train.compile_warmup import warm_up_compile
from phalanx.train.distributed.environment import (
    DistEnv,
    assert_same_on_all_ranks,
    dist_env_from_environment,
    init_process_group,
    select_device,
    set_collective_timeout,
    shut_down_process_group,
)
from phalanx.train.distributed.failures import naming_causes
from phalanx.train.distributed.float8_select import Float8Selector, make_float8_selector, measure_layer_rows
from phalanx.train.distributed.mesh import Mesh, build_mesh
from phalanx.train.distributed.object_collectives import all_gather_json
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.distributed.parallelize import ParallelConfig, parallelize
from phalanx.train.distributed.pipeline.build import PipelineRunner, build_pipeline
from phalanx.train.distributed.run_announcement import come_together, telling_others
from phalanx.train.elastic.membership import SocketRegistry, open_membership_updates
from phalanx.train.elastic.reconfigure import (
    BuiltTrainer,
    Reconfiguration,
    RecoveryMode,
    ReplicatedRecovery,
    requires_reconfiguration,
)
from phalanx.train.elastic.sharded_recovery import ShardedRecovery
from phalanx.train.evaluation import EvaluationResult, evaluate
from phalanx.train.lm_head import eval_mode, find_lm_head
from phalanx.train.loss import LMHead, LossFn, LossModule, plan_context_split
from phalanx.train.model_builder import MicroBatchSeeds, build_model, check_begins_alike, describe_model
from phalanx.train.oom import OutOfMemory, explain_out_of_memory
from phalanx.train.ops.lora import has_lora
from phalanx.train.optim import OptimizerContainer
from phalanx.train.precision import AUTOCAST_DTYPES, GradScaler, autocast_context, set_matmul_precision
from phalanx.train.reporter import Reporter, make_reporter
from phalanx.train.signals import StopRequest
from phalanx.train.tasks import LanguageModeling, Task, TensorBatch, load_task
from phalanx.train.train_context import TrainContext
from phalanx.train.train_state import SurvivorState, TrainState
from phalanx.train.train_step import to_device
from phalanx.train.trainer import Trainer, fit

logger = logging.getLogger(__name__)

SAME_DATA_HINT = (
    "all nodes must read the same; give the recipe a source that is the same on each, or share the file system"
)
STANDBY_VARIABLE = "PHALANX_STANDBY"
"""Set to 1 for a worker that takes the place of one that was lost while the others train on."""


def run_worker(payload: dict[str, Any]) -> None:
    """Train as one worker of the run and leave the process with its exit code."""
    raise SystemExit(int(run_training(payload, dist_env_from_environment(device="cpu"))))  # until the recipe is read


def run_training(
    payload: dict[str, Any], dist_env: DistEnv, on_event: Callable[[Event], None] | None = None
) -> ExitCode:
    """Train as one worker of the run. Without an agent the leading worker gives `on_event` every event that it
    writes."""
    run, folder = Run(Path(payload["run"])), Path(payload["folder"])
    stop = StopRequest()
    stop.install_handlers()
    reporter = make_reporter(run, dist_env.is_rank_zero, os.environ.get("PHALANX_EVENTS_FD"), on_event)
    logger.info("worker %d of %d trains %s", dist_env.rank, dist_env.world_size, run.path)
    faulthandler.register(signal.SIGUSR2)  # the agent asks where we are; the answer goes to our log
    heartbeat = open_heartbeat(dist_env.local_rank)
    heartbeat.record("starting")
    reporter.report_event(worker_started(dist_env, joins_late=os.environ.get(STANDBY_VARIABLE) == "1"))
    by_agent, orderly = bool(os.environ.get("PHALANX_EVENTS_FD")), True
    try:
        with naming_causes():
            code = _train_until_done(run, folder, dist_env, stop, reporter, heartbeat, force=bool(payload.get("force")))
    except PhalanxError as error:
        reporter.report_error(str(error), int(error.code), out_of_memory=isinstance(error, OutOfMemory))
        code = error.code
        orderly = by_agent or error.__cause__ is None  # else who knows what still waits for the group
    except SystemExit as error:
        exit_message = describe_early_exit(error, f"worker {dist_env.rank}, in step {heartbeat.step}")
        if by_agent:  # to which it is an exception like others
            raise RuntimeError(exit_message) from error
        reporter.report_error(exit_message, int(ExitCode.GAVE_UP))
        code = ExitCode.GAVE_UP
    except OSError as error:
        if is_storage_error(error):
            reporter.report_error(describe_os_error(error), int(ExitCode.UNFINISHED))
        raise
    finally:
        reporter.close()
    if orderly:
        shut_down_process_group()
    reporter.send_control(WorkerFinishing(rank=dist_env.rank, exit_code=int(code)))
    return code


def worker_started(place: DistEnv, joins_late: bool = False) -> WorkerStarted:
    """The event of this process."""
    host = os.uname().nodename
    return WorkerStarted(pid=os.getpid(), rank=place.rank, host=host, attempt=place.attempt, joins_late=joins_late)


def describe_early_exit(error: SystemExit, worker_name: str) -> str:
    """The message for `sys.exit` in the middle of a run, and where it was called."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    called = f"sys.exit({'' if error.code is None else repr(error.code)})"
    return (
        f"{worker_name}: {called} was called before the run was done ({frame.filename}:{frame.lineno}, in {frame.name})"
    )


def _train_until_done(
    run: Run,
    folder: Path,
    dist_env: DistEnv,
    stop: StopRequest,
    reporter: Reporter,
    heartbeat: HeartbeatWriter | NullHeartbeat,
    force: bool,
) -> ExitCode:
    with telling_others(dist_env):
        recipe = load_recipe(run.resolved).recipe
        dist_env = replace(dist_env, device=select_device(dist_env.local_rank, os.environ, recipe.device))
        configure_torch(recipe, dist_env)
    inter_replica_sockets, intra_replica_sockets, is_standby = (
        SocketRegistry(),
        SocketRegistry(),
        os.environ.get(STANDBY_VARIABLE) == "1",
    )
    # Not those within a replica: all its workers are there, and gloo may wait for ever when a message is cut short. Who
    # of them is torn out of a collective with other replicas cuts these, too.
    membership_updates = open_membership_updates(inter_replica_sockets.shut_down)
    parallelism = recipe.parallelism
    assert isinstance(parallelism, Parallelism)
    replica_size = parallelism.world // parallelism.replicate  # workers that hold a replica together
    if is_standby:  # the others train meanwhile
        assert membership_updates is not None
        worker_id, dist_env = dist_env.rank, replace(dist_env, rank=0, world_size=1)
    else:
        worker_id = dist_env.rank
        with telling_others(dist_env):
            init_process_group(dist_env, connection_scope=inter_replica_sockets, before=come_together)
        if dist_env.is_rank_zero:
            clean_checkpoint_dir(run.checkpoints)
    recipe = ensure_data_prepared(recipe, run, folder)
    data = open_data(recipe.data, recipe.evaluation, recipe.seed)
    assert_same_on_all_ranks(dist_env, data.fingerprint, "data", SAME_DATA_HINT)
    meta = {"fingerprint": data.fingerprint, "recipe": recipe.model_dump(mode="json")}
    meta["model"] = describe_model(recipe.model, data.info, folder)

    # All or none draw weights: one that does not see the checkpoints yet would else begin with its own.
    init_weights = not is_standby and not any(all_gather_json(dist_env, bool(list_checkpoints(run.checkpoints))))

    def build(build_env: DistEnv, callbacks: Callbacks | None = None, with_weights: bool = False) -> BuiltTrainer:
        attempt_recipe = recipe
        if membership_updates is not None:
            attempt_parallelism = parallelism.model_copy(update={"replicate": build_env.world_size // replica_size})
            attempt_recipe = recipe.model_copy(update={"parallelism": attempt_parallelism})
        arguments = (run, attempt_recipe, folder, build_env, data, reporter, stop, heartbeat, with_weights, callbacks)
        return BuiltTrainer(
            *build_context(
                *arguments,
                lambda dimension: inter_replica_sockets if dimension == "replicate" else intra_replica_sockets,
            )
        )

    # Without the other workers of its replica none can divide a model.
    built = None if is_standby and replica_size > 1 else build(dist_env, with_weights=init_weights)
    reconfiguration = None
    if membership_updates is not None:
        recovery_mode: RecoveryMode
        if replica_size > 1:
            recovery_mode = ShardedRecovery(replica_size, build, built)
        else:
            assert built is not None
            recovery_mode = ReplicatedRecovery(
                partial(_make_evaluator, recipe, built.loss_module, data, stop, heartbeat)
            )
        reconfiguration = Reconfiguration(
            membership_updates,
            inter_replica_sockets,
            intra_replica_sockets,
            worker_id,
            dist_env,
            reporter,
            heartbeat,
            recovery_mode,
            data.fingerprint,
        )
    train_state, samples = TrainState(), data.num_train_samples
    if not is_standby:
        assert built is not None
        train_state = resume_training(built.context, data.fingerprint, force, needs_checkpoint=not init_weights)
        if dist_env.is_rank_zero:
            report_start(built.context, samples, train_state)
    heartbeat.record("restoring")
    micro_size = recipe.batch.micro_size
    assert isinstance(micro_size, int)
    with explain_out_of_memory(micro_size, run.read_json_or_empty(run.plan)):
        if recipe.compile and built is not None:
            warm_up_compile(built.context, built.loss_module, train_state)
            heartbeat.record("compiling")
        start_state: TrainState | SurvivorState = train_state
        if is_standby:
            assert reconfiguration is not None
            reporter.send_control(StandbyReady(rank=worker_id))
            built, start_state = reconfiguration.rejoin(built, None, samples)
        assert built is not None
        while True:
            if membership_updates is not None and reconfiguration is not None:
                built.context.membership_changed, built.context.check_membership = (
                    lambda: membership_updates.has_update,
                    reconfiguration.check_membership,
                )
                reconfiguration.install_membership_hooks(built.context.parallel_model.modules, bool(recipe.compile))
            trainer = Trainer(built.context, start_state, meta)
            try:
                status = fit(trainer, built.loss_module)
                break
            except Exception as error:
                if reconfiguration is None or not requires_reconfiguration(error) or not trainer.state_is_consistent:
                    raise
            heartbeat.record("restoring")
            survivor_state = reconfiguration.detach(trainer)
            del trainer
            built, start_state = reconfiguration.rejoin(built, survivor_state, samples)
    if built.context.dist_env.is_rank_zero:
        reporter.report_result(make_result(built.context, trainer.train_state, status))
    return ExitCode.DONE if status == "done" else ExitCode.UNFINISHED


def ensure_data_prepared(recipe: Recipe, run: Run, folder: Path) -> Recipe:
    """The recipe with data that this node has: what the leading node prepared into its cache is prepared here as well
    where the nodes do not share it."""
    sources = recipe.data.source if isinstance(recipe.data.source, list) else [recipe.data.source]
    all_sources = [*sources, *([recipe.evaluation.source] if recipe.evaluation.source else [])]
    if all(is_dataset(folder / source.prepared) for source in all_sources if source.prepared is not None):
        return recipe
    given_recipe = load_recipe(run.recipe).recipe
    data, evaluate = prepare_all_sources(given_recipe.data, given_recipe.evaluation, folder)
    return recipe.model_copy(update={"data": data, "evaluation": evaluate})


def configure_torch(recipe: Recipe, dist_env: DistEnv) -> None:
    """Settings of this process on which speed and bits depend, and how long it waits for others."""
    set_collective_timeout(recipe.fault_tolerance.hang_timeout_s)
    assert isinstance(recipe.num_threads, int)
    torch.set_num_threads(recipe.num_threads)
    configure_kernels(dist_env.device, recipe.precision, recipe.determinism != "off")


def configure_kernels(device: torch.device, precision: str, deterministic: bool) -> None:
    """Which kernels of a GPU this process may use: the rounding of fp32 products, and deterministic ones only. On a CPU
    all are deterministic."""
    set_matmul_precision(precision, device)
    if device_kind_of(device.type).is_gpu and deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        set_deterministic(True)


def count_units_per_sample(facts: DataInfo) -> int:
    """Tokens in a sample, or 1 where samples are counted."""
    return facts.seq_len if facts.kind == "tokens" and facts.seq_len else 1


def build_context(
    run: Run,
    recipe: Recipe,
    folder: Path,
    dist_env: DistEnv,
    data: RunData,
    reporter: Reporter,
    stop: StopRequest,
    heartbeat: HeartbeatWriter | NullHeartbeat | None = None,
    init_weights: bool = True,
    callbacks: Callbacks | None = None,
    connection_scope: Callable[[str], AbstractContextManager[Any]] = lambda dimension: contextlib.nullcontext(),
) -> tuple[TrainContext, LossModule | PipelineRunner]:
    """Build everything that training works with, from the recipe; without the weights of a new run unless `fresh`, and
    with the `callbacks` that there are already. `connection_scope` as for `build_mesh`."""
    assert isinstance(recipe.parallelism, Parallelism)
    mesh = build_mesh(recipe.parallelism, dist_env, recipe, connection_scope)
    task = load_task(recipe.task, folder)
    # A model whose parameters are to be divided is built where it can be whole: on the host, or without any memory.
    device = dist_env.device if mesh.is_pure_ddp or mesh.pipeline_group is not None else torch.device("cpu")
    model = build_model(
        recipe.model, data.info, folder, recipe.seed, device, recipe.lora, load=False, init_weights=init_weights
    )
    initial_weights = _find_initial_weights(recipe, folder, model) if init_weights else None
    if init_weights and initial_weights is None:
        check_begins_alike(dist_env, model)
    if mesh.is_pure_ddp:
        allocate_meta_parameters([model], dist_env.device)
    model.train()
    loss_fn = make_loss_fn(recipe, task, model, mesh, dist_env, data)
    scaler = GradScaler.for_precision(recipe.precision, recipe.batch.global_size * count_units_per_sample(data.info))
    seeds = MicroBatchSeeds(recipe.seed, dist_env.device)
    fp8 = (
        _make_float8_layer_selector(recipe, run, model, task, mesh, dist_env, data)
        if recipe.precision == "fp8"
        else None
    )
    parallel_model, loss_module = build_parallel_model(recipe, model, loss_fn, mesh, dist_env, data, seeds, scaler, fp8)
    allocate_meta_parameters(parallel_model.modules, dist_env.device)
    if initial_weights is not None:
        initial_weights.fill_parameters(parallel_model)
    optimizer = OptimizerContainer(
        parallel_model.merged_module,
        recipe.optimizer,
        seed=recipe.seed,
        offload=recipe.optimizer.offload,
        norm_fn=make_norm_fn(parallel_model),
        is_pipeline_stage=mesh.pipeline_group is not None,
    )
    units = count_units_per_sample(data.info)
    train_step = make_train_step(recipe, dist_env, parallel_model, optimizer, scaler, seeds)
    if callbacks is None:
        view = RunContext(run.path, dist_env.rank, dist_env.world_size, model)
        callbacks = Callbacks(load_callbacks(recipe.callbacks, folder), view)
    heartbeat = heartbeat or NullHeartbeat()
    context = TrainContext(
        run=run,
        recipe=recipe,
        dist_env=dist_env,
        data=data,
        model=model,
        parallel_model=parallel_model,
        optimizer=optimizer,
        scaler=scaler,
        train_step=train_step,
        callbacks=callbacks,
        reporter=reporter,
        stop_request=stop,
        units_per_sample=units,
        evaluate=_make_evaluator(recipe, loss_module, data, stop, heartbeat, dist_env, mesh),
        prepare_batch=lambda arrays: to_device(arrays, dist_env.device),
        heartbeat=heartbeat,
    )
    return context, loss_module


def _make_evaluator(
    recipe: Recipe,
    loss_module: LossModule | PipelineRunner,
    data: RunData,
    stop: StopRequest,
    heartbeat: HeartbeatWriter | NullHeartbeat,
    dist_env: DistEnv,
    mesh: Mesh,
) -> Callable[[], EvaluationResult | None]:
    """What evaluates on held-out data, if there are any."""
    micro_size = recipe.batch.micro_size
    assert isinstance(micro_size, int)

    # Without gradients, and for a shorter last batch, the model is compiled again: for minutes, in silence.
    phases = ["evaluation"] if recipe.compile is False else ["compiling", "evaluation"]

    def stop_requested() -> bool:
        heartbeat.record(phases[0])  # it is asked between two batches
        return stop.requested

    def evaluate_validation() -> EvaluationResult | None:
        if data.num_validation_samples == 0:
            return None
        heartbeat.record(phases[0])
        samples = recipe.evaluation.max_samples
        found = evaluate(
            loss_module,
            data,
            dist_env=dist_env,
            mesh=mesh,
            max_samples=samples,
            micro_size=micro_size,
            stop_requested=stop_requested,
        )
        del phases[:-1]
        return found

    return evaluate_validation


def make_loss_fn(recipe: Recipe, task: Task, model: nn.Module, mesh: Mesh, dist_env: DistEnv, data: RunData) -> LossFn:
    """How the model is scored under this layout: its sequences split, its vocabulary's logits never whole."""
    loss_fn = LossFn(task, recipe.precision, dist_env.device)
    length = data.info.seq_len
    if mesh.context_group is not None and length is not None:
        loss_fn.context_split = plan_context_split(model, mesh.context_group, length)
    if recipe.memory.chunked_loss is True or mesh.tensor_group is not None:
        loss_fn.lm_head = make_lm_head(model, task, data)
    return loss_fn


def make_lm_head(model: nn.Module, task: Task, data: RunData) -> LMHead | None:
    """The output layer that can be left out of the forward, because the task takes the loss from what enters it."""
    head_loss = getattr(task, "head_loss", None)
    if head_loss is None or not _head_loss_matches_loss(task):
        return None
    sample = _load_one_sample(model, data)
    # In fp32 a GPU has no kernel for grouped heads that keeps no scores, [heads, s, s] of them.
    device = next(iter(sample.values())).device
    with autocast_context("bf16", device) if device_kind_of(device.type).is_gpu else contextlib.nullcontext():
        name = find_lm_head(model, *task.inputs(sample))
    layer = None if name is None else model.get_submodule(name)
    # Logits of a layer with a bias, or with an adapter, are not a product with its weight alone.
    bare = getattr(layer, "bias", None) is None and layer is not None and not has_lora(layer)
    if name is None or not isinstance(layer, nn.Linear) or not bare:
        return None
    return LMHead(name, head_loss, layer.out_features)


def _load_one_sample(model: nn.Module, data: RunData) -> TensorBatch:
    """A batch of one, where the model is; beside it if that is nowhere."""
    device = next(model.parameters()).device
    return to_device(data.read_training(0, 1), torch.device("cpu") if device.type == "meta" else device)


def _make_float8_layer_selector(
    recipe: Recipe, run: Run, model: nn.Module, task: Task, mesh: Mesh, dist_env: DistEnv, data: RunData
) -> Float8Selector:
    """What chooses the layers to compute in fp8, by the size that a micro-batch gives them."""
    args, kwargs = task.inputs(_load_one_sample(model, data))
    with eval_mode(model), autocast_context(recipe.precision, dist_env.device):
        of_one = measure_layer_rows(model, lambda: model(*args, **kwargs))
    micro_size = recipe.batch.micro_size
    assert isinstance(micro_size, int)
    rows = {name: max(1, rows * micro_size // mesh.parallelism.context) for name, rows in of_one.items()}
    return make_float8_selector(run, dist_env, rows, bool(recipe.compile))


def build_parallel_model(
    recipe: Recipe,
    model: nn.Module,
    loss_fn: LossFn,
    mesh: Mesh,
    dist_env: DistEnv,
    data: RunData,
    seeds: MicroBatchSeeds,
    scaler: GradScaler,
    fp8: Float8Selector | None = None,
) -> tuple[ParallelModel, LossModule | PipelineRunner]:
    """The model as this worker has it, and what runs it."""
    assert recipe.memory.activation_checkpointing != "auto"
    cache_weight_casts = uses_cached_casts(recipe.compile, recipe.precision, dist_env.device)
    head = make_lm_head(model, loss_fn.task, data) if cache_weight_casts and loss_fn.lm_head is None else None
    config = ParallelConfig(
        recipe.precision,
        activation_checkpointing=recipe.memory.activation_checkpointing,
        compile="cuda-graphs" if recipe.compile == "cuda-graphs" else recipe.compile is True,
        tp_plan=recipe.model.tp_plan,
        seq_len=data.info.seq_len,
        # Only our own loss knows how to be computed over parts of the vocabulary; a subclass may have another.
        vocab_parallel_loss=loss_fn.lm_head is not None and _has_built_in_head_loss(loss_fn.task),
        float8_selector=fp8,
        cache_weight_casts=cache_weight_casts,
        lm_head=None if head is None else head.name,
    )
    if mesh.pipeline_group is None:
        loss_module = LossModule(model, loss_fn)
        parallel_model, vocab_group = parallelize(model, loss_module, mesh, config)
        if loss_fn.lm_head is not None:
            loss_fn.lm_head = loss_fn.lm_head.with_group(vocab_group)
        return parallel_model, loss_module
    micro_size = recipe.batch.micro_size
    assert isinstance(micro_size, int)
    return build_pipeline(
        model,
        loss_fn,
        to_device(data.read_training(0, micro_size), dist_env.device),
        mesh,
        dist_env,
        config,
        recipe.batch.global_size // (micro_size * mesh.dp_size),
        seeds.seed_stage,
        (lambda: scaler.scale) if scaler.dynamic else None,
    )


def uses_cached_casts(compiled: bool | str, precision: str, device: torch.device) -> bool:
    """Whether weights are cast once a step (ops/cached_cast_linear.py): where compiled blocks run under autocast on a
    GPU. What a CUDA graph reads would be copied to where it was recorded, in each micro-batch."""
    return compiled is True and precision in AUTOCAST_DTYPES and device.type == "cuda"


def _has_built_in_head_loss(task: Task) -> bool:
    return getattr(type(task), "head_loss", None) is LanguageModeling.head_loss


def _head_loss_matches_loss(task: Task) -> bool:
    """Whether `head_loss` is the loss of this task, and not of a class whose `loss` it replaces."""
    owners = [kind for kind in type(task).__mro__ if "loss" in vars(kind) or "head_loss" in vars(kind)]
    return not owners or "head_loss" in vars(owners[0])


def _find_initial_weights(recipe: Recipe, folder: Path, model: nn.Module) -> InitialWeights | None:
    """Where the weights of a new run come from; None where the model was built with them."""
    if recipe.init_from is not None:
        return open_initial_weights(recipe.init_from, folder, model)
    directory = huggingface_directory(recipe.model.build, folder)
    return None if directory is None else open_hf_weights(directory, model)


def run_script_worker(payload: dict[str, Any]) -> None:
    """Run the script as `python SCRIPT ARGUMENTS` would, as one worker of the run."""
    script = payload["script"]
    os.environ["PHALANX_RUN_DIR"] = payload["run"]
    if payload["force"]:
        os.environ["PHALANX_FORCE"] = "1"
    sys.argv = [script, *payload["arguments"]]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
