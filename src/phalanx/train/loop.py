"""The trainer: a recipe's model and task, trained by a gang."""

from phalanx.train.gang import Gang
from phalanx.train.objective import Objective
from phalanx.train.parallel.staging import Staged


def train(gang: Gang, objective: Objective | Staged) -> str:
    """Train to the end; returns `done` or `interrupted`. The last state is saved either way."""
    if isinstance(objective, Staged):
        for batches in gang.steps():
            gang.note(objective.step([gang.parts.convert(batch) for batch in batches]))
            gang.step()
        return gang.finish()
    for batch in gang.batches():
        ((_, loss, terms),) = objective(batch)
        gang.backward(loss, terms)
        gang.step()
    return gang.finish()
