"""The training state besides tensors: counters, scores, and what the selection of a reduction strategy has learned.

A checkpoint holds `TrainState` in its meta, and these tensors: parameters and persistent buffers by their names in the
model, `optimizer/<parameter>/<state>`, `extra/<module>` (`get_extra_state`), `settings/groups` (param groups of an
optimizer), `scaler/<name>`, `grad_sync/residual/<parameter>`, `grad_sync/basis/<parameter>`, and the local state of
workers under local SGD (`local_sgd/step.py`). The order of data follows from the samples consumed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from phalanx.errors import DataError


def estimate_noise(small: float, small_batch: float, big: float, big_batch: float) -> tuple[float, float]:
    """Unbiased estimates of (|G|^2, tr(S)): the squared norm of the true gradient, and the trace of the covariance of
    one sample's gradient.

    `small` and `big` are squared norms of *mean* gradients over `small_batch` and `big_batch` samples (or tokens, or
    any unit). `small` should be averaged over all parts of the big batch. Either estimate may be negative.
    """
    signal = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    noise = (small - big) / (1 / small_batch - 1 / big_batch)
    return signal, noise


@dataclass
class GradientNoiseScale:
    """A running estimate of tr(S) / |G|^2, the simple noise scale (McCandlish et al. 2018, "An empirical model of
    large-batch training", appendix A.1): how large the global batch may be before larger ones give diminishing returns.
    Below it, twice the batch takes nearly half the steps; far above it, hardly fewer. The ratio of two noisy estimates
    is biased, so numerator and denominator are smoothed separately, with weight `decay` on the past."""

    decay: float = 0.99
    signal: float = 0.0
    noise: float = 0.0
    updates: int = 0

    def update(self, small: float, small_batch: float, big: float, big_batch: float) -> None:
        """Update with one step; the arguments are those of `estimate_noise`. Non-finite norms (of a skipped step) are
        ignored, because one would make the average non-finite from then on."""
        if not (math.isfinite(small) and math.isfinite(big)):
            return
        signal, noise = estimate_noise(small, small_batch, big, big_batch)
        self.updates += 1
        # Use the plain mean at first, so that the first steps do not count more than others.
        weight = max(1 - self.decay, 1 / self.updates)
        self.signal += weight * (signal - self.signal)
        self.noise += weight * (noise - self.noise)

    @property
    def value(self) -> float | None:
        """The noise scale in the unit of the batch sizes; None while the estimates are not positive."""
        return self.noise / self.signal if self.signal > 0 and self.noise >= 0 and self.updates else None


if TYPE_CHECKING:
    from phalanx.train.distributed.parallel_model import ParallelModel
    from phalanx.train.optim.container import OptimizerContainer
    from phalanx.train.precision import GradScaler


@dataclass(frozen=True)
class AppState:
    """The owners of the tensors that a checkpoint saves and restores on one worker."""

    parallel_model: ParallelModel
    optimizer: OptimizerContainer
    scaler: GradScaler


@dataclass
class TrainState:
    """The progress of a run. Skipped steps count as steps; after a rollback samples are ahead of step x global batch.

    `best_loss` is the lowest validation loss that was saved. `last_saved_step` is the step of the newest checkpoint, 0
    before the first.
    """

    step: int = 0
    samples_consumed: int = 0
    units_trained: int = 0  # tokens or samples trained on
    skipped_steps: int = 0
    consecutive_skips: int = 0
    last_loss: float | None = None
    best_loss: float | None = None
    last_saved_step: int = 0
    noise_scale: GradientNoiseScale = field(default_factory=GradientNoiseScale)

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> TrainState:
        """Read it from a checkpoint's meta (`asdict`). DataError for a value of a wrong type, or a negative one."""
        values = {each.name: meta[each.name] for each in fields(cls) if each.name in meta}
        try:
            found = _STATE_ADAPTER.validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise DataError(f"a checkpoint's meta.{key}: {first['msg']}, found {first['input']!r}") from None
        if min(found.step, found.samples_consumed, found.units_trained) < 0:
            raise DataError(
                f"a checkpoint of step {found.step} after {found.samples_consumed} samples and "
                f"{found.units_trained} units"
            )
        return found


_STATE_ADAPTER = TypeAdapter(TrainState)
"""Built when the fork server imports this module: it takes 5 ms, which each restarted worker would spend again."""
