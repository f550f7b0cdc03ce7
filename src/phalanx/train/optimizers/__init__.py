"""Optimizers from the recipe: which parameter goes to which, and their state under logical names.

`choice.py` builds them, `combined.py` makes them act as one; the others are optimizers and ways to keep their state.
"""

from phalanx.train.optimizers.choice import find_hidden_matrices, trainable_parameters
from phalanx.train.optimizers.combined import (
    OPTIMIZER_PREFIX,
    SETTINGS_PREFIX,
    STATE_ENTRIES,
    OptimizerContainer,
    state_entry_shape,
)
from phalanx.train.optimizers.local import NormFn, compute_norms, compute_squared_norms

__all__ = [
    "OPTIMIZER_PREFIX",
    "SETTINGS_PREFIX",
    "STATE_ENTRIES",
    "NormFn",
    "OptimizerContainer",
    "compute_norms",
    "compute_squared_norms",
    "find_hidden_matrices",
    "state_entry_shape",
    "trainable_parameters",
]
