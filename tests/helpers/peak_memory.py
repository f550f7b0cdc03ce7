"""A task and a callback that count the bytes of tensors a worker has at a time before training, for the tests: copied
beside their recipes. The task begins to count when the worker loads it, which is before it builds a model; the callback
ends that when the run starts, and notes the most bytes at a time in `RUN.peak-RANK`.
"""

import os

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.train.tasks import LanguageModeling


class PeakMemoryMode(TorchDispatchMode):
    """Counts what operations allocate; files mapped into memory do not count."""

    def __init__(self):
        super().__init__()
        self.most = 0
        self._alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if is_plain_tensor(x)]
        if made:
            known = {storage_of(x) for x in tree_leaves((args, kwargs)) if is_plain_tensor(x)}
            for x in made:
                if storage_of(x) not in known:
                    storage = x.untyped_storage()
                    self._alive[storage_of(x)] = (StorageWeakRef(storage), storage.nbytes())
            self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
            self.most = max(self.most, sum(count for _, count in self._alive.values()))
        return out


def is_plain_tensor(x):
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu"


def storage_of(x):
    return x.untyped_storage()._cdata


PEAK_MEMORY = PeakMemoryMode()


class CountingTask(LanguageModeling):
    """Next-token prediction."""

    def __init__(self):
        if "PHALANX_ATTEMPT" in os.environ:  # trials are no workers
            PEAK_MEMORY.__enter__()


class RecordPeak:
    def on_train_start(self, run):
        PEAK_MEMORY.__exit__(None, None, None)
        run.path.with_name(f"{run.path.name}.peak-{run.rank}").write_text(str(PEAK_MEMORY.most))
