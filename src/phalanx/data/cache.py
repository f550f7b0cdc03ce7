"""Where `phalanx train` keeps what it prepared by itself, so that it does so once for each source."""

from collections.abc import Callable
from pathlib import Path

from phalanx.data.manifest import TOKENIZER, is_dataset
from phalanx.data.pieces import make_plan
from phalanx.data.prepare import Progress, prepare_source, silent
from phalanx.data.tokenizers import check_tokenizer
from phalanx.recipe.schema import BpeTokenizerConfig, DataConfig, DataSource, EvaluationConfig
from phalanx.run.cache import cache_root


def cached(
    source: DataSource,
    data: DataConfig,
    folder: Path,
    root: Path | None = None,
    progress: Callable[[Progress], None] = silent,
) -> Path:
    """The dataset directory of `source` (paths relative to `folder`): prepared into the cache, or found there.

    It is found again as long as the files that match, their sizes and times, and the tokenizer are the same. Any
    number of processes may ask at once: one prepares, the others wait. A `prepared` source is returned as it is.
    RecipeError where another tokenizer made it.
    """
    if source.prepared is not None:
        check_tokenizer(data, folder, folder / source.prepared)
        return folder / source.prepared
    out = (root or cache_root()) / "data" / make_plan(source, data, folder).key
    if is_dataset(out):
        return out
    return prepare_source(source, data, folder, out, progress=progress)


def prepare_all(
    data: DataConfig,
    evaluate: EvaluationConfig,
    folder: Path,
    root: Path | None = None,
    progress: Callable[[Progress], None] = silent,
) -> tuple[DataConfig, EvaluationConfig]:
    """The same `data` and `evaluate` with every source `prepared`, as `open_data` wants them; paths are absolute.

    They share one tokenizer: a BPE is trained on the first source and used for all.
    """
    first, *others = data.source if isinstance(data.source, list) else [data.source]

    def prepared(source: DataSource, data: DataConfig) -> DataSource:
        place = cached(source, data, folder, root, progress).absolute()
        return DataSource(prepared=str(place), weight=source.weight)

    sources = [prepared(first, data)]
    trained = Path(sources[0].prepared or "") / TOKENIZER
    if isinstance(data.tokenizer, BpeTokenizerConfig) and trained.is_file():
        data = data.model_copy(update={"tokenizer": str(trained)})
    sources += [prepared(source, data) for source in others]
    scored = None if evaluate.source is None else prepared(evaluate.source, data)
    return data.model_copy(update={"source": sources}), evaluate.model_copy(update={"source": scored})
