"""A training loop of the user's own for the tests: copied beside their recipes and run as a script.

python session_script.py HOW KEY=VALUE ...      HOW says what is wrong with it: `right`, or one of the names below;
                                          `folds` joins a second run, `same-fold` the same run again
"""

import os
import sys
import time
import weakref
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

PREVIOUS_MODELS = []  # of the runs before, if they are still there


class Samples:
    """Inputs [8] and a class of three, by index only."""

    def __init__(self, size=60, scale=1.0):
        self.size, self.scale = size, scale

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        inputs = torch.randn(8, generator=torch.Generator().manual_seed(index)) * self.scale
        return {"inputs": inputs, "label": index % 3}


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TP_PLAN = {"blocks.*.up": "columns", "blocks.*.down": "rows"}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class Uneven(torch.optim.AdamW):
    """Keeps on each worker but the first what the first has in another shape (`own-shapes`) or not at all."""

    def __init__(self, parameters, how, rank):
        super().__init__(parameters, lr=0.01)
        self.how, self.rank = how, rank

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            if self.how == "own-shapes" or self.rank:
                state["seen"] = torch.zeros(1 + self.rank, 3)


def loss_sum(model, batch):
    return F.cross_entropy(model(batch["inputs"]), batch["label"], reduction="sum")


def score(model):
    model.eval()
    with torch.no_grad():
        model(torch.randn(5, 8))
    model.train()


def work_between_steps(session, how, seconds=60.0):
    """What takes long between two steps, once: `stuck` without a sign of life, `thinks` with many."""
    if os.environ.get("PHALANX_ATTEMPT", "0") != "0" or session.rank != session.world_size - 1:
        return
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.1)
        if how == "thinks":
            session.send_heartbeat()


def own_beginning(rank):
    """Builds what each worker draws for itself."""

    def build():
        torch.manual_seed(rank)
        return Model()

    return build


def main(how, overrides, run=None):
    import phalanx

    if how == "stranger":
        return
    recipe = Path(__file__).with_name("gone.yaml" if how == "no-recipe" else "session_script.yaml")
    if how == "discord" and os.environ["RANK"] == "1":
        overrides = [*overrides, "grad_sync.algorithm=binomial-tree"]
    with phalanx.session(recipe, overrides, run=run) as session:
        if PREVIOUS_MODELS:
            print(
                f"{sum(model() is not None for model in PREVIOUS_MODELS)} models of runs before are there",
                file=sys.stderr,
            )
        if how == "no-prepare":
            next(session.micro_batches(Samples()))
        if how == "no-batches":
            return
        build = (lambda: Model(0.1)) if how in ("dropout", "evaluates") else Model
        make = {"early-optimizer": lambda _: adamw(Model()), "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.01)}
        if how in ("own-shapes", "own-entries"):
            make[how] = lambda m: Uneven(m.parameters(), how, session.rank)
        if how == "own-beginning":
            build = own_beginning(session.rank)
        if how == "no-module":
            build = dict
        model, optimizer = session.prepare(build, make.get(how, adamw), tp_plan=TP_PLAN)
        PREVIOUS_MODELS.append(weakref.ref(model))
        if how == "scheduler":
            torch.optim.lr_scheduler.StepLR(optimizer, 100)
        samples = {"other-data": Samples(scale=2.0), "loader": iter([])}
        for _ in range(3):  # of a loop over epochs the first gets them all
            for number, batch in enumerate(session.micro_batches(samples.get(how, Samples()), tokens=4)):
                loss = loss_sum(model, batch)
                if how == "mean-shape":
                    loss = loss[None]
                if how != "no-backward":
                    session.backward(loss, 0 if how == "no-terms" else len(batch["label"]))
                if how == "hungry" and len(batch["label"]) > 3:
                    raise torch.OutOfMemoryError("out of memory")
                if how == "exits" and number == 3:
                    sys.exit()
                if how == "vanishes" and number == 3 and session.rank == session.world_size - 1:
                    os._exit(0)
                if how == "raises":
                    raise RuntimeError("a mistake in the loop")
                if session.step() and how == "evaluates":
                    score(model)
                if number == 40 and how in ("stuck", "thinks"):
                    work_between_steps(session, how, 600.0 if how == "stuck" else 8.0)
                if how == "break":
                    break
            if how == "break":
                break


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    if sys.argv[1] in ("folds", "same-fold"):
        main("right", [*sys.argv[2:], "seed=1"], "fold-1")
    if sys.argv[1] == "same-fold":
        main("right", sys.argv[2:])
    if sys.argv[1] == "exits-after":
        sys.exit()
