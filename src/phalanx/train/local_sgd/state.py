"""The state of local SGD as part of a run's checkpoints.

`local_sgd/worker/optimizer/<parameter>/<state>` has one row per worker. Between outer steps,
`local_sgd/worker/<parameter>` also has one row per worker, and the parameters under their own names are the weights at
the start of the round. `local_sgd/outer_momentum/<parameter>` is the outer optimizer's momentum,
`local_sgd/in_flight/<parameter>` the sum of pseudo-gradients in flight. The same number of workers resumes exactly.
Another number starts from the mean of the rows and, within a round, takes the outer step from it; sums in flight are
part of the rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.train.checkpoint import CheckpointManifest
from phalanx.train.checkpoint.load_plan import LoadPlan, TensorBlocks
from phalanx.train.distributed.dtensor_utils import to_local
from phalanx.train.distributed.parallel_model import LocalTensor, ParallelModel
from phalanx.train.distributed.shard_spec import GlobalBlocks, TensorBlock
from phalanx.train.grad_sync.registry import GRAD_SYNC_ALGORITHMS
from phalanx.train.local_sgd.local_sgd import LocalSGD
from phalanx.train.optim import OPTIMIZER_PREFIX as OPTIMIZER

PER_WORKER_PREFIX, OUTER_MOMENTUM_PREFIX, IN_FLIGHT_PREFIX = (
    "local_sgd/worker/",
    "local_sgd/outer_momentum/",
    "local_sgd/in_flight/",
)
NON_REPLICATE_AXES = ("shard", "context", "tensor")
"""Mesh axes that local SGD does not use; their size is 1."""


@dataclass
class LocalSGDState:
    """Local SGD state of one worker."""

    parallel_model: ParallelModel
    local_sgd: LocalSGD

    def due_steps(self, step: int) -> range:
        """Return the steps with evaluations and saves that are due after `step`: those since the workers last held
        the same weights, and none while the weights differ. Streamed fragments never agree, so it is `step` alone."""
        return self.local_sgd.schedule.steps_in_sync(step)

    def add_per_worker_rows(self, state: Mapping[str, LocalTensor]) -> dict[str, LocalTensor]:
        """Return the state with this worker's own tensors as rows."""
        found = {PER_WORKER_PREFIX + key if key.startswith(OPTIMIZER) else key: held for key, held in state.items()}
        names = {parameter: name for name, parameter in self.parallel_model.parameters().items()}
        if not self.local_sgd.in_sync:
            for parameter, start in self.local_sgd.global_params().items():
                name = names[parameter]
                found |= {
                    PER_WORKER_PREFIX + name: state[name],
                    name: self.parallel_model.replicated_tensor(start.to(parameter.dtype)),
                }
        for parameter, momentum in self.local_sgd.outer_momenta().items():
            found[OUTER_MOMENTUM_PREFIX + names[parameter]] = self.parallel_model.replicated_tensor(momentum)
        for parameter, in_flight_sum in self.local_sgd.in_flight_pseudogradients().items():
            found[IN_FLIGHT_PREFIX + names[parameter]] = self.parallel_model.replicated_tensor(in_flight_sum)
        return {
            key: self._make_row(held.tensor) if key.startswith(PER_WORKER_PREFIX) else held
            for key, held in found.items()
        }

    def _make_row(self, tensor: Tensor) -> LocalTensor:
        shape, zero = tuple(tensor.shape), (0,) * tensor.dim()
        rank, num_workers = self._worker_index()
        return LocalTensor(
            tensor.unsqueeze(0),
            GlobalBlocks((num_workers, *shape), (TensorBlock((0, *zero), (rank, *zero), (1, *shape)),)),
            NON_REPLICATE_AXES,
        )

    def _worker_index(self) -> tuple[int, int]:
        return self.parallel_model.mesh.coordinates["replicate"], self.parallel_model.mesh.parallelism.replicate

    def extend_load_plan(self, wanted: LoadPlan, manifest: CheckpointManifest) -> LoadPlan:
        """Add the local SGD state to a load plan."""
        parameters, (rank, num_workers) = self.parallel_model.parameters(), self._worker_index()
        names = {parameter: name for name, parameter in parameters.items()}
        rows: dict[str, Tensor] = {}  # by name without the prefix for rows
        for key, record in manifest.tensors.items():
            name = key.removeprefix(PER_WORKER_PREFIX)
            owner = name.removeprefix(OPTIMIZER).rpartition("/")[0] if name.startswith(OPTIMIZER) else name
            if key.startswith(PER_WORKER_PREFIX) and owner in parameters:
                rows[name] = torch.zeros(record.shape[1:], dtype=record.torch_dtype)
        moved = {parameters[name]: row for name, row in rows.items() if name in parameters}
        momenta = self._allocate_for(OUTER_MOMENTUM_PREFIX, manifest, self.local_sgd.outer_momenta())
        count = next((manifest.tensors[PER_WORKER_PREFIX + name].shape[0] for name in rows), num_workers)
        new_blocks = [*wanted.new_blocks, *_full_blocks(OUTER_MOMENTUM_PREFIX, momenta)]
        sequential_blocks: list[TensorBlocks] = []
        read, sums = rows, rows
        in_flight: dict[str, Tensor] = {}
        if count == num_workers:
            in_flight_params = self.local_sgd.in_flight_params(manifest.meta["step"])
            in_flight = self._allocate_for(IN_FLIGHT_PREFIX, manifest, in_flight_params)
            if len(in_flight) < len(in_flight_params):  # saved under another schedule
                in_flight = {}
            new_blocks += [*_worker_rows(rows, rank), *_full_blocks(IN_FLIGHT_PREFIX, in_flight)]
        else:
            read = {name: torch.zeros_like(row) for name, row in rows.items()}
            sums = {name: torch.zeros_like(row, dtype=torch.float32) for name, row in rows.items()}
            sequential_blocks = [_worker_rows(read, number) for number in range(count)]

        def add() -> None:
            for name, each in read.items():
                sums[name].add_(each)

        def restore_state() -> None:
            with torch.no_grad():
                for parameter, momentum in self.local_sgd.outer_momenta().items():
                    momentum.zero_()
                    if (name := names[parameter]) in momenta:
                        momentum.copy_(momenta[name])
                self.local_sgd.discard_in_flight()
                if in_flight:
                    for parameter, sum_ in self.local_sgd.restore_in_flight(manifest.meta["step"]).items():
                        sum_.copy_(in_flight[names[parameter]])
            wanted.restore_state()
            self.local_sgd.start_round()
            with torch.no_grad():
                if sequential_blocks:
                    for name, row in rows.items():
                        row.copy_(sums[name].div_(count))
                for parameter, row in moved.items():
                    parameter.copy_(row)
            if moved and sequential_blocks:
                self.local_sgd.step_outer_from_mean()
            elif moved:
                self.local_sgd.in_sync = False

        states = {name: row for name, row in rows.items() if name.startswith(OPTIMIZER)}
        return LoadPlan(
            wanted.live_blocks, new_blocks, wanted.optimizer_tensors | states, restore_state, sequential_blocks, add
        )

    def _allocate_for(
        self, prefix: str, manifest: CheckpointManifest, live: Iterable[nn.Parameter]
    ) -> dict[str, Tensor]:
        """Allocate fp32 tensors, by parameter name, for those of `live` that the manifest has."""
        names = {parameter: name for name, parameter in self.parallel_model.parameters().items()}
        shapes = {names[parameter]: to_local(parameter).shape for parameter in live}
        return {name: torch.empty(shape) for name, shape in shapes.items() if prefix + name in manifest.tensors}


def saved_during_local_sgd(manifest: CheckpointManifest) -> bool:
    """Return whether a checkpoint was saved during local SGD. In one saved before, error feedback is of gradients and
    not of pseudo-gradients."""
    strategy = manifest.meta.get("grad_sync_selection", {}).get("algorithm", "")
    return strategy not in GRAD_SYNC_ALGORITHMS or any(key.startswith(PER_WORKER_PREFIX) for key in manifest.tensors)


def _full_blocks(prefix: str, into: Mapping[str, Tensor]) -> TensorBlocks:
    return [(prefix + name, (0,) * tensor.dim(), tensor) for name, tensor in into.items()]


def _worker_rows(into: Mapping[str, Tensor], number: int) -> TensorBlocks:
    return [(PER_WORKER_PREFIX + name, (number, *(0,) * row.dim()), row.unsqueeze(0)) for name, row in into.items()]
