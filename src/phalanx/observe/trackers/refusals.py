"""Distinguish an answer of a tracker's server from an outage: it stays the same until a person changes something."""

import re

from phalanx.errors import PhalanxError

PASSING_STATUSES = frozenset({408, 425, 429, 499})
"""HTTP statuses of requests that may succeed later: time limits and rate limits."""
SCHEMA_PATTERN = r"database schema|locate revision|no such (table|column)"
CURES = (
    (r"previously created and deleted|'(active|deleted)' state|is deleted", "it was deleted there: restore it"),
    (SCHEMA_PATTERN, "its store is of another version: migrate the store, or install that version"),
    (r"quota|limit exceeded|storage limit|payment", "raise the limit, or remove old runs"),
    (r"api[ _]key|\b401\b|unauthori[sz]ed|authenticat|log ?in|invalid token", "correct the key or password"),
    (r"\b403\b|permission|forbidden|denied|read-?only", "get the permission to write there, or name another place"),
    (r"\b404\b|not found|does not exist|could not find", "create it there, or correct its name"),
)
"""What helps against an answer, by its text."""


def describe_refusal(error: BaseException) -> str | None:
    """Say what a server refuses and what to do; None for an error that may pass, such as an outage."""
    if isinstance(error, PhalanxError):
        return str(error)
    text, status = str(error), _find_status(error)
    is_answer = isinstance(error, PermissionError) or (status is not None and status not in PASSING_STATUSES)
    matches = [cure for pattern, cure in CURES if re.search(pattern, text, re.IGNORECASE)]
    is_schema = re.search(SCHEMA_PATTERN, text, re.IGNORECASE) is not None
    is_wandb = type(error).__module__.startswith("wandb.") and bool(matches)
    if not (is_answer or is_schema or is_wandb):
        return None
    return f"refused: {first_line(error)}; {matches[0] if matches else 'correct what it names'}"


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _find_status(error: BaseException) -> int | None:
    """The HTTP status of an answer that refuses (400 to 499), as MLflow, requests, httpx and W&B name it."""
    read = getattr(error, "get_http_status_code", None)
    found = read() if read is not None else getattr(getattr(error, "response", None), "status_code", None)
    return found if isinstance(found, int) and 400 <= found < 500 else None
