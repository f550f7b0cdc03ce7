"""Prepare, verify and inspect datasets, in a directory or at a URL."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phalanx.app.submit import parse_job_fields
from phalanx.data import (
    DatasetPart,
    PrepareProgress,
    open_data,
    prepare_all_sources,
    prepare_cached,
    prepare_part,
    prepare_source,
)
from phalanx.data import inspect_dataset as inspect_dataset
from phalanx.data import verify_dataset as verify_dataset
from phalanx.data.dataset_files import check_upload, upload_dataset
from phalanx.data.prepare_plan import make_prepare_plan
from phalanx.errors import UsageError
from phalanx.jobs.spec import Job, make_array
from phalanx.recipe.data_schema import DataConfig, DataSource
from phalanx.recipe.load import load_recipe
from phalanx.storage.url import is_url, parse_url


def inspect(location: str, max_tokens: int, report_progress: Callable[[PrepareProgress], None]) -> dict[str, Any]:
    """Describe a dataset, or the first source of a recipe, which is prepared in the cache, with what becomes of its
    documents in samples of `data.seq_len`."""
    if not location.endswith((".yaml", ".yml")):
        return inspect_dataset(location, max_tokens)
    loaded = load_recipe(Path(location))
    with loaded.locate_errors():
        data, evaluation = prepare_all_sources(
            loaded.recipe.data, loaded.recipe.evaluation, loaded.recipe_dir, report_progress=report_progress
        )
        opened = open_data(data, evaluation, loaded.recipe.seed)
    samples = {
        "num_samples": opened.num_train_samples,
        "padding_fraction": None if opened.padding_fraction is None else round(opened.padding_fraction, 4),
        "num_cut_documents": opened.num_cut_documents,
        "num_dropped_documents": opened.num_dropped_documents,
    }
    content = inspect_dataset(str(data.sources[0].prepared), max_tokens)
    return {**content, **(samples if opened.padding_fraction is not None else {})}


def prepare_to(
    out: str,
    source: DataSource,
    data: DataConfig,
    num_workers: int | None,
    report_progress: Callable[[PrepareProgress], None],
    part: DatasetPart | None = None,
) -> bool:
    """Prepare a source, its paths relative to the working directory, as the dataset `out`: a directory, or a URL to
    which it is uploaded from the cache. UsageError where something is there, or nothing can be written. Returns whether
    the dataset is complete, which after one `part` of it may not be so."""
    how: Any = {"num_workers": num_workers, "report_progress": report_progress}
    if part is not None:
        _check_parts_directory(out)
        return prepare_part(source, data, Path.cwd(), Path(out), part, **how)
    if is_url(out):
        url = parse_url(out)
        check_upload(url)
        upload_dataset(prepare_cached(source, data, Path.cwd(), **how), url)
        return True
    _check_is_new(out)
    prepare_source(source, data, Path.cwd(), Path(out), **how)
    return True


def make_prepare_jobs(
    source: DataSource,
    data: DataConfig,
    command_words: Sequence[str],
    out: str,
    num_tasks: int,
    workers: int | None,
    time_limit: str | None,
    backend_options: Sequence[str],
) -> tuple[Job, ...]:
    """Make the array of which each job prepares a part of the dataset `out`, a directory that all nodes see.
    `command_words`: source and tokenizer, as for `phalanx data prepare`. The source is checked before anything is sent.
    """
    _check_parts_directory(out)
    _check_is_new(out)
    make_prepare_plan(source, data, Path.cwd())
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", f"prepare-{Path(out).name}")[:50]
    command = (sys.executable, "-P", "-m", "phalanx", "data", "prepare")
    fields = parse_job_fields("1", None, workers, None, time_limit, backend_options)
    given = {key: value for key, value in fields.items() if value is not None}
    jobs = [
        Job(name, (*command, "--part", f"{number}/{num_tasks}", *command_words), Path.cwd(), **given)
        for number in range(1, num_tasks + 1)
    ]
    return make_array(name, jobs)


def parse_part(text: str) -> DatasetPart:
    """Parse I/N, with I from 1 to N."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--part {text}: expected I/N with I from 1 to N, for instance 1/8")
    return DatasetPart(int(match[1]) - 1, int(match[2]))


def _check_is_new(out: str) -> None:
    path = Path(out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{out}: already exists; choose another --out, or remove it first")


def _check_parts_directory(out: str) -> None:
    if is_url(out):
        raise UsageError(
            f"--out {out}: parts are prepared in a directory that all tasks share; give one, and copy the dataset to "
            "the URL when it is complete"
        )
