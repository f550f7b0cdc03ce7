"""Optimizers from the recipe: which parameter goes to which, and their state under logical names.

`choice.py` builds them, `combined.py` makes them act as one; the others are optimizers and ways to keep their state.
"""

from phalanx.train.optimizers.choice import hidden_matrices, trainable
from phalanx.train.optimizers.combined import ENTRIES, PREFIX, SETTINGS, Optimizer, entry_shape
from phalanx.train.optimizers.local import NormOf, norms, squared_norms

__all__ = [
    "ENTRIES",
    "PREFIX",
    "SETTINGS",
    "NormOf",
    "Optimizer",
    "entry_shape",
    "hidden_matrices",
    "norms",
    "squared_norms",
    "trainable",
]
