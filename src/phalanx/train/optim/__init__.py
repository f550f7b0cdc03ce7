"""Optimizers of the recipe: which parameter is updated by which, and their state under logical names.

`factory.py` builds them, `container.py` combines them; the other modules are optimizers and storage of their state.
"""

from phalanx.train.distributed.dtensor_utils import NormFn, compute_norms, compute_squared_norms
from phalanx.train.optim.container import (
    OPTIMIZER_PREFIX,
    SETTINGS_PREFIX,
    STATE_ENTRIES,
    OptimizerContainer,
    state_entry_shape,
)
from phalanx.train.optim.factory import find_hidden_matrices, select_muon_matrices, trainable_parameters

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
