"""What a store answers, as one of Phalanx's errors or as a reason to try again."""

import errno
import re

from phalanx.errors import DataError, UsageError

_NO_BUCKET = re.compile(r"NoSuchBucket|bucket does not exist|ContainerNotFound", re.IGNORECASE)
_WRONG_CREDENTIALS = re.compile(
    r"InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|Forbidden|Unauthorized|status:? 40[13]", re.IGNORECASE
)
_EXPIRED_TOKEN = re.compile(r"ExpiredToken|TokenExpired|token (has|is) expired", re.IGNORECASE)
_WRONG_CLOCK = re.compile(r"RequestTimeTooSkewed", re.IGNORECASE)
_HOST_NOT_FOUND = re.compile(r"dns error|failed to lookup|Name or service not known", re.IGNORECASE)
_ERROR_CODE = re.compile(r"<Code>(\w+)</Code>")
_HTTP_STATUS = re.compile(r"\b(?:status|status code:|with) (\d{3} [A-Z][A-Za-z ]+)")
_NO_CREDENTIALS = re.compile(r"169\.254\.169\.254|MissingAccount|Account must be specified", re.IGNORECASE)
"""Where nothing else has credentials, the address is asked at which a machine of a cloud gets those of its role."""
_CREDENTIAL_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS to the file of a service account's key",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
"""The variables that give credentials, by scheme."""
_NOT_SUPPORTED = re.compile(r"status(?: code)?:? (405|501) ")
_SECRET_TEXTS = re.compile(
    r"<AWSAccessKeyId>.*?</AWSAccessKeyId>|(Signature|Credential|Token|sig)=[^&\s,\"]+", re.IGNORECASE
)


class NotFound(UsageError):
    """No object has this key."""


class ObjectChanged(DataError):
    """An object is not what it was when this run began to read it."""


class ObjectExists(Exception):
    """A conditional write found that another writer was first."""


class StoreUnavailable(OSError):
    """A store did not answer, or answered with an error that passes. A storage error: a restart may succeed."""

    def __init__(self, url: str, reason: str):
        super().__init__(errno.EIO, reason, url)


def describe(error: Exception) -> str:
    """The reason that a store gave, in one short line without any secret."""
    text = " ".join(_SECRET_TEXTS.sub("", str(error)).split())  # with obstore's details, which may hold the cause
    if found := _ERROR_CODE.search(text) or _HTTP_STATUS.search(text):
        return found[1]
    for pattern, reason in (
        (_HOST_NOT_FOUND, "its host is not found"),
        (re.compile("[Cc]onnection refused|tcp connect"), "nothing answers there"),
        (re.compile("timed? ?out", re.IGNORECASE), "no answer in time"),
    ):
        if pattern.search(text):
            return reason
    return text.partition(" Debug source:")[0][:160]


def is_expired(error: Exception) -> bool:
    """Whether credentials were good once: a client that reads them again may have newer ones."""
    return _EXPIRED_TOKEN.search(str(error)) is not None


def refuse(url: str, error: Exception) -> UsageError | None:
    """The error of the user for what no retry cures; None for what may pass."""
    text = str(error)
    if _NO_CREDENTIALS.search(text):
        variables = _CREDENTIAL_VARIABLES.get(url.partition(":")[0], _CREDENTIAL_VARIABLES["s3"])
        return UsageError(f"{url}: no credentials were found, and this machine has no role; set {variables}")
    if _WRONG_CLOCK.search(text):
        return UsageError(
            f"{url}: the clock of this machine differs too much from that of the store; set it, for instance by NTP"
        )
    if _NO_BUCKET.search(text):
        return UsageError(f"{url}: the bucket does not exist; check its name and the region or endpoint")
    if type(error).__name__ in ("UnauthenticatedError", "PermissionDeniedError") or _WRONG_CREDENTIALS.search(text):
        return UsageError(
            f"{url}: access is denied ({describe(error)}); check the credentials in the environment or profile, "
            "and what they may do there"
        )
    names = ("UnknownConfigurationKeyError", "InvalidPathError", "NotSupportedError")
    if type(error).__name__ in names or _NOT_SUPPORTED.search(text):
        return UsageError(f"{url}: {describe(error)}")
    return None
