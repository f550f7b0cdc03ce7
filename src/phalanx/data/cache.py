"""Where `phalanx train` keeps data that it prepared automatically, and what a model must know of data before."""

from collections.abc import Callable
from pathlib import Path

from phalanx.data.dataset_files import open_dataset_files
from phalanx.data.manifest import TOKENIZER_FILE, is_dataset, read_manifest
from phalanx.data.prepare import prepare_source
from phalanx.data.prepare_plan import PrepareProgress, ignore_progress, make_prepare_plan
from phalanx.data.reader import DataInfo
from phalanx.data.source_files import join_location
from phalanx.data.tokenizers import check_tokenizer, load_tokenizer
from phalanx.recipe.data_schema import BpeTokenizerConfig, DataConfig, DataSource, EvaluationConfig
from phalanx.run.cache import cache_root
from phalanx.storage.named import localize_tokenizer, name_recipe_key
from phalanx.storage.url import is_url


def prepare_cached(
    source: DataSource,
    data: DataConfig,
    recipe_dir: Path,
    cache_dir: Path | None = None,
    report_progress: Callable[[PrepareProgress], None] = ignore_progress,
    num_workers: int | None = None,
) -> Path:
    """The dataset directory of `source` (paths relative to `recipe_dir`): prepared into the cache, or found there.

    It is found again as long as the files that match, their sizes and times, and the tokenizer are the same. Any
    number of processes may ask at once: one prepares, the others wait. A `prepared` source is returned as it is; of
    one at a URL, the local directory that has its manifest. RecipeError where another tokenizer made it.
    """
    if source.prepared is not None:
        with name_recipe_key("data.source"):
            dataset = open_dataset_files(join_location(recipe_dir, source.prepared)).directory
        check_tokenizer(data, recipe_dir, dataset)
        return dataset
    plan = make_prepare_plan(source, data, recipe_dir)
    dataset_dir = (cache_dir or cache_root()) / "data" / plan.cache_key
    if is_dataset(dataset_dir):
        return dataset_dir
    return prepare_source(
        source, data, recipe_dir, dataset_dir, num_workers=num_workers, report_progress=report_progress
    )


def prepare_all_sources(
    data: DataConfig,
    evaluation: EvaluationConfig,
    recipe_dir: Path,
    cache_dir: Path | None = None,
    report_progress: Callable[[PrepareProgress], None] = ignore_progress,
) -> tuple[DataConfig, EvaluationConfig]:
    """The same `data` and `evaluation` with every source `prepared`, as `open_data` wants them; paths are absolute.

    They share one tokenizer: a BPE is trained on the first source and used for all.
    """
    first, *others = data.source if isinstance(data.source, list) else [data.source]

    def prepare_one(source: DataSource, data: DataConfig) -> DataSource:
        dataset_path = prepare_cached(source, data, recipe_dir, cache_dir, report_progress).absolute()
        location = source.prepared if is_url(source.prepared) else str(dataset_path)
        return DataSource(prepared=location, weight=source.weight)

    sources = [prepare_one(first, data)]
    tokenizer_path = open_dataset_files(sources[0].prepared or "").directory / TOKENIZER_FILE
    if isinstance(data.tokenizer, BpeTokenizerConfig) and tokenizer_path.is_file():
        data = data.model_copy(update={"tokenizer": str(tokenizer_path)})
    sources += [prepare_one(source, data) for source in others]
    validation_source = None if evaluation.source is None else prepare_one(evaluation.source, data)
    return data.model_copy(update={"source": sources}), evaluation.model_copy(update={"source": validation_source})


def expect_data_info(data: DataConfig, recipe_dir: Path) -> DataInfo:
    """Facts of a recipe's data, paths relative to `recipe_dir`. Of text only the tokenizer is asked; images are looked
    at, since only they tell their size and classes. RecipeError, DataError: what is asked is not there, or damaged."""
    source = data.source[0] if isinstance(data.source, list) else data.source
    if source.prepared is not None:
        with name_recipe_key("data.source"):
            dataset = open_dataset_files(join_location(recipe_dir, source.prepared)).directory
        manifest = read_manifest(dataset)
        check_tokenizer(data, recipe_dir, dataset)
        seq_len = data.seq_len if manifest.kind == "tokens" else None
        return DataInfo(manifest.kind, manifest.vocab, manifest.classes, seq_len, manifest.shape, manifest.labels)
    if _is_text_source(source):
        return DataInfo("tokens", _expected_vocab_size(data, recipe_dir), None, data.seq_len, None)
    plan = make_prepare_plan(source, data, recipe_dir)
    return DataInfo("images", None, plan.num_classes, None, plan.image_shape, plan.class_names)


def _is_text_source(source: DataSource) -> bool:
    return source.idx is None and source.images is None


def _expected_vocab_size(data: DataConfig, recipe_dir: Path) -> int:
    if isinstance(data.tokenizer, BpeTokenizerConfig):
        return data.tokenizer.bpe
    if data.tokenizer == "bytes":
        return load_tokenizer("bytes").vocab_size
    return load_tokenizer(localize_tokenizer(data.tokenizer, recipe_dir)).vocab_size
