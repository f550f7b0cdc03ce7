"""The nn.Modules that ship: a transformer, one made of a mixture of experts, and a few convolutional networks. Each
builder returns a plain `nn.Module` that knows nothing of Phalanx; any other callable that returns one does as well
(recipe: `model.build`).
"""

from phalanx.models.convnets import googlenet, nin, resnet
from phalanx.models.moe import moe
from phalanx.models.transformer import transformer

__all__ = ["googlenet", "moe", "nin", "resnet", "transformer"]
