"""A store in memory with a clock of its own, as far as leases need one."""

from collections.abc import Callable, Sequence

from phalanx.storage.errors import NotFound, ObjectExists
from phalanx.storage.store import ObjectInfo


class ClockedStore:
    """Objects with the time at which they were written. `now`: the store's clock, seconds."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.before_create: Callable[[], None] | None = None
        """Called once before the next conditional write."""
        self.lost_answers = 0
        """Conditional writes from now on that lose their answer: a second try finds its own object."""

    def write(self, key: str, data: bytes, if_absent: bool = False) -> None:
        if if_absent and self.before_create is not None:
            act, self.before_create = self.before_create, None
            act()
        if if_absent and key in self.objects:
            raise ObjectExists(key)
        self.objects[key] = (data, self.now)
        if if_absent and self.lost_answers:
            self.lost_answers -= 1
            raise ObjectExists(key)

    def read(self, key: str) -> bytes:
        if key not in self.objects:
            raise NotFound(key)
        return self.objects[key][0]

    def head(self, key: str) -> ObjectInfo:
        data, modified = self.objects[key]
        return ObjectInfo(key, len(data), str(hash(data)), modified)

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        return [self.head(key) for key in sorted(self.objects) if key.startswith(f"{prefix}/")]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)
