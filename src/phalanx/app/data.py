"""Prepare, verify and inspect datasets, in a directory or at a URL."""

from collections.abc import Callable
from pathlib import Path

from phalanx.data import PrepareProgress, prepare_cached, prepare_source
from phalanx.data import inspect_dataset as inspect_dataset
from phalanx.data import verify_dataset as verify_dataset
from phalanx.data.dataset_files import check_upload, upload_dataset
from phalanx.errors import UsageError
from phalanx.recipe.data_schema import DataConfig, DataSource
from phalanx.storage.url import is_url, parse_url


def prepare_to(
    out: str,
    source: DataSource,
    data: DataConfig,
    num_workers: int | None,
    report_progress: Callable[[PrepareProgress], None],
) -> None:
    """Prepare a source, its paths relative to the working directory, as the dataset `out`: a directory, or a URL to
    which it is uploaded from the cache. UsageError where something is there, or nothing can be written."""
    if is_url(out):
        url = parse_url(out)
        check_upload(url)
        upload_dataset(
            prepare_cached(source, data, Path.cwd(), report_progress=report_progress, num_workers=num_workers), url
        )
        return
    path = Path(out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{out}: already exists; choose another --out, or remove it first")
    prepare_source(source, data, Path.cwd(), path, num_workers=num_workers, report_progress=report_progress)
