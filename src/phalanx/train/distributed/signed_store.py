"""A rendezvous store with signed values: only workers with the key can write values that the others accept; any other
value is an error. Someone with access to the store beneath can still read, remove, add and flood it. That can stop an
attempt, but not mislead it."""

import hmac
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

MAX_VALUE_BYTES = 1 << 20
"""Maximum bytes of a value; addresses and announcements are far smaller."""
_UNSIGNED_VALUE_TEXT = "a value in the rendezvous store was not written by a worker of this run"
_MAC_BYTES = 32


class SignedStore(Store):
    """`store`, with a signature over name and content before every value."""

    def __init__(self, store: Any, key: bytes):
        super().__init__()
        self._store, self._key = store, key

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value, signed."""
        self._store.set(key, self._sign(key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it. Raises DistError unless it was signed with the key."""
        found = bytes(self._store.get(key))
        value = found[_MAC_BYTES:]
        if len(found) > MAX_VALUE_BYTES or not hmac.compare_digest(found, self._sign(key, value)):
            raise DistError(_UNSIGNED_VALUE_TEXT)
        return value

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a value, signed, if the current value is `expected`."""
        before = self._sign(key, expected) if expected else b""
        found = bytes(self._store.compare_set(key, before, self._sign(key, desired)))
        if found and not hmac.compare_digest(found, self._sign(key, found[_MAC_BYTES:])):
            raise DistError(_UNSIGNED_VALUE_TEXT)
        return found[_MAC_BYTES:]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; not signed."""
        count: int = self._store.add(key, amount)
        return count

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these keys are set."""
        found: bool = self._store.check(list(keys))
        return found

    def wait(self, keys: Sequence[str], *timeout: timedelta) -> None:
        """Wait until all of these keys are set."""
        self._store.wait(list(keys), *timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        found: bool = self._store.delete_key(key)
        return found

    def num_keys(self) -> int:
        """Return the number of keys."""
        count: int = self._store.num_keys()
        return count

    def has_extended_api(self) -> bool:
        """Return False: values of several keys at once would need separate signatures."""
        return False

    def clone(self) -> "SignedStore":
        """Return this store, which another thread may use too."""
        return self

    def _sign(self, key: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else bytes(value)
        name = key.encode()
        return hmac.digest(self._key, len(name).to_bytes(4) + name + content, "sha256") + content
