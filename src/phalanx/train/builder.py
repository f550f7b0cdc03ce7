"""Build what a worker trains with from a resolved recipe: model, parallelism, loss, optimizer and accumulator."""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.data import DataInfo, RunData
from phalanx.recipe import ResolvedRecipe, huggingface_directory
from phalanx.recipe.devices import device_kind_of
from phalanx.run import Run
from phalanx.run.event_types import EvaluationProgress
from phalanx.train.callbacks import Callbacks, RunContext, load_callbacks
from phalanx.train.checkpoint.init_weights import InitialWeights, open_hf_weights, open_initial_weights
from phalanx.train.distributed.context_parallel import local_runs
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.float8_select import Float8Selector, make_float8_selector, measure_layer_rows
from phalanx.train.distributed.mesh import Mesh, build_mesh
from phalanx.train.distributed.meta_device import allocate_meta_parameters
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.distributed.parallelize import ParallelConfig, parallelize
from phalanx.train.distributed.pipeline.build import PipelineRunner, build_pipeline
from phalanx.train.evaluation import EvaluationResult, evaluate
from phalanx.train.grad_sync.reducer_choice import choose_reducer
from phalanx.train.hf.inputs import check_auxiliary_loss
from phalanx.train.lm_head import eval_mode, find_lm_head
from phalanx.train.local_sgd.step import make_local_sgd_accumulator
from phalanx.train.loss import ContextSplit, LMHead, LossFn, LossModule, plan_context_split
from phalanx.train.model_builder import build_model, check_same_initial_values
from phalanx.train.ops.collectives import all_reduce_copy, group_rank, group_size
from phalanx.train.ops.lora import has_lora
from phalanx.train.ops.random_draws import HeldSlices, MicroBatchSeeds, Runs
from phalanx.train.optim import (
    NormFn,
    OptimizerContainer,
    compute_norms,
    compute_squared_norms,
    select_muon_matrices,
)
from phalanx.train.precision import AUTOCAST_DTYPES, GradScaler, autocast_context
from phalanx.train.step_metrics import num_metric_slots
from phalanx.train.tasks import LanguageModeling, Task, TensorBatch, check_problem_type, open_task
from phalanx.train.train_context import TrainContext, WorkerProcess
from phalanx.train.train_step import GradientAccumulator, to_device


def make_accumulator(
    recipe: ResolvedRecipe,
    dist_env: DistEnv,
    parallel_model: ParallelModel,
    optimizer: OptimizerContainer,
    scaler: GradScaler,
    seeds: MicroBatchSeeds,
) -> GradientAccumulator:
    """The accumulator of a step, with gradients reduced as the parallelism requires."""
    if recipe.local_sgd is not None:
        return make_local_sgd_accumulator(recipe, dist_env, parallel_model, optimizer, scaler, seeds)
    slots = num_metric_slots(recipe.batch.global_size // recipe.batch.micro_size)
    reducer = choose_reducer(recipe, dist_env, parallel_model, slots)
    return GradientAccumulator(recipe, dist_env, parallel_model, optimizer.parameter_names, reducer, scaler, seeds)


def make_held_slices(mesh: Mesh, batch: int, length: int | None, split: ContextSplit | None) -> HeldSlices | None:
    """Which slices of a forward's tensors this rank holds; None where it holds whole tensors."""
    if mesh.tensor_group is None and split is None:
        return None
    positions: Runs = () if length is None else ((0, length),)
    if split is not None and length is not None:
        positions = local_runs(length, split.method, split.group)
    return HeldSlices(batch, length, positions, group_rank(mesh.tensor_group), group_size(mesh.tensor_group))


def make_norm_fn(parallel_model: ParallelModel) -> NormFn:
    """Norms of whole parameters, also of those that tensor or expert parallel cuts: one more sum over their group."""
    groups = {"tensor": parallel_model.mesh.tensor_group, "expert": parallel_model.mesh.expert_group}
    names: dict[Tensor, str] = {parameter: name for name, parameter in parallel_model.parameters().items()}

    def compute_sharded_norms(parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        squares = compute_squared_norms(parameters, tensors)
        for axis, group in groups.items():
            is_sharded = [
                any(c.mesh_axis == axis for c in parallel_model.dim_shards.get(names[p], ())) for p in parameters
            ]
            if group is not None and any(is_sharded):
                chosen = torch.tensor(is_sharded, device=squares.device)
                squares = torch.where(chosen, all_reduce_copy(squares.where(chosen, 0.0), group), squares)
        return list(squares.sqrt_().unbind())

    return compute_sharded_norms if parallel_model.dim_shards else compute_norms


def count_units_per_sample(facts: DataInfo) -> int:
    """Tokens in a sample, or 1 where samples are counted."""
    return facts.seq_len if facts.kind == "tokens" and facts.seq_len else 1


def build_context(
    process: WorkerProcess,
    recipe: ResolvedRecipe,
    data: RunData,
    init_weights: bool = True,
    callbacks: Callbacks | None = None,
    connection_scope: Callable[[str], AbstractContextManager[Any]] = lambda dimension: contextlib.nullcontext(),
) -> TrainContext:
    """Build everything that training works with, from the recipe. `init_weights`: with the weights of a new run;
    `callbacks`: those that exist already; `connection_scope` as for `build_mesh`."""
    run, folder, dist_env = process.run, process.folder, process.dist_env
    mesh = build_mesh(recipe.parallelism, dist_env, recipe, connection_scope)
    task = open_task(recipe, folder, data.info)
    # A model that will be sharded is built on the host or the meta device: it need not fit on one device.
    device = dist_env.device if mesh.is_pure_ddp or mesh.pipeline_group is not None else torch.device("cpu")
    model = build_model(
        recipe.model, data.info, folder, recipe.seed, device, recipe.lora, load=False, init_weights=init_weights
    )
    check_problem_type(task, model)
    initial_weights = _find_initial_weights(recipe, folder, model) if init_weights else None
    if init_weights and initial_weights is None:
        check_same_initial_values(dist_env, model)
    if mesh.is_pure_ddp:
        allocate_meta_parameters([model], dist_env.device)
    model.train()
    muon_matrices = select_muon_matrices(model, recipe.optimizer)
    loss_fn = make_loss_fn(recipe, task, model, mesh, dist_env, data)
    scaler = GradScaler.for_precision(recipe.precision, recipe.batch.global_size * count_units_per_sample(data.info))
    seeds = MicroBatchSeeds(recipe.seed, dist_env.device)
    fp8 = (
        _make_float8_layer_selector(recipe, run, model, task, mesh, dist_env, data)
        if recipe.precision == "fp8"
        else None
    )
    parallel_model, loss_module = _build_parallel_model(
        recipe, model, loss_fn, mesh, dist_env, data, seeds, scaler, fp8
    )
    seeds.slices = make_held_slices(mesh, recipe.batch.micro_size, data.info.seq_len, loss_fn.context_split)
    allocate_meta_parameters(parallel_model.modules, dist_env.device)
    if initial_weights is not None:
        initial_weights.fill_parameters(parallel_model)
    optimizer = OptimizerContainer(
        parallel_model.merged_module,
        recipe.optimizer,
        seed=recipe.seed,
        offload=recipe.optimizer.offload,
        norm_fn=make_norm_fn(parallel_model),
        muon_matrices=muon_matrices,
    )
    accumulator = make_accumulator(recipe, dist_env, parallel_model, optimizer, scaler, seeds)
    if callbacks is None:
        view = RunContext(run.path, dist_env.rank, dist_env.world_size, model)
        callbacks = Callbacks(load_callbacks(recipe.callbacks, folder), view)
    return TrainContext(
        run=run,
        recipe=recipe,
        dist_env=dist_env,
        data=data,
        model=model,
        loss_module=loss_module,
        parallel_model=parallel_model,
        optimizer=optimizer,
        scaler=scaler,
        accumulator=accumulator,
        callbacks=callbacks,
        reporter=process.reporter,
        stop_request=process.stop_request,
        count_units=data.count_units,
        evaluate=make_evaluator(process, recipe, data, loss_module, dist_env, mesh),
        prepare_batch=lambda arrays: to_device(arrays, dist_env.device),
        heartbeat=process.heartbeat,
    )


def make_evaluator(
    process: WorkerProcess,
    recipe: ResolvedRecipe,
    data: RunData,
    loss_module: LossModule | PipelineRunner,
    dist_env: DistEnv,
    mesh: Mesh,
) -> Callable[[], EvaluationResult | None] | None:
    """Return what evaluates on the validation set, which returns None where a stop was requested; None where there is
    no validation set."""
    if data.num_validation_samples == 0:
        return None
    micro_size, heartbeat = recipe.batch.micro_size, process.heartbeat

    # Without gradients, and for a shorter last batch, the model is compiled again: for minutes, in silence.
    phases = ["evaluation"] if recipe.compile is False else ["compiling", "evaluation"]

    def stop_requested() -> bool:
        heartbeat.record(phases[0])  # it is asked between two batches
        return process.stop_request.requested

    def report_progress(num_done: int, num_samples: int) -> None:
        if dist_env.is_rank_zero:
            process.reporter.report_event(
                EvaluationProgress(step=heartbeat.step, num_samples_done=num_done, num_samples=num_samples)
            )

    def evaluate_validation() -> EvaluationResult | None:
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
            report_progress=report_progress,
        )
        del phases[:-1]
        return found

    return evaluate_validation


def make_loss_fn(
    recipe: ResolvedRecipe, task: Task, model: nn.Module, mesh: Mesh, dist_env: DistEnv, data: RunData
) -> LossFn:
    """How the model is scored under this layout: its sequences split, its vocabulary's logits never whole."""
    check_auxiliary_loss(model, recipe.parallelism)
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
    """A batch of one sample on the model's device; on the CPU for a model on the meta device."""
    device = next(model.parameters()).device
    return to_device(data.read_training(0, 1), torch.device("cpu") if device.type == "meta" else device)


def _make_float8_layer_selector(
    recipe: ResolvedRecipe, run: Run, model: nn.Module, task: Task, mesh: Mesh, dist_env: DistEnv, data: RunData
) -> Float8Selector:
    """What chooses the layers to compute in fp8, by the size that a micro-batch gives them."""
    args, kwargs = task.inputs(_load_one_sample(model, data))
    with eval_mode(model), autocast_context(recipe.precision, dist_env.device):
        of_one = measure_layer_rows(model, lambda: model(*args, **kwargs))
    micro_size = recipe.batch.micro_size
    rows = {name: max(1, rows * micro_size // mesh.parallelism.context) for name, rows in of_one.items()}
    return make_float8_selector(run, dist_env, rows, bool(recipe.compile))


def _build_parallel_model(
    recipe: ResolvedRecipe,
    model: nn.Module,
    loss_fn: LossFn,
    mesh: Mesh,
    dist_env: DistEnv,
    data: RunData,
    seeds: MicroBatchSeeds,
    scaler: GradScaler,
    fp8: Float8Selector | None = None,
) -> tuple[ParallelModel, LossModule | PipelineRunner]:
    """Apply the parallelism to the model. Returns this worker's part and the module that computes losses."""
    cache_weight_casts = uses_cached_casts(recipe.compile, recipe.precision, dist_env.device)
    head = make_lm_head(model, loss_fn.task, data) if cache_weight_casts and loss_fn.lm_head is None else None
    config = ParallelConfig(
        recipe.precision,
        activation_checkpointing=recipe.memory.activation_checkpointing,
        compile="cuda-graphs" if recipe.compile == "cuda-graphs" else recipe.compile is True,
        tp_plan=recipe.model.tp_plan,
        seq_len=data.info.seq_len,
        # Only the built-in loss supports a sharded vocabulary; a subclass may override it.
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
    return build_pipeline(
        model,
        loss_fn,
        to_device(data.read_training(0, micro_size), dist_env.device),
        mesh,
        dist_env,
        config,
        recipe.batch.global_size // (micro_size * mesh.dp_size),
        seeds.seed_micro_batch,
        (lambda: scaler.scale) if scaler.dynamic else None,
    )


def uses_cached_casts(compiled: bool | str, precision: str, device: torch.device) -> bool:
    """Whether weights are cast once a step (ops/cached_cast_linear.py): where compiled blocks run under autocast on a
    GPU. What a CUDA graph reads would be copied to where it was recorded, in each micro-batch."""
    return compiled is True and precision in AUTOCAST_DTYPES and device.type == "cuda"


def _has_built_in_head_loss(task: Task) -> bool:
    return getattr(type(task), "head_loss", None) is LanguageModeling.head_loss


def _head_loss_matches_loss(task: Task) -> bool:
    """Whether `head_loss` belongs to the `loss` of this task; a subclass may override only one of them."""
    owners = [kind for kind in type(task).__mro__ if "loss" in vars(kind) or "head_loss" in vars(kind)]
    return not owners or "head_loss" in vars(owners[0])


def _find_initial_weights(recipe: ResolvedRecipe, folder: Path, model: nn.Module) -> InitialWeights | None:
    """Where the weights of a new run come from; None where the model was built with them."""
    if recipe.init_from is not None:
        return open_initial_weights(recipe.init_from, folder, model)
    directory = huggingface_directory(recipe.model.build, folder)
    return None if directory is None else open_hf_weights(directory, model)
