"""Prepare a run: check the recipe, prepare data, resolve every `auto` by short trials, write the run directory.

Everything that can be wrong is checked before anything is written.
"""

import contextlib
import datetime
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from phalanx.app import resume
from phalanx.app.trackers import check_trackers
from phalanx.autoconfig import resolve
from phalanx.autoconfig.choices import resume_recipe
from phalanx.autoconfig.trial_names import PARALLELISM_TRIAL
from phalanx.cluster import Machine, collect_environment, discover_machine
from phalanx.cluster.discovery import check_workers
from phalanx.cluster.health.checks.host import nearest_existing
from phalanx.cluster.load import CLUSTER_VARIABLE, load_cluster
from phalanx.cluster.spec import Prices
from phalanx.data import PrepareProgress, RunData, is_dataset, open_data, prepare_all_sources
from phalanx.data.chat import ChatEncoder, ChatPlan
from phalanx.data.chat_template import MAX_TEMPLATE_BYTES, find_chat_template
from phalanx.data.dataset_files import open_dataset_files
from phalanx.data.manifest import TOKENIZER_FILE, read_manifest
from phalanx.data.reader import RESTORE_FILES_HINT
from phalanx.data.rows import BadRowError, count_skipped
from phalanx.data.source_files import SOURCE_ORIGINS_KEY, pin_sources
from phalanx.data.tokenizers import MAX_TOKENIZER_BYTES, find_stop_tokens, load_run_tokenizer
from phalanx.errors import (
    RETRYABLE_STORAGE_ERRNOS,
    DataError,
    PhalanxError,
    RecipeError,
    UnfitNodeError,
    UsageError,
)
from phalanx.formatting import format_bytes, format_percent, format_plural
from phalanx.planner.storage_costs import checkpoint_bytes_of
from phalanx.recipe import Recipe, ResolvedRecipe, check_recipe, load_resolved_recipe, scale_batch_with_workers
from phalanx.recipe.checks import check_task, num_workers_for
from phalanx.recipe.data_schema import ChatConfig, list_sources
from phalanx.recipe.devices import FP8_VARIABLE, check_device
from phalanx.recipe.imports import huggingface_location
from phalanx.recipe.load import LoadedRecipe, dump_recipe
from phalanx.recipe.locations import (
    describe_version,
    huggingface_directory,
    localize_named,
    localize_tokenizer,
    name_recipe_key,
    pin_location,
)
from phalanx.recipe.schema import Parallelism
from phalanx.recipe.work_division import describe_batch_scaling
from phalanx.run import Event, Run, companions
from phalanx.run.cache import check_cache_writable
from phalanx.run.directory import check_run_path, write_atomic, write_json
from phalanx.run.event_types import RecipeResolved, RunWarning
from phalanx.run.fields import to_json
from phalanx.run.lock import lock_run
from phalanx.run.mixture import MIXTURE_KEY, format_epochs
from phalanx.safe_files import read_bytes
from phalanx.storage.store import check_writable
from phalanx.storage.url import is_url, parse_url
from phalanx.train.code_trust import record_trust
from phalanx.train.lr_schedule import peak_learning_rate

FINGERPRINT_KEY, TOKENIZER_KEY, DATA_SUMMARY_KEY = "data_fingerprint", "tokenizer", "data_summary"
"""Keys of plan.json."""


class TrialProcess(Protocol):
    """Another process that runs functions, such as the fork server."""

    def call(self, function: str, payload: Any) -> Any:
        """Run `module:function(payload)` in a fork of it and return its value."""

    def preload(self, function: str, payload: Any) -> None:
        """Run `module:function(payload)` in it, to import modules once for all its forks."""


@dataclass(frozen=True)
class RunRequest:
    """A run to start or resume: its recipe, its directory, and the workers that train it."""

    loaded: LoadedRecipe
    run: Run
    world_size: int | None = None
    """Workers on all nodes together; None: as many as the recipe says, or one for each GPU of this machine."""
    num_nodes: int = 1
    force: bool = False
    """Resume although the recipe or the data changed."""
    is_elastic: bool = False
    """Whether it may train on fewer nodes: it then resumes from its division among all of them."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that can start, with notes to report when it does."""

    run: Run
    recipe: ResolvedRecipe
    recipe_dir: Path
    plan: dict[str, Any]
    cluster: dict[str, Any]
    notes: list[str]
    first_attempt: int
    resolved: RecipeResolved | None = None
    """What preparing took; None in a session, which resolves nothing by trials."""
    source_commits: Mapping[str, str] = field(default_factory=dict)
    """The commit of each `hf://` URL of a source."""

    def opening_events(self) -> list[Event]:
        """What is reported before the first attempt."""
        return [*([] if self.resolved is None else [self.resolved]), *(RunWarning(text=note) for note in self.notes)]


@contextlib.contextmanager
def prepare_run(
    request: RunRequest,
    process: TrialProcess,
    progress: Callable[[PrepareProgress], None] = lambda progress: None,
    write: bool = True,
    lock_timeout_s: float = 0.0,
) -> Iterator[PreparedRun]:
    """Check, prepare, resolve and write a run, and hold its lock. Raises PhalanxError before anything is written.

    Args:
        process: runs trials.
        progress: called while data are prepared, and with a note when a trial begins.
        write: False: nothing is written but the data cache.
        lock_timeout_s: how long another process may still hold the run's lock.
    """
    loaded, run, start_time = request.loaded, request.run, time.perf_counter()
    begins = not run.has_checkpoint()
    machine, world_size = check_start(loaded, request.world_size, request.num_nodes, begins)
    if write:
        check_run_path(run.path)
    import_payload = {**dict(loaded.recipe.model), **loaded.recipe.model_dump(include={"task", "callbacks"})}
    import_payload["folder"] = str(loaded.recipe_dir)
    adapter = loaded.recipe.adapter
    import_payload |= {"init": loaded.recipe.init_from if begins else None, "begins": begins}
    import_payload["adapter"] = None if adapter is None else adapter.model_dump(mode="json")
    with loaded.locate_errors():
        directory = huggingface_directory(loaded.recipe.model.build, loaded.recipe_dir)
        load_start_time = time.perf_counter()
        if directory is not None:
            process.preload("phalanx.train.hf.model:preload_architecture", str(directory))
        code_hash = process.call("phalanx.autoconfig.trials:check_imports", import_payload)
    load_s = time.perf_counter() - load_start_time
    times = resolve.TrialTimes(lambda text: progress(PrepareProgress(0, 0, 0, 0.0, note=text)))
    run_trial = resolve.cache_trials(process.call, machine, code_hash, times)

    def prepare() -> PreparedRun:
        with loaded.locate_errors():
            ready = resolve_run(request, machine, world_size, run_trial, progress)
            if begins and (ready.recipe.init_from or (adapter is not None and adapter.init_from)):
                kept = {**resolve.make_trial_recipe(ready.recipe), "init_from": ready.recipe.init_from}
                process.call("phalanx.autoconfig.trials:begins", {"recipe": kept, "folder": str(ready.recipe_dir)})
            check_free_space(run, ready.recipe, ready.plan)
            duration_s = time.perf_counter() - start_time
            resolved = RecipeResolved(
                duration_s=duration_s, load_s=load_s, trace_s=times.trace_s, trials_s=times.trials_s
            )
            return replace(ready, resolved=resolved)

    if not write:
        yield prepare()
        return
    with contextlib.ExitStack() as stack:
        if is_new := not run.path.is_dir():
            prepared = prepare()
            create_run(run)
        note = stack.enter_context(lock_run(run, lock_timeout_s))
        if not is_new:
            prepared = prepare()
            create_run(run)
        prepared.notes.extend([] if note is None else [note])
        write_run_files(prepared, loaded)
        yield prepared


def check_start(loaded: LoadedRecipe, nproc: int | None, nodes: int = 1, begins: bool = True) -> tuple[Machine, int]:
    """Check in this process that a recipe can run here; return this machine and the number of workers.

    `begins`: the run has no checkpoint yet.
    """
    loaded.check_required()
    check_cache_writable()
    check_trackers(loaded)
    machine = find_machine(loaded)
    world = nproc or num_workers_for(loaded.recipe, machine.num_gpus or 1)
    check_workers(machine, world, nodes)
    check_recipe(loaded.recipe, loaded.recipe_dir, world, loaded.location_of, begins)
    check_recipe_on_machine(loaded.recipe, machine, loaded.location_of)
    check_upload(loaded.recipe)
    with loaded.locate_errors():
        find_origins(loaded.recipe, loaded.recipe_dir, begins)
    return machine, world


def find_origins(recipe: Recipe, recipe_dir: Path, begins: bool) -> dict[str, dict[str, str]]:
    """Download what a recipe reads by URL before training. Return by key its URL, and the commit or a hash of the
    names, sizes and ETags: what was read there."""
    origins = {}
    named = {"model.build": recipe.model.build, "init_from": recipe.init_from if begins else None}
    for key, value in named.items():
        if value is not None and is_url(huggingface_location(value) or value):
            pinned = pin_location(value, key)
            path = huggingface_directory(pinned, None, key) or localize_named(pinned, None, key)
            origins[key] = {"url": huggingface_location(pinned) or pinned, "version": describe_version(path)}
    tokenizer = recipe.data.tokenizer
    if isinstance(tokenizer, str) and is_url(tokenizer):
        path = localize_tokenizer(tokenizer, recipe_dir)
        origins["data.tokenizer"] = {"url": tokenizer, "version": describe_version(path)}
    return origins


def pin_origins(recipe: Recipe) -> Recipe:
    """The recipe with the commits and the checkpoint that its URLs mean now: what all its workers read."""
    build = pin_location(recipe.model.build, "model.build")
    init_from = None if recipe.init_from is None else pin_location(recipe.init_from, "init_from")
    model, adapter = recipe.model.model_copy(update={"build": build}), recipe.adapter
    if adapter is not None and adapter.init_from is not None:
        adapter = adapter.model_copy(update={"init_from": pin_location(adapter.init_from, "adapter.init_from")})
    return recipe.model_copy(update={"model": model, "init_from": init_from, "adapter": adapter})


def find_machine(loaded: LoadedRecipe) -> Machine:
    """Return this machine with the device of the recipe. Raises RecipeError where it has none."""
    with loaded.locate_errors():
        return discover_machine(device=loaded.recipe.device)


def check_recipe_on_machine(recipe: Recipe, machine: Machine, locate: Callable[[str], str] = str) -> None:
    """Raise RecipeError when a recipe needs what this machine does not have; `locate` as for `check_recipe`."""
    anywhere = os.environ.get(FP8_VARIABLE) == "always"
    check_device(recipe, machine.device, machine.device_name, machine.capability, locate, anywhere, machine.rocm)


def create_run(run: Run) -> None:
    """Create the run directory. Raises UsageError when it cannot be created, OSError when the storage may come back."""
    try:
        run.create()
    except OSError as error:
        if error.errno in RETRYABLE_STORAGE_ERRNOS:
            raise
        raise UsageError(f"{run.path}: cannot create a run here: {error.strerror}; choose another --run") from None


def resolve_run(
    request: RunRequest,
    machine: Machine,
    world_size: int,
    call: resolve.SubprocessCall,
    progress: Callable[[PrepareProgress], None],
) -> PreparedRun:
    """Prepare data and resolve the recipe for `world_size` workers. Writes only the data cache."""
    loaded, run = request.loaded, request.run
    given, folder = loaded.recipe, loaded.recipe_dir
    previous, notes = resume.load_resumed_recipe(run, given, request.force)
    data, evaluate, commits = pin_sources(given.data, given.evaluation, run)
    data, evaluate = prepare_all_sources(data, evaluate, folder, report_progress=progress, seed=given.seed)
    prepared = given.model_copy(update={"data": data, "evaluation": evaluate, "device": machine.device})
    opened = open_data(data, evaluate, given.seed)  # raises for missing or too little data before anything is written
    check_task(given, opened.info.kind, loaded.location_of)
    if opened.records == "classes":
        opened.check_classes()
    if given.epochs is not None:
        steps = count_steps(given.epochs, opened, given, world_size)
        prepared = prepared.model_copy(update={"epochs": None, "steps": steps})
    first_attempt = resume.read_last_attempt(run) + 1
    if previous is not None:
        previous = resume.restore_full_division(run, previous) if request.is_elastic else previous
        recipe = resume_recipe(previous, prepared, world_size)
        check_recipe(recipe, folder, world_size, loaded.location_of, begins=not run.has_checkpoint())
        check_recipe_on_machine(recipe, machine)
        check_parallelism(recipe, folder, call)
        notes += resume.describe_all_changes(run, given, previous, recipe)
        plan, cluster = run.read_json_or_empty(run.plan), run.read_json_or_empty(run.cluster)
        plan = plan if isinstance(plan.get("data_info"), dict) else {**plan, "data_info": asdict(opened.info)}
        plan.pop(resume.FULL_DIVISION_KEY, None)
        plan = check_same_data(run, plan, opened.fingerprint, request.force)
        plan = {**plan, **describe_data_read(opened, recipe)}
        if opened.info.kind == "images" and run.has_checkpoint() and not request.force:
            check_same_image_processor(run, recipe, folder)
        return PreparedRun(run, recipe, folder, plan, cluster, notes, first_attempt, source_commits=commits)
    prepared = scale_batch_with_workers(pin_origins(prepared), world_size)
    check_parallelism(prepared, folder, call)
    recipe, plan, cluster = resolve.resolve_auto(prepared, folder, machine, world_size, call, request.num_nodes)
    plan = {**plan, FINGERPRINT_KEY: opened.fingerprint, **describe_data_read(opened, recipe)}
    notes += describe_short_sources(opened, recipe)
    notes += describe_batch_scaling(given, recipe, peak_learning_rate(recipe))
    notes += resolve.describe_other_load(given, cluster)
    check_recipe(recipe, folder, world_size, loaded.location_of, begins=not run.has_checkpoint())
    if given.parallelism == "auto":
        check_parallelism(recipe, folder, call)
    return PreparedRun(run, recipe, folder, plan, cluster, notes, first_attempt, source_commits=commits)


def count_steps(epochs: float, data: RunData, recipe: Recipe, world_size: int) -> int:
    """The steps, at least 1, that take all training samples `epochs` times."""
    num_samples = scale_batch_with_workers(recipe, world_size).batch.global_size
    return max(math.ceil(epochs * data.num_train_samples / num_samples), 1)


def check_same_data(run: Run, plan: dict[str, Any], fingerprint: str, force: bool) -> dict[str, Any]:
    """Return a run's plan with the fingerprint of its data. Raises DataError for other data than before, unless forced:
    workers compare them with the checkpoint, too, but then the run has started and failed."""
    before = plan.get(FINGERPRINT_KEY)
    if isinstance(before, str) and before != fingerprint and run.has_checkpoint() and not force:
        raise DataError(
            f"{run.location}: was trained on other data (fingerprint {before}, now {fingerprint}); {RESTORE_FILES_HINT}"
        )
    return {**plan, FINGERPRINT_KEY: fingerprint}


def describe_short_sources(data: RunData, recipe: Recipe) -> list[str]:
    """Describe the sources that have fewer samples than a step takes of them."""
    weights = data.mixture.average_weights()
    shares = [recipe.batch.global_size * weight / sum(weights) for weight in weights]
    return [
        f"data.source.{number}: has {format_plural(num_samples, 'training sample')}, and a step takes about "
        f"{share:.0f} of it: they repeat within each step"
        for number, (num_samples, share) in enumerate(zip(data.mixture.num_samples, shares, strict=True))
        if len(shares) > 1 and num_samples < math.floor(share)
    ]


def describe_data_read(data: RunData, recipe: Recipe) -> dict[str, Any]:
    """Return what plan.json says of the data that are read."""
    return {
        DATA_SUMMARY_KEY: describe_data(data, recipe),
        MIXTURE_KEY: to_json(data.mixture),
        "bytes_per_sample": data.info.bytes_per_sample,
    }


def describe_data(data: RunData, recipe: Recipe) -> str:
    """Describe the training and validation samples of a run in one line."""
    about = "about " if recipe.data.prepare == "stream" else ""  # it is not all prepared
    text = f"{about}{format_plural(data.num_train_samples, 'sample')} an epoch"
    if len(recipe.data.sources) > 1:
        epochs = data.mixture.count_epochs(recipe.steps, recipe.batch.global_size)
        text += f", epochs in {format_plural(recipe.steps, 'step')}: {format_epochs(epochs)}"
    if data.padding_fraction is not None:
        text += f", {format_percent(data.padding_fraction)} of their positions padding"
    if data.num_cut_documents:
        text += f", {format_plural(data.num_cut_documents, 'document')} cut"
    if data.num_dropped_documents:
        text += f", {format_plural(data.num_dropped_documents, 'document')} left out (longer than a sample)"
    if skipped := sum(count_skipped(Path(source.prepared)) for source in recipe.data.sources if source.prepared):
        text += f", {format_plural(skipped, 'bad row')} skipped"
    if recipe.evaluation.every is None:
        return text
    counts = [part.count for part in data.choose_validation_parts(recipe.evaluation.max_samples)]
    text += f"; validation on {format_plural(sum(counts), 'sample')}"
    if len(counts) > 1:
        text += f" ({' + '.join(map(str, counts))} by source)"
    shares_documents = recipe.data.packing is None and recipe.data.prepare == "first"
    if recipe.evaluation.source is None and any(counts) and data.info.kind == "tokens" and shares_documents:
        text += ", cut from documents that are trained on, too"
    return text


def check_same_image_processor(run: Run, recipe: ResolvedRecipe, folder: Path) -> None:
    """Raise DataError where the image preprocessing of the model's directory is not what the run began with. A run of
    an earlier version knows none: it was trained on pixel values in -1..1."""
    directory = huggingface_directory(recipe.model.build, folder)
    if directory is None:
        return
    for name in companions.IMAGE_PROCESSOR_FILES:
        now = companions.read_contained(directory / name, directory)
        if now != companions.read_contained(run.companions / name, run.path):
            raise DataError(
                f"{run.path}: was trained with other image preprocessing than that of {directory / name}, or by an "
                "earlier version with none; restore that file, remove it, or use --force to continue with it"
            )


def check_parallelism(recipe: Recipe, folder: Path, call: resolve.SubprocessCall) -> None:
    """Raise RecipeError when the recipe's model cannot be divided by its parallelism."""
    parallelism = recipe.parallelism
    if isinstance(parallelism, Parallelism) and parallelism.replicate != parallelism.world:
        trial_spec = {**resolve.make_trial_recipe(recipe), "parallelism": parallelism.model_dump()}
        call(PARALLELISM_TRIAL, {"recipe": trial_spec, "folder": str(folder)})


def write_run_files(prepared: PreparedRun, loaded: LoadedRecipe) -> None:
    """Write the run directory's files, so that workers can start."""
    run = prepared.run
    run.result.unlink(missing_ok=True)  # result of an earlier start
    write_atomic(run.recipe, dump_recipe(loaded.recipe))
    write_atomic(run.resolved, dump_recipe(prepared.recipe))
    described = copy_tokenizer(prepared)
    keep_chat_template(prepared)
    chat = prepared.recipe.data.chat
    if described is not None and chat is not None and chat.records in ("chat", "pairs", "labels"):
        described = {**described, **find_end_of_turn(run, described, chat.date)}
    write_json(run.plan, {**prepared.plan, **({} if described is None else {TOKENIZER_KEY: described})})
    prices = load_prices()
    write_json(run.cluster, {**prepared.cluster, **({} if prices is None else {"prices": prices.model_dump()})})
    kept = run.read_json_or_empty(run.environment).get("origins", {})  # weights are only read when a run begins
    origins = {**kept, **find_origins(prepared.recipe, prepared.recipe_dir, not run.has_checkpoint())}
    origins |= {SOURCE_ORIGINS_KEY: dict(prepared.source_commits)} if prepared.source_commits else {}
    environment = {**collect_environment(sys.argv, prepared.recipe_dir), "folder": str(prepared.recipe_dir.absolute())}
    write_json(run.environment, {**environment, **({"origins": origins} if origins else {})})
    record_trust(prepared.recipe, prepared.recipe_dir)


def load_prices(environment: Mapping[str, str] = os.environ) -> Prices | None:
    """Return the prices of PHALANX_CLUSTER; None where it is not set. Raises RecipeError for a cluster that cannot be
    loaded."""
    if not (text := environment.get(CLUSTER_VARIABLE)):
        return None
    try:
        return load_cluster(text).prices
    except RecipeError as error:
        raise RecipeError(f"{CLUSTER_VARIABLE}: {error}") from None


def copy_tokenizer(prepared: PreparedRun) -> dict[str, Any] | None:
    """Copy the tokenizer into the run, so that the run stays whole without the data, and what belongs to it of the
    directory that the recipe names. Return its description: of its dataset, and the tokens at which generation stops.
    """
    run = prepared.run
    recipe = prepared.recipe
    folder = prepared.recipe_dir
    dataset = open_dataset_files(str(list_sources(recipe.data, recipe.evaluation)[0].prepared)).directory
    if not is_dataset(dataset):  # as in a session
        return None
    described = read_manifest(dataset).tokenizer
    model = huggingface_directory(recipe.model.build, folder)
    if described is None and model is not None:  # a model of images
        companions.keep_companions(run, model, prepared.notes.append)
    if described is None or "file" not in described:
        if described is not None and model is not None:  # bytes have no files
            companions.keep_companions(run, model, prepared.notes.append, [companions.GENERATION_CONFIG_FILE])
        return described
    content = read_bytes(dataset / TOKENIZER_FILE, MAX_TOKENIZER_BYTES)
    write_atomic(run.tokenizer, content)
    is_of_model = model is not None and companions.read_contained(model / TOKENIZER_FILE, model) == content
    described = {**described, "of_model": is_of_model}
    named = [] if recipe.data.tokenizer == "bytes" else [localize_tokenizer(str(recipe.data.tokenizer), folder)]
    for path in (*named, *filter(None, [model])):
        directory = path if path.is_dir() else path.parent
        if companions.read_contained(directory / TOKENIZER_FILE, directory) == content and not is_dataset(directory):
            companions.keep_companions(run, directory, prepared.notes.append)
            return {**described, "stops": find_stop_tokens(directory)}
    if model is not None:
        companions.keep_companions(run, model, prepared.notes.append, [companions.GENERATION_CONFIG_FILE])
    return described


def keep_chat_template(prepared: PreparedRun) -> None:
    """Copy the file that `data.chat.template` names into the run, in place of the template of the tokenizer's
    directory. A run that resumes elsewhere, without that file, has it."""
    run, chat = prepared.run, prepared.recipe.data.chat
    if chat is None or chat.template is None:
        return
    path = prepared.recipe_dir / chat.template
    if path.is_file() or not run.has_checkpoint():
        run.companions.mkdir(exist_ok=True)
        write_atomic(run.companions / companions.CHAT_TEMPLATE_FILE, read_bytes(path, MAX_TEMPLATE_BYTES))


def find_end_of_turn(run: Run, described: Mapping[str, Any], date: datetime.date | None) -> dict[str, int]:
    """The control token that ends an answer by the run's chat template, if it has one: generation must stop there.
    `date`: what the template writes as the day's."""
    # BadRowError: the template does not take a question and an answer alone.
    with contextlib.suppress(BadRowError, PhalanxError):
        if (template := find_chat_template(run.companions)) is not None:
            tokenizer = load_run_tokenizer(run.tokenizer, described, run.companions)
            encoder = ChatEncoder(ChatPlan(ChatConfig(date=date), template), tokenizer)
            return {"end_of_turn": encoder.find_end_of_turn()}
    return {}


def check_upload(recipe: Recipe) -> None:
    """Raise RecipeError where `checkpoint.upload.to` takes no objects from this node."""
    if (upload := recipe.checkpoint.upload) is not None:
        with name_recipe_key("checkpoint.upload.to"):
            check_writable(parse_url(upload.to))


def check_free_space(run: Run, recipe: Recipe, plan: Mapping[str, Any]) -> None:
    """Raise UsageError where a disk has less free space than two checkpoints take: a new one is written before an old
    one is removed. A run that has checkpoints needs space for one more. The free space of stores is not known."""
    num_new, upload = 1 if run.has_checkpoint() else 2, recipe.checkpoint.upload
    nbytes = checkpoint_bytes_of(recipe, plan.get("trainable_parameters") or 0, plan.get("frozen_parameters") or 0)
    for location in (run.location, *([] if upload is None else [upload.to])):
        path = location.removeprefix("file://")
        if not is_url(path) and (free_bytes := shutil.disk_usage(nearest_existing(Path(path))).free) < num_new * nbytes:
            raise UsageError(
                f"{location}: too little free space for checkpoints of {format_bytes(nbytes)}: {num_new} need "
                f"{format_bytes(num_new * nbytes)}, and {format_bytes(free_bytes)} are free; choose another place"
            )


def check_node(run: Run) -> None:
    """Raise UnfitNodeError where the run that the leading node has prepared cannot be kept from this node."""
    if run.resolved.is_file():  # a shared disk may show it later
        try:
            check_free_space(run, load_resolved_recipe(run.resolved), run.read_json_or_empty(run.plan))
        except UsageError as error:
            raise UnfitNodeError(str(error)) from None
