"""A store where workers meet whose values only who knows the key can write: each is signed, and a value that is not is
an error. Whoever reaches the store beneath it can still read, remove and add to it, or fill it: an attempt may be
stopped so, not led elsewhere."""

import hmac
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

MAX_VALUE_BYTES = 1 << 20
"""Bytes of a value; addresses and announcements are far smaller."""
_MAC_BYTES = 32


class SignedStore(Store):
    """`store`, with a signature before every value over its name and content."""

    def __init__(self, store: Any, key: bytes):
        super().__init__()
        self._store, self._key = store, key

    def set(self, key: str, value: str | bytes) -> None:
        """Say something, signed."""
        self._store.set(key, self._sign(key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it. DistError where it was not signed with the key."""
        found = bytes(self._store.get(key))
        value = found[_MAC_BYTES:]
        if len(found) > MAX_VALUE_BYTES or not hmac.compare_digest(found, self._sign(key, value)):
            raise DistError("what stands in the store where workers meet was not said by a worker of this run")
        return value

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """As `set`, where that is what stands there."""
        before = self._sign(key, expected) if expected else b""
        found = bytes(self._store.compare_set(key, before, self._sign(key, desired)))
        if found and not hmac.compare_digest(found, self._sign(key, found[_MAC_BYTES:])):
            raise DistError("what stands in the store where workers meet was not said by a worker of this run")
        return found[_MAC_BYTES:]

    def add(self, key: str, amount: int) -> int:
        """Count; not signed."""
        count: int = self._store.add(key, amount)
        return count

    def check(self, keys: Sequence[str]) -> bool:
        """Whether something was said under all of these."""
        found: bool = self._store.check(list(keys))
        return found

    def wait(self, keys: Sequence[str], *timeout: timedelta) -> None:
        """Wait for that."""
        self._store.wait(list(keys), *timeout)

    def delete_key(self, key: str) -> bool:
        """Forget what was said."""
        found: bool = self._store.delete_key(key)
        return found

    def num_keys(self) -> int:
        """How many are there."""
        count: int = self._store.num_keys()
        return count

    def has_extended_api(self) -> bool:
        """Values of several keys together are signed one by one."""
        return False

    def clone(self) -> "SignedStore":
        """The same for another thread."""
        return self

    def _sign(self, key: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else bytes(value)
        name = key.encode()
        return hmac.digest(self._key, len(name).to_bytes(4) + name + content, "sha256") + content
