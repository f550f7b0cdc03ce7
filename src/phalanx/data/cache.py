"""Where `phalanx train` keeps data that it prepared automatically, so that it does so once for each source."""

from collections.abc import Callable, Collection
from pathlib import Path

from phalanx.data.manifest import TOKENIZER_FILE, is_dataset
from phalanx.data.prepare import prepare_source
from phalanx.data.prepare_plan import make_prepare_plan
from phalanx.data.prepare_progress import PrepareProgress, ignore_progress
from phalanx.data.tokenizers import check_tokenizer, describe_missing_begin
from phalanx.recipe.data_schema import BpeTokenizerConfig, DataConfig, DataSource, EvaluationConfig
from phalanx.run.cache import cache_root


def prepare_cached(
    source: DataSource,
    data: DataConfig,
    recipe_dir: Path,
    cache_dir: Path | None = None,
    report_progress: Callable[[PrepareProgress], None] = ignore_progress,
    kept: Collection[Path] = (),
) -> Path:
    """The dataset directory of `source` (paths relative to `recipe_dir`): prepared into the cache, or found there.

    It is found again as long as the files that match, their sizes and times, and the tokenizer are the same. Any
    number of processes may ask at once: one prepares, the others wait. A `prepare_one` source is returned as it is.
    What an earlier version prepared of the same is taken where it is among `kept`. RecipeError where another tokenizer
    made it.
    """
    if source.prepared is not None:
        dataset_dir = recipe_dir / source.prepared
        check_tokenizer(data, recipe_dir, dataset_dir)
    else:
        plan, root = make_prepare_plan(source, data, recipe_dir), (cache_dir or cache_root()) / "data"
        dataset_dir = root / plan.earlier_cache_key
        if dataset_dir not in kept or not is_dataset(dataset_dir):
            dataset_dir = root / plan.cache_key
        if not is_dataset(dataset_dir):
            return prepare_source(source, data, recipe_dir, dataset_dir, report_progress=report_progress)
    if is_dataset(dataset_dir) and (missing := describe_missing_begin(data, recipe_dir, dataset_dir)):
        report_progress(PrepareProgress(0, 0, 0, 0.0, f"warning: {missing}"))
    return dataset_dir


def prepare_all_sources(
    data: DataConfig,
    evaluation: EvaluationConfig,
    recipe_dir: Path,
    cache_dir: Path | None = None,
    report_progress: Callable[[PrepareProgress], None] = ignore_progress,
    kept: Collection[Path] = (),
) -> tuple[DataConfig, EvaluationConfig]:
    """The same `data` and `evaluation` with every source `prepare_one`, as `open_data` wants them; paths are absolute.

    They share one tokenizer: a BPE is trained on the first source and used for all. `kept` as for `prepare_cached`.
    """
    first, *others = data.source if isinstance(data.source, list) else [data.source]

    def prepare_one(source: DataSource, data: DataConfig) -> DataSource:
        dataset_path = prepare_cached(source, data, recipe_dir, cache_dir, report_progress, kept).absolute()
        return DataSource(prepared=str(dataset_path), weight=source.weight)

    sources = [prepare_one(first, data)]
    tokenizer_path = Path(sources[0].prepared or "") / TOKENIZER_FILE
    if isinstance(data.tokenizer, BpeTokenizerConfig) and tokenizer_path.is_file():
        data = data.model_copy(update={"tokenizer": str(tokenizer_path)})
    sources += [prepare_one(source, data) for source in others]
    validation_source = None if evaluation.source is None else prepare_one(evaluation.source, data)
    return data.model_copy(update={"source": sources}), evaluation.model_copy(update={"source": validation_source})
