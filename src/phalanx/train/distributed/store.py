"""The rendezvous store: workers exchange addresses and announcements in it before they have a process group. Between
nodes its values are signed: only workers with the key can write values that the others accept.
"""

import functools
import hmac
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from phalanx.errors import UsageError
from phalanx.run.authentication import derive_store_key, load_token, open_listener
from phalanx.run.control_channel import find_listen_address
from phalanx.run.node_env import STORE_KEY_VARIABLE, STORE_VARIABLE
from phalanx.train.distributed.environment import DistEnv, is_single_node

MAX_VALUE_BYTES = 1 << 20
"""Maximum bytes of a value; addresses and announcements are far smaller."""
_UNSIGNED_VALUE_TEXT = "a value in the rendezvous store was not written by a worker of this run"
_MAC_BYTES = 32


class SignedStore(Store):
    """`store`, with a signature over name and content before every value.

    Someone with access to the store beneath can still read, remove, add and flood it. That can stop an attempt, but not
    mislead it.
    """

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
        return int(self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these keys are set."""
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], *timeout: timedelta) -> None:
        """Wait until all of these keys are set."""
        self._store.wait(list(keys), *timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return bool(self._store.delete_key(key))

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._store.num_keys())

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


MIN_COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Minimum timeout of a collective, see `set_collective_timeout`. Evaluation and the first steps on slow machines must
fit."""
STORE_CONNECT_TIMEOUT = timedelta(seconds=30)
"""Timeout for connecting to a store that was started before its workers."""


def open_attempt_store(dist_env: DistEnv, environment: Mapping[str, str] = os.environ) -> PrefixStore:
    """Open the part of the root store that belongs to this attempt."""
    name = f"attempt{dist_env.attempt}/{environment.get('PHALANX_RENDEZVOUS_ID', 0)}"
    return PrefixStore(name, open_root_store(dist_env, environment))


def open_root_store(dist_env: DistEnv, environment: Mapping[str, str] = os.environ) -> Store:
    """Open the rendezvous store, once per process.

    With our agent on one machine it is a file that only this user can open. On several nodes the agent hosts the store,
    and values are signed with the attempt's key. torchrun hosts its own store; with other launchers rank 0 does. Values
    are signed if the launcher gives the workers a token."""
    if path := environment.get(STORE_VARIABLE):
        return _open_file_store(path)
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if not address or not port:
        raise UsageError(f"WORLD_SIZE={dist_env.world_size} needs MASTER_ADDR and MASTER_PORT, where the workers meet")
    # torchrun may leave hosting the store to rank 0, or use another rendezvous backend than torch's store.
    hosted = "PHALANX_EVENTS_FD" in environment or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    timeout = STORE_CONNECT_TIMEOUT if hosted else MIN_COLLECTIVE_TIMEOUT
    is_host, key = dist_env.is_rank_zero and not hosted, _get_store_key(environment)
    return _connect_store(address, int(port), is_host, is_single_node(environment), key, timeout)


@functools.cache
def _open_file_store(path: str) -> FileStore:
    return FileStore(path, -1)


@functools.cache
def _connect_store(address: str, port: int, is_host: bool, local: bool, key: bytes | None, timeout: timedelta) -> Store:
    if not is_host:
        store = TCPStore(address, port, None, False, timeout)
        store.set_timeout(MIN_COLLECTIVE_TIMEOUT)
    else:
        try:  # torch itself would listen on all interfaces
            listener = open_listener(address if local else find_listen_address(address), port)
        except OSError as error:
            reason = str(error.strerror).partition(" (while")[0]
            raise UsageError(
                f"MASTER_ADDR={address} MASTER_PORT={port}: worker 0 cannot listen there: {reason}; name an address of "
                "its machine, and a port that is free"
            ) from None
        store = TCPStore(address, port, None, True, MIN_COLLECTIVE_TIMEOUT, master_listen_fd=listener.detach())
    return store if key is None else SignedStore(store, key)


def _get_store_key(environment: Mapping[str, str]) -> bytes | None:
    if given := environment.get(STORE_KEY_VARIABLE):
        return bytes.fromhex(given)
    if environment.keys().isdisjoint({"PHALANX_TOKEN", "PHALANX_TOKEN_FILE"}):
        return None
    return derive_store_key(load_token(environment), environment.get("TORCHELASTIC_RUN_ID", ""))
