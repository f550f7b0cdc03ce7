"""Optimizers of the recipe: which parameter is updated by which, and their state under logical names.

`container.py` builds and combines them; the other modules are optimizers and storage of their state.
"""

from phalanx.train.distributed.dtensor_utils import NormFn, compute_norms, compute_squared_norms
from phalanx.train.optim.container import (
    OPTIMIZER_PREFIX,
    SETTINGS_PREFIX,
    STATE_ENTRIES,
    OptimizerContainer,
    find_hidden_matrices,
    select_muon_matrices,
    state_entry_shape,
    trainable_parameters,
)

__all__ = [
    "OPTIMIZER_PREFIX",
    "SETTINGS_PREFIX",
    "STATE_ENTRIES",
    "NormFn",
    "OptimizerContainer",
    "compute_norms",
    "compute_squared_norms",
    "find_hidden_matrices",
    "select_muon_matrices",
    "state_entry_shape",
    "trainable_parameters",
]
