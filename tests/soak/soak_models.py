"""Models of a user's own for the soak, copied beside its recipes."""

import os

from torch import nn
from torch.nn.utils.parametrizations import spectral_norm


def normalised(num_classes, in_channels):
    """Batch norm and spectral norm: statistics that each forward changes."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        spectral_norm(nn.Linear(8 * 7 * 7, 16)),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(16, num_classes),
    )


class Drift:
    """A callback that changes a weight in every attempt but the first: a state that no checkpoint has."""

    def post_step(self, run, event):
        if os.environ["PHALANX_ATTEMPT"] != "0":
            next(run.model.parameters()).data.add_(1e-3)
