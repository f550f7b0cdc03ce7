"""Prepare, verify and inspect dataset directories."""

from collections.abc import Callable
from pathlib import Path

from phalanx.data import inspect_dataset as inspect_dataset
from phalanx.data import prepare_source
from phalanx.data import verify_dataset as verify_dataset
from phalanx.data.inspection import DatasetContent as DatasetContent
from phalanx.data.prepare_progress import PrepareProgress, ignore_progress
from phalanx.errors import UsageError
from phalanx.recipe.data_schema import DataConfig, DataSource


def prepare_dataset(
    source: DataSource,
    data: DataConfig,
    out: Path,
    num_workers: int | None = None,
    report_progress: Callable[[PrepareProgress], None] = ignore_progress,
) -> DatasetContent:
    """Prepare a source as a dataset directory, and describe it. Paths are relative to the working directory.

    A KeyboardInterrupt leaves finished shards in `<out>.partial`, from which the next call resumes.

    Args:
        num_workers: processes; default: one per core.

    Raises:
        UsageError: `out` exists.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: already exists; choose another --out, or remove it first")
    prepare_source(source, data, Path.cwd(), out, num_workers=num_workers, report_progress=report_progress)
    return inspect_dataset(out)
