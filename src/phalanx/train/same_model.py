"""That a model stays what it was when training began: its parameters, which are trained, the shapes of its buffers.

The optimizer, the sums over workers and checkpoints go by what it was then; what comes later would be left out.
"""

from phalanx.errors import UsageError
from phalanx.train.parallel.divided import Divided

LOOKS = 32
"""In how many first steps, and in every how many later ones, names and shapes are compared."""


class SameModel:
    """One worker's part of it, as it is now."""

    def __init__(self, divided: Divided):
        self._divided = divided
        self._parameters = {name: (p, p.requires_grad) for name, p in divided.parameters().items()}
        self._buffers = {name: (each.shape, each.dtype) for name, each in divided.buffers().items()}
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
        if self._checks <= LOOKS or self._checks % LOOKS == 0:
            self._check_parameters(step)
            self._check_buffers(step)

    def _check_parameters(self, step: int) -> None:
        if self._divided.mesh.fsdp is not None:  # it puts others in their places while it gathers them
            return
        now = self._divided.parameters()
        for name in sorted(now.keys() | self._parameters.keys()):
            before, _ = self._parameters.get(name, (None, False))
            if now.get(name) is not before:
                how = "came" if before is None else "was replaced" if name in now else "went"
                raise UsageError(
                    f"step {step}: parameter {name} {how} after training began, and the optimizer does not know it; "
                    "make all parameters where the model is built, and change them in place"
                )

    def _check_buffers(self, step: int) -> None:
        now = self._divided.buffers()
        if came := sorted(now.keys() - self._buffers.keys()):
            raise UsageError(
                f"step {step}: buffer {came[0]} came after training began, so a run that goes on from a checkpoint "
                "would lose it; register it with a value where the model is built, or with persistent=False"
            )
        for name, before in self._buffers.items():
            if name in now and (now[name].shape, now[name].dtype) != before:
                raise UsageError(
                    f"step {step}: buffer {name} changed its shape or dtype after training began, so a run could not "
                    "go on from a checkpoint; give it one shape where the model is built, or persistent=False"
                )
