"""Divide the tensors of the state among the workers that hold them: each is saved once at each destination."""

from collections.abc import Callable, Iterable, Mapping

from phalanx.train.checkpoint.save import assign_to_ranks
from phalanx.train.checkpoint.staging import TensorShard
from phalanx.train.distributed.parallel_model import LocalTensor

PositionFn = Callable[[tuple[str, ...]], tuple[int, int]]
"""Returns, for tensors that are replicated along these axes, this worker's index among the workers that divide them,
and their number."""


class OwnedTensors:
    """The tensors that this worker saves of those it holds."""

    def __init__(self, position: PositionFn):
        self._position = position
        self._sizes: dict[str, int] = {}
        self.names: set[str] = set()

    @property
    def size_bytes(self) -> int:
        return sum(self._sizes[name] for name in self.names)

    def update(self, state: Mapping[str, LocalTensor]) -> bool:
        """Divide the tensors again if their names or sizes have changed, as when an optimizer gets its state at its
        first update. Return whether they have; it is the same on every worker."""
        sizes = {name: each.tensor.numel() * each.tensor.element_size() for name, each in state.items()}
        if sizes == self._sizes:
            return False
        self._sizes, self.names = sizes, set()
        for axes in {each.replicated_axes for each in state.values()}:
            divided = {name: sizes[name] for name, each in state.items() if each.replicated_axes == axes}
            index, count = self._position(axes)
            self.names.update(assign_to_ranks(divided, count)[index])
        return True

    def select(self, names: Iterable[str]) -> list[str]:
        """Return those of the names that this worker saves."""
        return [name for name in names if name in self.names]

    def make_shards(self, state: Mapping[str, LocalTensor]) -> list[TensorShard]:
        """Return the blocks that this worker saves, by name."""
        return [
            TensorShard(
                name, block.slice_local(state[name].tensor), state[name].global_blocks.global_shape, block.global_offset
            )
            for name in sorted(self.names)
            for block in state[name].global_blocks.blocks
        ]
