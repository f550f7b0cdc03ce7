"""The state of workers that train apart for a while, as part of the state of a run.

In a checkpoint `exchange/worker/optimizer/<parameter>/<state>` has a row for each worker. Between two outer steps
`exchange/worker/<parameter>` has one, too, and the parameters by their own names are those with which the round began.
`exchange/momentum/<parameter>` is the outer optimizer's, `exchange/flying/<parameter>` the sum of how far workers had
moved that was under way. The same number of workers goes on where it was. With another, each starts from the mean of
the rows, and where that is in the middle of a round, with its outer step; what was under way is in the rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.train.checkpoint import Manifest
from phalanx.train.exchange.rounds import Rounds
from phalanx.train.exchange.ways import WAYS
from phalanx.train.optimizers import PREFIX as OPTIMIZER
from phalanx.train.parallel.cuts import Block, Holding
from phalanx.train.parallel.divided import Divided, Held, local
from phalanx.train.state import Blocks, Wanted

ROWS, MOMENTUM, FLYING = "exchange/worker/", "exchange/momentum/", "exchange/flying/"
OTHERS = ("shard", "context", "tensor")
"""Axes along which ranks would hold the same; here they have one."""


@dataclass
class Apart:
    """That of one worker."""

    divided: Divided
    rounds: Rounds

    def due(self, step: int) -> range:
        """The steps whose evaluations and saves are done after this one: when workers hold the same weights again, if
        they ever do before the end."""
        return self.rounds.schedule.since(step)

    def held(self, state: Mapping[str, Held]) -> dict[str, Held]:
        """The state, with this worker's own of it as a row."""
        found = {ROWS + key if key.startswith(OPTIMIZER) else key: held for key, held in state.items()}
        names = {parameter: name for name, parameter in self.divided.parameters().items()}
        if not self.rounds.together:
            for parameter, start in self.rounds.starts().items():
                name = names[parameter]
                found |= {ROWS + name: state[name], name: self.divided.whole(start.to(parameter.dtype))}
        for parameter, momentum in self.rounds.momenta().items():
            found[MOMENTUM + names[parameter]] = self.divided.whole(momentum)
        for parameter, moved in self.rounds.flying().items():
            found[FLYING + names[parameter]] = self.divided.whole(moved)
        return {key: self._row(held.tensor) if key.startswith(ROWS) else held for key, held in found.items()}

    def _row(self, tensor: Tensor) -> Held:
        shape, zero = tuple(tensor.shape), (0,) * tensor.dim()
        rank, world = self._number()
        return Held(
            tensor.unsqueeze(0), Holding((world, *shape), (Block((0, *zero), (rank, *zero), (1, *shape)),)), OTHERS
        )

    def _number(self) -> tuple[int, int]:
        return self.divided.mesh.at["replicate"], self.divided.mesh.layout.replicate

    def wanted(self, wanted: Wanted, manifest: Manifest) -> Wanted:
        """What to read besides."""
        parameters, (rank, world) = self.divided.parameters(), self._number()
        names = {parameter: name for name, parameter in parameters.items()}
        rows: dict[str, Tensor] = {}  # by the name that it would have without the others
        for key, record in manifest.tensors.items():
            name = key.removeprefix(ROWS)
            owner = name.removeprefix(OPTIMIZER).rpartition("/")[0] if name.startswith(OPTIMIZER) else name
            if key.startswith(ROWS) and owner in parameters:
                rows[name] = torch.zeros(record.shape[1:], dtype=record.torch_dtype)
        moved = {parameters[name]: row for name, row in rows.items() if name in parameters}
        momenta = self._read(MOMENTUM, manifest, self.rounds.momenta())
        count = next((manifest.tensors[ROWS + name].shape[0] for name in rows), world)
        fresh = [*wanted.fresh, *_blocks(MOMENTUM, momenta)]
        turns: list[Blocks] = []
        read, sums = rows, rows
        flying: dict[str, Tensor] = {}
        if count == world:
            under_way = self.rounds.under_way(manifest.meta["step"])
            flying = self._read(FLYING, manifest, under_way)
            if len(flying) < len(under_way):  # of a run with another schedule
                flying = {}
            fresh += [*_row_of(rows, rank), *_blocks(FLYING, flying)]
        else:
            read = {name: torch.zeros_like(row) for name, row in rows.items()}
            sums = {name: torch.zeros_like(row, dtype=torch.float32) for name, row in rows.items()}
            turns = [_row_of(read, number) for number in range(count)]

        def add() -> None:
            for name, each in read.items():
                sums[name].add_(each)

        def settle() -> None:
            with torch.no_grad():
                for parameter, momentum in self.rounds.momenta().items():
                    momentum.zero_()
                    if (name := names[parameter]) in momenta:
                        momentum.copy_(momenta[name])
                self.rounds.drop()
                if flying:
                    for parameter, sum_ in self.rounds.take_up(manifest.meta["step"]).items():
                        sum_.copy_(flying[names[parameter]])
            wanted.settle()
            self.rounds.begin()
            with torch.no_grad():
                if turns:
                    for name, row in rows.items():
                        row.copy_(sums[name].div_(count))
                for parameter, row in moved.items():
                    parameter.copy_(row)
            if moved and turns:
                self.rounds.end_agreed()
            elif moved:
                self.rounds.together = False

        states = {name: row for name, row in rows.items() if name.startswith(OPTIMIZER)}
        return Wanted(wanted.blocks, fresh, wanted.states | states, settle, turns, add)

    def _read(self, prefix: str, manifest: Manifest, live: Iterable[nn.Parameter]) -> dict[str, Tensor]:
        """New fp32 tensors, by parameter name, for what the manifest has of these."""
        names = {parameter: name for name, parameter in self.divided.parameters().items()}
        shapes = {names[parameter]: local(parameter).shape for parameter in live}
        return {name: torch.empty(shape) for name, shape in shapes.items() if prefix + name in manifest.tensors}


def was_apart(manifest: Manifest) -> bool:
    """Whether workers trained apart when it was saved. Before that what they had not sent was of gradients, not of
    weights."""
    strategy = manifest.meta.get("exchange", {}).get("strategy", "")
    return strategy not in WAYS or any(key.startswith(ROWS) for key in manifest.tensors)


def _blocks(prefix: str, into: Mapping[str, Tensor]) -> Blocks:
    return [(prefix + name, (0,) * tensor.dim(), tensor) for name, tensor in into.items()]


def _row_of(into: Mapping[str, Tensor], number: int) -> Blocks:
    return [(ROWS + name, (number, *(0,) * row.dim()), row.unsqueeze(0)) for name, row in into.items()]
