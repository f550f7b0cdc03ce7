"""Check that a model does not change during training: its parameters, which of them are trained, its buffers' shapes.

Optimizer, gradient reduction and checkpoints were set up for the initial model; later changes would be missed.
"""

from collections.abc import Container, Iterable, Mapping

from torch import Tensor

from phalanx.errors import UsageError
from phalanx.train.distributed.parallel_model import ParallelModel

COMPARE_EVERY_STEPS = 32
"""Names and shapes are compared in the first steps up to this number, and then once in this many steps."""


class SameModel:
    """The check on one worker."""

    def __init__(self, divided: ParallelModel):
        self._divided = divided
        self._parameters = {name: (p, p.requires_grad) for name, p in divided.parameters().items()}
        self._buffers = {name: (each.shape, each.dtype) for name, each in divided.owned_buffers().items()}
        self._checks = 0

    def check(self, step: int) -> None:
        """Raise UsageError if something has changed in this step. A parameter that was frozen later would still be
        updated by the optimizer; one that was unfrozen would have the gradient of this worker only."""
        for name, (parameter, trained) in self._parameters.items():
            if parameter.requires_grad != trained:
                raise UsageError(
                    f"step {step}: requires_grad of {name} was set to {not trained} after training began; set it where "
                    "the model is built, and start another run from the weights (init_from) to change it"
                )
        self._checks += 1
        if self._checks <= COMPARE_EVERY_STEPS or self._checks % COMPARE_EVERY_STEPS == 0:
            self._check_parameters(step)
            self._check_buffers(step)

    def _check_parameters(self, step: int) -> None:
        if self._divided.mesh.fsdp_mesh is not None:  # FSDP replaces parameters while they are gathered
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
                    "resume from a checkpoint; give it one shape where the model is built, or persistent=False"
                )


def other_parameter(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> str | None:
    """Describe the first parameter that was added, removed or replaced."""
    for name in sorted(now.keys() | before.keys()):
        if now.get(name) is not before.get(name):
            how = "came" if name not in before else "was replaced" if name in now else "went"
            return (
                f"parameter {name} {how} after the model was built, and the optimizer does not know it; "
                "make all parameters where the model is built, and change them in place"
            )
    return None


def new_buffer(before: Container[str], now: Iterable[str]) -> str | None:
    """Describe the first buffer that was added."""
    for name in sorted(name for name in now if name not in before):
        return (
            f"buffer {name} came after the model was built, so a run that resumes from a checkpoint would lose it; "
            "register it with a value where the model is built, or with persistent=False"
        )
    return None
