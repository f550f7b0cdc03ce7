"""Translate errors of the Kubernetes API server and connection errors to UsageError."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from phalanx.errors import UsageError

MISSING_RESOURCE_TEXT = "the server could not find the requested resource"
"""The API server's answer for an unknown kind of object. Trainer and JobSet must be installed separately."""


class ObjectNotFoundError(UsageError):
    """The server knows no such object, or no such kind."""


@contextmanager
def translate_api_errors(what: str) -> Iterator[None]:
    """Raise UsageError, with `what` in front, for every way in which a request can fail."""
    import urllib3
    from kubernetes.client import ApiException

    try:
        yield
    except ApiException as error:
        kind = ObjectNotFoundError if error.status == 404 else UsageError
        raise kind(
            f"{what}: {describe_api_error(error.status, error.body) if error.status else error.reason}"
        ) from error
    except urllib3.exceptions.HTTPError as error:
        raise UsageError(f"{what}: the cluster does not answer: {_root_cause(error)}") from error


def describe_api_error(status: int | None, body: str | bytes | None) -> str:
    """Describe an error answer. `body` is a Status object, or the text of a proxy in between."""
    answer = _parse_body(body)
    message = answer.get("message") or f"it answered with HTTP status {status}"
    details = answer.get("details") or {}
    kind = ".".join(filter(None, (str(details.get("kind") or ""), str(details.get("group") or ""))))
    if status == 401:
        return "the cluster does not know you; log in again, as `kubectl get pods` would ask you to"
    if status == 403:
        return f"you may not do this: {message}"
    if status == 404:
        missing = MISSING_RESOURCE_TEXT in message or not answer
        return f"{message}; is this kind of object installed there?" if missing else message
    if status == 409:
        return f"there is one of that name already ({message}); stop it first, or take another name"
    if status in (400, 422):
        causes = [f"{one.get('field')}: {one.get('message')}" for one in details.get("causes") or ()]
        return f"the cluster refuses it as wrong: {'; '.join(causes) or message}" + (f" ({kind})" if kind else "")
    return f"the cluster could not do it (HTTP status {status}): {message}"


def _parse_body(body: str | bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(body or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _root_cause(error: Exception) -> str:
    """Return the root cause behind the retries."""
    return str(getattr(error, "reason", None) or error)
