"""A worker: one process of a run, from its environment to an exit code.

The agent forks it with `work({"run": DIR, "folder": DIR})`; where torchrun or srun started `phalanx train`, that calls
`take_part`. Everything a worker trains with stands in the run's `resolved.yaml`.
"""

import contextlib
import faulthandler
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.compat import set_determinism
from phalanx.data import Data, Facts, is_dataset, open_data, prepare_all
from phalanx.errors import ExitCode, PhalanxError, storage_failed, words_of
from phalanx.recipe import Recipe, huggingface_directory, load_recipe
from phalanx.recipe.devices import kind_of
from phalanx.recipe.schema import Parallelism
from phalanx.run import Event, Run
from phalanx.run.event_types import WorkerStarted
from phalanx.run.messages import StandbyReady, WorkerFinishing
from phalanx.run.pulse import Pulse, Silent, pulse_of
from phalanx.train.adapter import has_adapter
from phalanx.train.callbacks import Callbacks, RunView, load_callbacks
from phalanx.train.causes import naming_causes
from phalanx.train.checkpoint import clean, list_checkpoints
from phalanx.train.ends import make_stepper, norms_of, result_of, resume, tell_start
from phalanx.train.evaluation import Scores, evaluate
from phalanx.train.fp8_choice import Chooser, chooser, rows_of
from phalanx.train.gang import Gang
from phalanx.train.head import evaluating, find_head
from phalanx.train.loop import train
from phalanx.train.meeting import come_together, telling_others
from phalanx.train.memory import OutOfMemory, explain_memory
from phalanx.train.model import Seeds, build_model, check_begins_alike, described
from phalanx.train.nodes import exchanged
from phalanx.train.objective import Head, Objective, Scoring, sequences_of
from phalanx.train.optimizers import Optimizer
from phalanx.train.orders import Connections, orders_of
from phalanx.train.parallel.divided import Divided
from phalanx.train.parallel.mesh import Mesh, build_mesh
from phalanx.train.parallel.parallelize import Choices, divide
from phalanx.train.parallel.staging import Staged, divide_stages
from phalanx.train.parts import Parts
from phalanx.train.place import Place, agree, device_of, from_environment, join, leave, outwait
from phalanx.train.precision import AUTOCAST, LossScale, computing, set_products
from phalanx.train.rebuild import Sharded
from phalanx.train.regroup import Built, Regrouping, Way, Whole, calls_for
from phalanx.train.reporter import Reporter, reporter
from phalanx.train.state import Progress, Standing
from phalanx.train.step import to_device
from phalanx.train.stop import StopRequest
from phalanx.train.tasks import LanguageModeling, Task, TensorBatch, load_task
from phalanx.train.warm_up import warm_up
from phalanx.train.weights import Origin, allocate, files, origin

SAME_DATA = "all nodes must read the same; give the recipe a source that is the same on each, or share the file system"
COMES_LATER = "PHALANX_STANDBY"
"""Set to 1 for a worker that takes the place of one that was lost while the others train on."""


def work(payload: dict[str, Any]) -> None:
    """Train as one worker of the run and leave the process with its exit code."""
    raise SystemExit(int(take_part(payload, from_environment(device="cpu"))))  # until the recipe is read


def take_part(payload: dict[str, Any], place: Place, show: Callable[[Event], None] | None = None) -> ExitCode:
    """Train as one worker of the run. Without an agent the leading worker gives `show` every event that it writes."""
    run, folder = Run(Path(payload["run"])), Path(payload["folder"])
    stop = StopRequest()
    stop.install()
    report = reporter(run, place.leads, os.environ.get("PHALANX_EVENTS_FD"), show)
    faulthandler.register(signal.SIGUSR2)  # the agent asks where we are; the answer goes to our log
    pulse = pulse_of(place.local_rank)
    pulse.beat("starting")
    report.event(worker_started(place, joins_late=os.environ.get(COMES_LATER) == "1"))
    by_agent, orderly = bool(os.environ.get("PHALANX_EVENTS_FD")), True
    try:
        with naming_causes():
            code = _train(run, folder, place, stop, report, pulse, force=bool(payload.get("force")))
    except PhalanxError as error:
        report.error(str(error), int(error.code), out_of_memory=isinstance(error, OutOfMemory))
        code = error.code
        orderly = by_agent or error.__cause__ is None  # else who knows what still waits for the group
    except SystemExit as error:
        early = left_early(error, f"worker {place.rank}, in step {pulse.step}")
        if by_agent:  # to which it is an exception like others
            raise RuntimeError(early) from error
        report.error(early, int(ExitCode.GAVE_UP))
        code = ExitCode.GAVE_UP
    except OSError as error:
        if storage_failed(error):
            report.error(words_of(error), int(ExitCode.UNFINISHED))
        raise
    finally:
        report.close()
    if orderly:
        leave()
    report.say(WorkerFinishing(rank=place.rank, exit_code=int(code)))
    return code


def worker_started(place: Place, joins_late: bool = False) -> WorkerStarted:
    """The event of this process."""
    host = os.uname().nodename
    return WorkerStarted(pid=os.getpid(), rank=place.rank, host=host, attempt=place.attempt, joins_late=joins_late)


def left_early(error: SystemExit, who: str) -> str:
    """The message for `sys.exit` in the middle of a run, and where it was called."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    called = f"sys.exit({'' if error.code is None else repr(error.code)})"
    return f"{who}: {called} was called before the run was done ({frame.filename}:{frame.lineno}, in {frame.name})"


def _train(
    run: Run, folder: Path, place: Place, stop: StopRequest, report: Reporter, pulse: Pulse | Silent, force: bool
) -> ExitCode:
    with telling_others(place):
        recipe = load_recipe(run.resolved).recipe
        place = replace(place, device=device_of(place.local_rank, os.environ, recipe.device))
        prepare_torch(recipe, place)
    between, within, comes_later = Connections(), Connections(), os.environ.get(COMES_LATER) == "1"
    # Not those within a replica: all its workers are there, and gloo may wait for ever when a message is cut short. Who
    # of them is torn out of a collective with other replicas cuts these, too.
    orders = orders_of(between.cut)
    layout = recipe.parallelism
    assert isinstance(layout, Parallelism)
    size = layout.world // layout.replicate  # workers that hold a replica together
    if comes_later:  # the others train meanwhile
        assert orders is not None
        number, place = place.rank, replace(place, rank=0, world=1)
    else:
        number = place.rank
        with telling_others(place):
            join(place, connections=between, before=come_together)
        if place.leads:
            clean(run.checkpoints)
    recipe = with_data_here(recipe, run, folder)
    data = open_data(recipe.data, recipe.evaluation, recipe.seed)
    agree(place, data.fingerprint, "data", SAME_DATA)
    meta = {"fingerprint": data.fingerprint, "recipe": recipe.model_dump(mode="json")}
    meta["model"] = described(recipe.model, data.facts, folder)

    # All or none draw weights: one that does not see the checkpoints yet would else begin with its own.
    fresh = not comes_later and not any(exchanged(place, bool(list_checkpoints(run.checkpoints))))

    def build(place: Place, callbacks: Callbacks | None = None, fresh: bool = False) -> Built:
        here = recipe
        if orders is not None:
            now = layout.model_copy(update={"replicate": place.world // size})
            here = recipe.model_copy(update={"parallelism": now})
        made = (run, here, folder, place, data, report, stop, pulse, fresh, callbacks)
        return Built(*assemble(*made, lambda dimension: between if dimension == "replicate" else within))

    # Without the other workers of its replica none can divide a model.
    built = None if comes_later and size > 1 else build(place, fresh=fresh)
    regrouping = None
    if orders is not None:
        way: Way
        if size > 1:
            way = Sharded(size, build, built)
        else:
            assert built is not None
            way = Whole(partial(_scorer, recipe, built.objective, data, stop, pulse))
        regrouping = Regrouping(orders, between, within, number, place, report, pulse, way, data.fingerprint)
    progress, samples = Progress(), data.train_samples
    if not comes_later:
        assert built is not None
        progress = resume(built.parts, data.fingerprint, force, empty=not fresh)
        if place.leads:
            tell_start(built.parts, samples, progress)
    pulse.beat("restoring")
    micro = recipe.batch.micro_size
    assert isinstance(micro, int)
    with explain_memory(micro, run.read_lossy(run.plan)):
        if recipe.compile and built is not None:
            warm_up(built.parts, built.objective, progress)
            pulse.beat("compiling")
        begin: Progress | Standing = progress
        if comes_later:
            assert regrouping is not None
            report.say(StandbyReady(rank=number))
            built, begin = regrouping.meet(built, None, samples)
        assert built is not None
        while True:
            if orders is not None and regrouping is not None:
                built.parts.summoned, built.parts.heed = lambda: orders.waiting, regrouping.heed
                regrouping.listen(built.parts.divided.modules, bool(recipe.compile))
            gang = Gang(built.parts, begin, meta)
            try:
                status = train(gang, built.objective)
                break
            except Exception as error:
                if regrouping is None or not calls_for(error) or not gang.whole:
                    raise
            pulse.beat("restoring")
            standing = regrouping.leave(gang)
            del gang
            built, begin = regrouping.meet(built, standing, samples)
    if built.parts.place.leads:
        report.result(result_of(built.parts, gang.progress, status))
    return ExitCode.DONE if status == "done" else ExitCode.UNFINISHED


def with_data_here(recipe: Recipe, run: Run, folder: Path) -> Recipe:
    """The recipe with data that this node has: what the leading node prepared into its cache is prepared here as well
    where the nodes do not share it."""
    sources = recipe.data.source if isinstance(recipe.data.source, list) else [recipe.data.source]
    places = [*sources, *([recipe.evaluation.source] if recipe.evaluation.source else [])]
    if all(is_dataset(folder / source.prepared) for source in places if source.prepared is not None):
        return recipe
    given = load_recipe(run.recipe).recipe
    data, evaluate = prepare_all(given.data, given.evaluation, folder)
    return recipe.model_copy(update={"data": data, "evaluation": evaluate})


def prepare_torch(recipe: Recipe, place: Place) -> None:
    """Settings of this process on which speed and bits depend, and how long it waits for others."""
    outwait(recipe.fault_tolerance.hang_timeout_s)
    assert isinstance(recipe.num_threads, int)
    torch.set_num_threads(recipe.num_threads)
    set_kernels(place.device, recipe.precision, recipe.determinism != "off")


def set_kernels(device: torch.device, precision: str, deterministic: bool) -> None:
    """Which kernels of a GPU this process may use: the rounding of fp32 products, and deterministic ones only. On a CPU
    all are deterministic."""
    set_products(precision, device)
    if kind_of(device.type).is_gpu and deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        set_determinism(True)


def units_per_sample(facts: Facts) -> int:
    """Tokens in a sample, or 1 where samples are counted."""
    return facts.sequence if facts.kind == "tokens" and facts.sequence else 1


def assemble(
    run: Run,
    recipe: Recipe,
    folder: Path,
    place: Place,
    data: Data,
    report: Reporter,
    stop: StopRequest,
    pulse: Pulse | Silent | None = None,
    fresh: bool = True,
    callbacks: Callbacks | None = None,
    opening: Callable[[str], AbstractContextManager[Any]] = lambda dimension: contextlib.nullcontext(),
) -> tuple[Parts, Objective | Staged]:
    """Build everything that training works with, from the recipe; without the weights of a new run unless `fresh`, and
    with the `callbacks` that there are already. `opening` as for `build_mesh`."""
    assert isinstance(recipe.parallelism, Parallelism)
    mesh = build_mesh(recipe.parallelism, place, recipe, opening)
    task = load_task(recipe.task, folder)
    # A model whose parameters are to be divided is built where it can be whole: on the host, or without any memory.
    device = place.device if mesh.only_replicates or mesh.pipeline is not None else torch.device("cpu")
    model = build_model(recipe.model, data.facts, folder, recipe.seed, device, recipe.lora, load=False, draw=fresh)
    weights = _origin(recipe, folder, model) if fresh else None
    if fresh and weights is None:
        check_begins_alike(place, model)
    if mesh.only_replicates:
        allocate([model], place.device)
    model.train()
    scoring = scoring_of(recipe, task, model, mesh, place, data)
    scale = LossScale.for_precision(recipe.precision, recipe.batch.global_size * units_per_sample(data.facts))
    seeds = Seeds(recipe.seed, place.device)
    fp8 = _fp8(recipe, run, model, task, mesh, place, data) if recipe.precision == "fp8" else None
    divided, objective = divided_model(recipe, model, scoring, mesh, place, data, seeds, scale, fp8)
    allocate(divided.modules, place.device)
    if weights is not None:
        weights.fill(divided)
    optimizer = Optimizer(
        divided.whole_module,
        recipe.optimizer,
        seed=recipe.seed,
        offload=recipe.optimizer.offload,
        norm_of=norms_of(divided),
        stage=mesh.pipeline is not None,
    )
    units = units_per_sample(data.facts)
    stepper = make_stepper(recipe, place, divided, optimizer, scale, seeds)
    if callbacks is None:
        view = RunView(run.path, place.rank, place.world, model)
        callbacks = Callbacks(load_callbacks(recipe.callbacks, folder), view)
    pulse = pulse or Silent()
    parts = Parts(
        run=run,
        recipe=recipe,
        place=place,
        data=data,
        model=model,
        divided=divided,
        optimizer=optimizer,
        scale=scale,
        stepper=stepper,
        callbacks=callbacks,
        reporter=report,
        stop=stop,
        units_per_sample=units,
        score=_scorer(recipe, objective, data, stop, pulse, place, mesh),
        convert=lambda arrays: to_device(arrays, place.device),
        pulse=pulse,
    )
    return parts, objective


def _scorer(
    recipe: Recipe,
    objective: Objective | Staged,
    data: Data,
    stop: StopRequest,
    pulse: Pulse | Silent,
    place: Place,
    mesh: Mesh,
) -> Callable[[], Scores | None]:
    """What evaluates on held-out data, if there are any."""
    micro = recipe.batch.micro_size
    assert isinstance(micro, int)

    # Without gradients, and for a shorter last batch, the model is compiled again: for minutes, in silence.
    doing = ["evaluation"] if recipe.compile is False else ["compiling", "evaluation"]

    def asked() -> bool:
        pulse.beat(doing[0])  # it is asked between two batches
        return stop.asked

    def score() -> Scores | None:
        if data.held_out_samples == 0:
            return None
        pulse.beat(doing[0])
        samples = recipe.evaluation.max_samples
        found = evaluate(objective, data, place=place, mesh=mesh, samples=samples, micro=micro, stop=asked)
        del doing[:-1]
        return found

    return score


def scoring_of(recipe: Recipe, task: Task, model: nn.Module, mesh: Mesh, place: Place, data: Data) -> Scoring:
    """How the model is scored under this layout: its sequences split, its vocabulary's logits never whole."""
    scoring = Scoring(task, recipe.precision, place.device)
    length = data.facts.sequence
    if mesh.context is not None and length is not None:
        scoring.sequences = sequences_of(model, mesh.context, length)
    if recipe.memory.chunked_loss is True or mesh.tensor is not None:
        scoring.head = head_of(model, task, data)
    return scoring


def head_of(model: nn.Module, task: Task, data: Data) -> Head | None:
    """The output layer that can be left out of the forward, because the task takes the loss from what enters it."""
    head_loss = getattr(task, "head_loss", None)
    if head_loss is None or not _same_loss(task):
        return None
    sample = _one_sample(model, data)
    # In fp32 a GPU has no kernel for grouped heads that keeps no scores, [heads, s, s] of them.
    device = next(iter(sample.values())).device
    with computing("bf16", device) if kind_of(device.type).is_gpu else contextlib.nullcontext():
        name = find_head(model, *task.inputs(sample))
    layer = None if name is None else model.get_submodule(name)
    # Logits of a layer with a bias, or with an adapter, are not a product with its weight alone.
    bare = getattr(layer, "bias", None) is None and layer is not None and not has_adapter(layer)
    if name is None or not isinstance(layer, nn.Linear) or not bare:
        return None
    return Head(name, head_loss, layer.out_features)


def _one_sample(model: nn.Module, data: Data) -> TensorBatch:
    """A batch of one, where the model is; beside it if that is nowhere."""
    at = next(model.parameters()).device
    return to_device(data.train(0, 1), torch.device("cpu") if at.type == "meta" else at)


def _fp8(recipe: Recipe, run: Run, model: nn.Module, task: Task, mesh: Mesh, place: Place, data: Data) -> Chooser:
    """What chooses the layers to compute in fp8, by the size that a micro-batch gives them."""
    args, kwargs = task.inputs(_one_sample(model, data))
    with evaluating(model), computing(recipe.precision, place.device):
        of_one = rows_of(model, lambda: model(*args, **kwargs))
    micro = recipe.batch.micro_size
    assert isinstance(micro, int)
    rows = {name: max(1, rows * micro // mesh.layout.context) for name, rows in of_one.items()}
    return chooser(run, place, rows, bool(recipe.compile))


def divided_model(
    recipe: Recipe,
    model: nn.Module,
    scoring: Scoring,
    mesh: Mesh,
    place: Place,
    data: Data,
    seeds: Seeds,
    scale: LossScale,
    fp8: Chooser | None = None,
) -> tuple[Divided, Objective | Staged]:
    """The model as this worker has it, and what runs it."""
    assert recipe.memory.activation_checkpointing != "auto"
    casts = casts_once(recipe.compile, recipe.precision, place.device)
    head = head_of(model, scoring.task, data) if casts and scoring.head is None else None
    choices = Choices(
        recipe.precision,
        recompute=recipe.memory.activation_checkpointing,
        compile="cuda-graphs" if recipe.compile == "cuda-graphs" else recipe.compile is True,
        rules=recipe.model.tp_plan,
        sequence=data.facts.sequence,
        # Only our own loss knows how to be computed over parts of the vocabulary; a subclass may have another.
        vocabulary=scoring.head is not None and _own_head_loss(scoring.task),
        fp8=fp8,
        cast_once=casts,
        output=None if head is None else head.name,
    )
    if mesh.pipeline is None:
        objective = Objective(model, scoring)
        divided, vocabulary = divide(model, objective, mesh, choices)
        if scoring.head is not None:
            scoring.head = scoring.head.over(vocabulary)
        return divided, objective
    micro = recipe.batch.micro_size
    assert isinstance(micro, int)
    return divide_stages(
        model,
        scoring,
        to_device(data.train(0, micro), place.device),
        mesh,
        place,
        choices,
        recipe.batch.global_size // (micro * mesh.data_size),
        seeds.of_stage,
        (lambda: scale.scale) if scale.dynamic else None,
    )


def casts_once(compiled: bool | str, precision: str, device: torch.device) -> bool:
    """Whether weights are cast once a step (cast_once.py): where compiled blocks run under autocast on a GPU. What a
    CUDA graph reads would be copied to where it was recorded, in each micro-batch."""
    return compiled is True and precision in AUTOCAST and device.type == "cuda"


def _own_head_loss(task: Task) -> bool:
    return getattr(type(task), "head_loss", None) is LanguageModeling.head_loss


def _same_loss(task: Task) -> bool:
    """Whether `head_loss` is the loss of this task, and not of a class whose `loss` it replaces."""
    owners = [kind for kind in type(task).__mro__ if "loss" in vars(kind) or "head_loss" in vars(kind)]
    return not owners or "head_loss" in vars(owners[0])


def _origin(recipe: Recipe, folder: Path, model: nn.Module) -> Origin | None:
    """Where the weights of a new run come from; None where the model was built with them."""
    if recipe.init_from is not None:
        return origin(recipe.init_from, folder, model)
    directory = huggingface_directory(recipe.model.build, folder)
    return None if directory is None else files(directory, model)
