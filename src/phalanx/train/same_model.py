"""That a model stays what it was when training began: its parameters, which are trained, the shapes of its buffers.

The optimizer, the sums over workers and checkpoints go by what it was then; what comes later would be left out.
"""

from collections.abc import Container, Iterable, Mapping

from torch import Tensor

from phalanx.errors import UsageError
from phalanx.train.distributed.parallel_model import ParallelModel

COMPARE_EVERY_STEPS = 32
"""In how many first steps, and in every how many later ones, names and shapes are compared."""


class SameModel:
    """One worker's part of it, as it is now."""

    def __init__(self, divided: ParallelModel):
        self._divided = divided
        self._parameters = {name: (p, p.requires_grad) for name, p in divided.parameters().items()}
        self._buffers = {name: (each.shape, each.dtype) for name, each in divided.owned_buffers().items()}
        self._checks = 0

    def check(self, step: int) -> None:
        """UsageError where something is another in this step. A parameter that was frozen would still be changed by the
        optimizer; one that is trained since would have the gradient of this worker only."""
        for name, (parameter, trained) in self._parameters.items():
            if parameter.requires_grad != trained:
                raise UsageError(
                    f"step {step}: requires_grad of {name} was set to {not trained} after training began; set it where "
                    "the model is built, and begin another run from the weights (init) to change it"
                )
        self._checks += 1
        if self._checks <= COMPARE_EVERY_STEPS or self._checks % COMPARE_EVERY_STEPS == 0:
            self._check_parameters(step)
            self._check_buffers(step)

    def _check_parameters(self, step: int) -> None:
        if self._divided.mesh.fsdp_mesh is not None:  # it puts others in their places while it gathers them
            return
        before = {name: parameter for name, (parameter, _) in self._parameters.items()}
        if what := other_parameter(before, self._divided.parameters()):
            raise UsageError(f"step {step}: {what}")

    def _check_buffers(self, step: int) -> None:
        now = self._divided.owned_buffers()
        if what := new_buffer(self._buffers, now):
            raise UsageError(f"step {step}: {what}")
        for name, before in self._buffers.items():
            if name in now and (now[name].shape, now[name].dtype) != before:
                raise UsageError(
                    f"step {step}: buffer {name} changed its shape or dtype after training began, so a run could not "
                    "go on from a checkpoint; give it one shape where the model is built, or persistent=False"
                )


def other_parameter(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> str | None:
    """A sentence about the first parameter that came, went or was replaced."""
    for name in sorted(now.keys() | before.keys()):
        if now.get(name) is not before.get(name):
            how = "came" if name not in before else "was replaced" if name in now else "went"
            return (
                f"parameter {name} {how} after the model was built, and the optimizer does not know it; "
                "make all parameters where the model is built, and change them in place"
            )
    return None


def new_buffer(before: Container[str], now: Iterable[str]) -> str | None:
    """A sentence about the first buffer that came."""
    for name in sorted(name for name in now if name not in before):
        return (
            f"buffer {name} came after the model was built, so a run that goes on from a checkpoint "
            "would lose it; register it with a value where the model is built, or with persistent=False"
        )
    return None
