"""Load a trained model from a run, for text generation, evaluation, or anything else that only needs the weights."""

import inspect
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from phalanx.cluster.discovery import count_free_cores
from phalanx.data import DataInfo
from phalanx.data.manifest import is_dataset
from phalanx.errors import DataError, RecipeError, UsageError
from phalanx.models.transformer import Transformer
from phalanx.recipe import ResolvedRecipe, load_recipe
from phalanx.recipe.data_schema import list_sources
from phalanx.run import Run
from phalanx.std_streams import word_of
from phalanx.storage.url import is_url
from phalanx.train.checkpoint.checkpoint_store import CheckpointStore, find_best_step
from phalanx.train.checkpoint.durable import best_checkpoint_file
from phalanx.train.checkpoint.format import format_checkpoint_name, list_checkpoints, read_manifest
from phalanx.train.checkpoint.load import choose_weights, find_newest_good, load_tensors, recipe_in
from phalanx.train.checkpoint.load_plan import check_nothing_left, load_model_tensors
from phalanx.train.checkpoint.store_fetch import StoreSource
from phalanx.train.code_trust import HUGGING_FACE_PREFIX, check_trusted, list_user_code
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.meta_device import allocate_meta_parameters
from phalanx.train.distributed.module_state import EXTRA_STATE_PREFIX, find_extra_state_modules, get_model_tensors
from phalanx.train.hf.image_processor import ImageNormalization, from_meta
from phalanx.train.hf.inputs import get_logits, is_transformers_model
from phalanx.train.model_builder import build_model

MAX_DATA_SIZE = 1 << 31
"""Upper limit for vocabulary size, number of classes, sequence length and image side."""


@dataclass(frozen=True)
class TrainedModel:
    """The model in evaluation mode, and the recipe and data description that it was trained with."""

    model: nn.Module
    recipe: ResolvedRecipe
    facts: DataInfo
    folder: Path | None
    checkpoint: Path
    image_normalization: ImageNormalization | None = None
    """With which it was trained; None for pixel values in -1..1."""
    notes: tuple[str, ...] = ()
    """Messages about newer checkpoints that are damaged."""


def load_trained_model(
    run: Run, step: int | None, best: bool, device: torch.device, trusted: bool = False, weights: str | None = None
) -> TrainedModel:
    """Load the model from the run's checkpoint of `step`, from its best one, or from its newest good one. `weights` as
    in `choose_weights`.

    Raises UsageError if there is no such checkpoint, or if the run needs code that this user has not trained with and
    `trusted` is not set; DataError if the checkpoint is damaged.
    """
    if step is not None and best:
        raise UsageError(f"--step {step} and --best: give one of them")
    checkpoint, notes = choose_checkpoint(run, step, best)
    manifest = choose_weights(read_manifest(checkpoint), weights, checkpoint)
    if "model" not in manifest.meta and "data_info" not in run.read_json_or_empty(run.plan):
        raise UsageError(
            f"{run.path}: was trained by a loop of its own, and only that script can build the model; "
            f"`phalanx checkpoint export {word_of(run.path)} OUT` writes its weights"
        )
    recipe = recipe_in(checkpoint, manifest)
    set_threads(recipe.num_threads)
    facts = _read_facts(run)
    # Unless the run has user code, do not search for modules in its folder, which an untrusted run may have named.
    modules = _folder(run) if list_user_code(recipe) or recipe.model.build.startswith(HUGGING_FACE_PREFIX) else None
    if modules is not None and not trusted:
        check_trusted(run.path, recipe, modules)
    model = build_model(recipe.model, facts, modules, recipe.seed, device, recipe.adapter, load=False)
    allocate_meta_parameters([model], device)
    names = [*get_model_tensors(model), *(EXTRA_STATE_PREFIX + name for name in find_extra_state_modules(model))]
    check_nothing_left(manifest.tensors, names, str(checkpoint))
    with torch.no_grad():
        load_model_tensors(model, load_tensors(checkpoint, names, manifest), str(checkpoint))
    own_code = modules if list_user_code(recipe) else None
    normalization = from_meta(manifest.meta.get("image_normalization"))
    return TrainedModel(model.eval(), recipe, facts, own_code, checkpoint, normalization, tuple(notes))


def set_threads(num_threads: int) -> None:
    """Use as many threads as training, but no more than there are free cores, and no more than OMP_NUM_THREADS."""
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    limits = [num_threads, count_free_cores(), *([int(limit)] if limit.isdecimal() and int(limit) else [])]
    torch.set_num_threads(min(limits))


def given_device(run: Run) -> str:
    """Return the `device` in the run's original recipe: the resolved value is the device of training, which this
    machine may not have. `auto` if that recipe is lost."""
    try:
        return load_recipe(run.recipe).recipe.device
    except RecipeError:
        return "auto"


def check_data(recipe: ResolvedRecipe) -> None:
    """Raise DataError if prepared data of a resolved recipe are not named, or missing, as from a cache that was
    emptied. They are not prepared here: the run may come from another user, and its sources may name any files."""
    for source in list_sources(recipe.data, recipe.evaluation):
        if source.prepared is None or not (is_url(source.prepared) or is_dataset(Path(source.prepared))):
            raise DataError(
                f"{source.prepared or 'data.source'}: the run's prepared data are gone; `phalanx train RECIPE "
                "--dry-run`, with the recipe and the overrides that the run was started with, prepares them again"
            )


def _folder(run: Run) -> Path:
    """Return the folder of the recipe that was trained, which relative modules and directories refer to."""
    try:
        named = (run.read_json(run.environment) or {}).get("folder")
    except DataError as error:
        raise DataError(f"{error}; it names the folder with the model's code") from None
    if not isinstance(named, str) or not Path(named).is_absolute() or "\0" in named:
        why = f"folder is {named!r}, expected an absolute path" if run.environment.is_file() else "is missing"
        raise DataError(f"{run.environment}: {why}; it names the folder with the model's code")
    return Path(named)


def _read_facts(run: Run) -> DataInfo:
    """Return the description of the data in plan.json. Raises DataError if it is lost or malformed."""
    plan = run.read_json_or_empty(run.plan)
    if "data_info" not in plan:
        lost = "damaged" if run.plan.exists() else "missing"
        raise DataError(f"{run.plan}: is {lost}; it says what the model was built for")
    try:
        facts = TypeAdapter(DataInfo).validate_python(plan["data_info"])
        sizes = (facts.vocab_size, facts.num_classes, facts.seq_len, *(facts.image_shape or ()))
        if not all(size is None or 0 < size < MAX_DATA_SIZE for size in sizes):
            raise ValueError(f"sizes {sizes}")
    except ValueError as error:  # pydantic's, too
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise DataError(f"{run.plan}: facts is not what data have ({why})") from None
    return facts


def choose_checkpoint(run: Run, step: int | None, best: bool) -> tuple[Path, list[str]]:
    """Return the selected checkpoint, and messages about newer ones that are damaged."""
    if run.store_url is not None:
        step, best = _fetch_stored(run, run.store_url, step, best), False
    if best:
        chosen = run.read_json(best_checkpoint_file(run))
        if chosen is None:
            raise UsageError(f"{run.location}: no best checkpoint is recorded; the run has not evaluated and saved yet")
        step = chosen.get("step")
        if type(step) is not int:
            raise DataError(f"{best_checkpoint_file(run)}: step is {step!r}, expected a number")
    if step is not None:
        path = run.checkpoints / format_checkpoint_name(step)
        if not path.is_dir():
            known = ", ".join(path.name for path in list_checkpoints(run.checkpoints)) or "none"
            asked = f"the best checkpoint was that of step {step}, which is gone" if best else ""
            raise UsageError(f"{run.location}: {asked or f'no checkpoint of step {step}'}; there are: {known}")
        return path, []
    rejected: list[str] = []
    found = find_newest_good(run.checkpoints, lambda path, file, reason: rejected.append(f"{path / file}: {reason}"))
    if found is None:
        raise DataError("\n".join(rejected)) if rejected else UsageError(f"{run.location}: no checkpoint yet")
    return found, [f"{each}; {found.name} is taken" for each in rejected]


def _fetch_stored(run: Run, url: str, step: int | None, best: bool) -> int | None:
    """Fetch the selected checkpoint of a run at a URL, or its newest good one, into the local directory of the run.
    Return the selected step."""
    checkpoints = CheckpointStore(url)
    whole = list(checkpoints.whole_steps())
    if best:
        step = find_best_step({each: checkpoints.read(each).manifest.meta.get("best_loss") for each in whole})
        if step is None:
            raise UsageError(f"{url}: no checkpoint has a validation loss; the run has not evaluated and saved yet")
    run.checkpoints.mkdir(exist_ok=True)
    source = StoreSource(run, DistEnv(), url)
    for each in whole if step is None else [step]:
        is_here = (run.checkpoints / format_checkpoint_name(each)).is_dir()
        if is_here or not source.fetch(each):  # else bad files
            break
    return step


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are sampled."""

    num_tokens: int = 300
    temperature: float = 0.8
    """0: always the most likely token."""
    top_k: int | None = None
    seed: int = 0


MIN_TEMPERATURE = 1e-6
"""Below this temperature every token but the most likely has probability 0, and scaled logits overflow."""


def generate_tokens(
    model: nn.Module, prompt: Sequence[int], sampling: SamplingOptions, window: int, device: torch.device
) -> Iterator[int]:
    """Yield tokens that continue `prompt` (at least one token). The model sees the last `window`. The same seed gives
    the same text."""
    generator = torch.Generator().manual_seed(sampling.seed)
    context = list(prompt)
    reader = ContextReader(model, window, device)
    for _ in range(sampling.num_tokens):
        logits = reader.compute_next_logits(context).float().cpu()
        token = _sample_token(logits, sampling.temperature, sampling.top_k, generator)
        context.append(token)
        yield token


class ContextReader:
    """Computes the logits of the next token of a text that grows, with the keys and values of earlier tokens if the
    model can keep them. In a text longer than `window` every token moves: it is computed whole for each next token."""

    def __init__(self, model: nn.Module, window: int, device: torch.device):
        self._model, self._window, self._device = model, window, device
        self._cache_argument = _find_cache_argument(model)
        self._cache: Any = model.make_caches() if isinstance(model, Transformer) else None
        self._num_cached = 0

    @torch.no_grad()
    def compute_next_logits(self, context: Sequence[int]) -> torch.Tensor:
        """Return the logits [v] of the token behind `context`, which begins with the context of the call before."""
        if len(context) > self._window:
            self._cache_argument = self._cache = None
        start = max(0, len(context) - self._window) if self._cache_argument is None else self._num_cached
        tokens = torch.tensor([context[start:]], device=self._device)
        if self._cache_argument is None:
            output = self._model(tokens)
        elif isinstance(self._model, Transformer):
            output = self._model(tokens, caches=self._cache)
        else:
            output = self._model(tokens, use_cache=True, **{self._cache_argument: self._cache})
            self._cache = getattr(output, self._cache_argument, None)
            if self._cache is None:  # a model that wants a cache made for it
                self._cache_argument = None
        self._num_cached = len(context)
        return get_logits(output)[0, -1]


def _find_cache_argument(model: nn.Module) -> str | None:
    """Return the argument of `model.forward` with the keys and values of earlier tokens; None if it takes none."""
    if isinstance(model, Transformer):
        return "caches"
    names = inspect.signature(model.forward).parameters if is_transformers_model(model) else {}
    # transformers 5.24 renamed it
    return next((name for name in ("cache", "past_key_values") if name in names and "use_cache" in names), None)


def _sample_token(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature < MIN_TEMPERATURE:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k is not None and top_k < logits.numel():
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
