"""`hf://`: models and data sets of the Hugging Face hub, by huggingface_hub and its own cache.

`hf://OWNER/NAME[@REVISION][/PATH]` is a model, `hf://datasets/OWNER/NAME[@REVISION][/PATH]` a data set.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.errors import UsageError
from phalanx.storage.errors import StoreUnavailable
from phalanx.storage.url import StoreUrl, parse_url

logger = logging.getLogger(__name__)


class HubLocation(NamedTuple):
    """A repository of the hub, a revision of it, and a path in it ("" for all)."""

    kind: str  # model or dataset
    repository: str
    revision: str | None
    path: str


def parse_hub_url(url: StoreUrl) -> HubLocation:
    """Parse `hf://` by its parts. Raises UsageError for one that names no repository."""
    parts = [url.bucket, *filter(None, url.key.split("/"))]
    kind = "model"
    if parts[0] in ("datasets", "models"):
        kind = parts.pop(0).removesuffix("s")
    if len(parts) < 2:
        raise UsageError(f"{url}: expected hf://OWNER/NAME or hf://datasets/OWNER/NAME, with @REVISION to pin one")
    name, _, revision = parts[1].partition("@")
    return HubLocation(kind, f"{parts[0]}/{name}", revision or None, "/".join(parts[2:]))


def pin_revision(url: StoreUrl, commit: str) -> StoreUrl:
    """The URL of the same at one commit."""
    where = parse_hub_url(url)
    kind = "datasets/" if where.kind == "dataset" else ""
    pinned = parse_url(f"hf://{kind}{where.repository}@{commit}")
    return pinned / where.path if where.path else pinned


def download_snapshot(url: StoreUrl, patterns: Sequence[str] = ()) -> Path:
    """Download a repository, or a path in it, and return its local path. The log says the commit that a revision
    is at. Raises UsageError for what is not there or gated, StoreUnavailable when the hub does not answer."""
    try:
        from huggingface_hub import errors, snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise UsageError(f"{url}: needs the `huggingface_hub` package: pip install 'phalanx[huggingface]'") from None
    if not sys.stderr.isatty():
        disable_progress_bars()  # each worker would write its own into the log
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what is wrong is in the error, in one line
    where = parse_hub_url(url)
    allowed = [f"{where.path}/{pattern}" if where.path else pattern for pattern in patterns]
    if where.path and not patterns:
        allowed = [where.path, f"{where.path}/*"]
    try:
        options: Any = {"repo_type": where.kind, "revision": where.revision, "allow_patterns": allowed or None}
        root = Path(snapshot_download(where.repository, **options))
    except errors.GatedRepoError:
        raise UsageError(
            f"{url}: access is gated; accept its terms on the hub, and set HF_TOKEN to a token that may read it"
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise UsageError(
            f"{url}: not on the hub ({type(error).__name__}); check the name and revision, and for a private one set "
            "HF_TOKEN to a token that may read it"
        ) from None
    except errors.HFValidationError as error:
        raise UsageError(f"{url}: no name of a repository ({error})") from None
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError) as error:
        cause = error if isinstance(error, errors.HfHubHTTPError) else error.__cause__
        answer = getattr(cause, "response", None)
        if answer is None:
            raise UsageError(
                f"{url}: the hub cannot be reached, and there is no local copy; download it where there is a network, "
                "or set HF_ENDPOINT to a mirror"
            ) from None
        if answer.status_code in (401, 403):
            raise UsageError(
                f"{url}: access is denied (HTTP {answer.status_code}); set HF_TOKEN to a token that may read it"
            ) from None
        raise StoreUnavailable(str(url), f"HTTP {answer.status_code}") from None
    logger.info("%s: commit %s", url, root.name)
    path = root / where.path
    if not path.exists():
        raise UsageError(f"{url}: the repository has no {where.path}")
    return path
