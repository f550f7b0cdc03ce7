"""Where `phalanx train` keeps data that it prepared automatically, and what a model must know of data before."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.data import stream
from phalanx.data.dataset_files import open_dataset_files
from phalanx.data.manifest import TOKENIZER_FILE, is_dataset, read_manifest
from phalanx.data.prepare import WHOLE_DATASET, DatasetPart, prepare_source, prepare_stream
from phalanx.data.prepare_plan import PreparePlan, PrepareProgress, ignore_progress, make_prepare_plan, read_done_file
from phalanx.data.reader import DataInfo
from phalanx.data.source_files import join_location
from phalanx.data.tokenizers import check_tokenizer, load_tokenizer
from phalanx.deadline import POLL_INTERVAL_S
from phalanx.errors import ExitCode, PhalanxError, RecipeError, describe_os_error
from phalanx.recipe.data_schema import BpeTokenizerConfig, DataConfig, DataSource, EvaluationConfig
from phalanx.recipe.locations import localize_tokenizer, name_recipe_key
from phalanx.run.cache import cache_root
from phalanx.run.call_process import CallProcess
from phalanx.storage.url import is_url


def prepare_cached(
    source: DataSource,
    data: DataConfig,
    recipe_dir: Path,
    cache_dir: Path | None = None,
    report_progress: Callable[[PrepareProgress], None] = ignore_progress,
    order: tuple[float, int] = (0.0, 0),
    num_workers: int | None = None,
    part: DatasetPart = WHOLE_DATASET,
) -> Path:
    """The dataset directory of `source` (paths relative to `recipe_dir`): prepared into the cache, or found there.

    It is found again as long as the files that match, their sizes and times, and the tokenizer are the same. Any
    number of processes may ask at once: one prepares, the others wait. A `prepared` source is returned as it is; of
    one at a URL, the local directory that has its manifest. RecipeError where another tokenizer made it. A stream is
    returned once its preparation has begun; `order` has the share for validation and the seed, by which the pieces are
    prepared in the order in which they are read, the `part` of this node before others.
    """
    if source.prepared is not None:
        with name_recipe_key("data.source"):
            dataset = open_dataset_files(join_location(recipe_dir, source.prepared)).directory
        check_tokenizer(data, recipe_dir, dataset)
        return dataset
    plan = make_prepare_plan(source, data, recipe_dir)
    dataset_dir = (cache_dir or cache_root()) / "data" / plan.cache_key
    if data.prepare == "stream":
        stream_dir = dataset_dir.with_name(f"{dataset_dir.name}.stream")
        return _start_stream(source, data, recipe_dir, stream_dir, plan, order, part)
    if is_dataset(dataset_dir):
        return dataset_dir
    how: Any = {"num_workers": num_workers, "report_progress": report_progress}
    return prepare_source(source, data, recipe_dir, dataset_dir, **how)


_preparing: list[CallProcess] = []
"""Processes that prepare streams; they end with this one."""


def _start_stream(
    source: DataSource,
    data: DataConfig,
    recipe_dir: Path,
    directory: Path,
    plan: PreparePlan,
    order: tuple[float, int],
    part: DatasetPart,
) -> Path:
    """Have a stream prepared in the background, unless it is or another process does so; return its directory once it
    is described. Raises what the preparation says is wrong by then."""
    if plan.kind not in ("text", "jsonl", "parquet"):
        raise RecipeError(f"data.prepare: found stream for {plan.kind}, expected `first`: only text is streamed")
    pieces = stream.preparation_order(stream.StreamDescription.from_plan(plan), *order)
    directory.mkdir(parents=True, exist_ok=True)
    is_finished = all(read_done_file(directory, number) for number in range(len(plan.pieces)))
    if is_finished and is_dataset(directory):
        return directory
    if not stream.is_being_prepared(directory):
        stream.forget_stream_error(directory)
        process = CallProcess()
        payload: dict[str, Any] = {"source": source.model_dump(), "data": data.model_dump()}
        payload |= {"recipe_dir": str(recipe_dir.absolute()), "directory": str(directory)}
        payload["first_pieces"] = [*pieces[part.index :: part.num_parts], *pieces]
        process.send_call(f"{__name__}:prepare_in_background", payload)
        _preparing.append(process)
        while not (stream.is_stream(directory) and is_dataset(directory)):
            stream.check_stream_error(directory)
            if process.process.poll() is not None:
                raise PhalanxError(f"{directory}: the process that prepares it was killed", ExitCode.UNFINISHED)
            time.sleep(POLL_INTERVAL_S)
    return directory


def prepare_in_background(payload: dict[str, Any]) -> None:
    """Prepare a stream, then end this process; readers learn of an error by a file."""
    os.nice(10)  # training goes first
    directory = Path(payload["directory"])
    try:
        source, data = DataSource.model_validate(payload["source"]), DataConfig.model_validate(payload["data"])
        prepare_stream(source, data, Path(payload["recipe_dir"]), directory, payload["first_pieces"])
    except PhalanxError as error:
        stream.report_stream_error(directory, error)
    except OSError as error:
        stream.report_stream_error(directory, PhalanxError(describe_os_error(error), ExitCode.UNFINISHED))
    os._exit(0)  # it is asked for nothing else, and a run may take days


def prepare_all_sources(
    data: DataConfig,
    evaluation: EvaluationConfig,
    recipe_dir: Path,
    cache_dir: Path | None = None,
    report_progress: Callable[[PrepareProgress], None] = ignore_progress,
    seed: int = 0,
    part: DatasetPart = WHOLE_DATASET,
) -> tuple[DataConfig, EvaluationConfig]:
    """The same `data` and `evaluation` with every source `prepared`, as `open_data` wants them; paths are absolute.

    They share one tokenizer: a BPE is trained on the first source and used for all. Of streams the `part` of this node
    is prepared first.
    """
    leading, *others = data.sources
    order = (holdout_fraction(evaluation), seed)

    def prepare_one(source: DataSource, data: DataConfig) -> DataSource:
        dataset_path = prepare_cached(source, data, recipe_dir, cache_dir, report_progress, order, part=part).absolute()
        location = source.prepared if is_url(source.prepared) else str(dataset_path)
        return DataSource(prepared=location, weight=source.weight)

    sources = [prepare_one(leading, data)]
    tokenizer_path = open_dataset_files(sources[0].prepared or "").directory / TOKENIZER_FILE
    if isinstance(data.tokenizer, BpeTokenizerConfig) and tokenizer_path.is_file():
        data = data.model_copy(update={"tokenizer": str(tokenizer_path)})
    sources += [prepare_one(source, data) for source in others]
    first = data.model_copy(update={"prepare": "first"})
    validation_source = None if evaluation.source is None else prepare_one(evaluation.source, first)
    return data.model_copy(update={"source": sources}), evaluation.model_copy(update={"source": validation_source})


def holdout_fraction(evaluation: EvaluationConfig) -> float:
    """The share of each source that is kept for validation."""
    return 0.0 if evaluation.source else evaluation.holdout_fraction


def expect_data_info(data: DataConfig, recipe_dir: Path) -> DataInfo:
    """Facts of a recipe's data, paths relative to `recipe_dir`. Of text only the tokenizer is asked; images are looked
    at, since only they tell their size and classes. RecipeError, DataError: what is asked is not there, or damaged."""
    source = data.sources[0]
    if source.prepared is not None:
        with name_recipe_key("data.source"):
            dataset = open_dataset_files(join_location(recipe_dir, source.prepared)).directory
        manifest = read_manifest(dataset)
        check_tokenizer(data, recipe_dir, dataset)
        seq_len = data.seq_len if manifest.kind == "tokens" else None
        return DataInfo(manifest.kind, manifest.vocab, manifest.classes, seq_len, manifest.shape, manifest.labels)
    if not source.has_images:
        return DataInfo("tokens", _expected_vocab_size(data, recipe_dir), None, data.seq_len, None)
    plan = make_prepare_plan(source, data, recipe_dir)
    return DataInfo("images", None, plan.num_classes, None, plan.image_shape, plan.class_names)


def _expected_vocab_size(data: DataConfig, recipe_dir: Path) -> int:
    if isinstance(data.tokenizer, BpeTokenizerConfig):
        return data.tokenizer.bpe
    if data.tokenizer == "bytes":
        return load_tokenizer("bytes").vocab_size
    return load_tokenizer(localize_tokenizer(data.tokenizer, recipe_dir)).vocab_size
