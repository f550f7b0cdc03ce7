"""URLs of objects: parsing them, and telling them from paths."""

import re
from dataclasses import dataclass, replace
from itertools import takewhile
from urllib.parse import urlsplit

from phalanx.errors import UsageError

STORE_SCHEMES = ("s3", "gs", "az", "https", "http", "hf", "file")
_URL_REGEX = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
WILDCARD_REGEX = re.compile(r"[*?\[]")
_SIGNED_QUERY = re.compile(r"[?&](X-Amz-|X-Goog-|sig=|AWSAccessKeyId=)", re.IGNORECASE)
_EXAMPLE_URLS = "s3://BUCKET/KEY, gs://BUCKET/KEY, az://CONTAINER/KEY, https://HOST/PATH or hf://OWNER/NAME"


def is_url(location: object) -> bool:
    """Whether a location is a URL and no path: `SCHEME://...`."""
    return isinstance(location, str) and _URL_REGEX.match(location) is not None


@dataclass(frozen=True)
class StoreUrl:
    """The URL of an object, or of the objects below `key/`. Keys are as stored, not percent-encoded.

    `bucket` is a bucket of S3 or GCS, a container of Azure, or the host of an HTTP server; empty for `file:///PATH`, a
    directory that is used as a store: without rename, append and locks.
    """

    scheme: str
    bucket: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}" if self.key else f"{self.scheme}://{self.bucket}"

    def __truediv__(self, name: str) -> "StoreUrl":
        return replace(self, key=f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    def relative(self, key: str) -> str:
        """A key below this URL's without what both begin with; "" for its own."""
        return key[len(self.key) :].lstrip("/")

    @property
    def parent(self) -> "StoreUrl":
        """The URL without the last part of its key."""
        return replace(self, key=self.key.rpartition("/")[0])


def parse_url(text: str) -> StoreUrl:
    """Parse a URL. Raises UsageError for another scheme, no bucket, a key that no store can have, and for credentials
    in the URL, which would get into recipes and logs."""
    match = _URL_REGEX.fullmatch(text)
    if match is None:
        raise UsageError(f"{text}: not a URL; expected {_EXAMPLE_URLS}")
    scheme, rest = match[1].lower(), match[2]
    if ("@" in rest.partition("/")[0] and scheme != "hf") or _SIGNED_QUERY.search(text):
        shown = f"{scheme}://{rest.partition('@')[2] if '@' in rest else rest.partition('?')[0]}"
        raise UsageError(
            f"{shown}: the URL holds credentials; remove them, and set them in the environment or a profile, "
            "such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if scheme not in STORE_SCHEMES:
        raise UsageError(f"{text}: no store is known for {scheme}://; expected {_EXAMPLE_URLS}")
    bucket, _, key = rest.partition("/")
    if not bucket and scheme != "file":
        raise UsageError(f"{text}: names no bucket; expected {_EXAMPLE_URLS}")
    if scheme in ("http", "https"):
        parts = urlsplit(text)
        if parts.query or parts.fragment:
            raise UsageError(f"{text}: a URL with a query or fragment cannot be read; expected https://HOST/PATH")
    key = key.strip("/")
    if any(part in ("", ".", "..") for part in key.split("/")) and key:
        raise UsageError(f"{text}: the key has an empty part, `.` or `..`; stores do not resolve them")
    return StoreUrl(scheme, bucket, key)


def fixed_prefix(glob: str) -> str:
    """The part of a glob before the first name with a wildcard."""
    return "/".join(takewhile(lambda name: not WILDCARD_REGEX.search(name), glob.split("/")))
