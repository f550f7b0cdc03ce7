"""FireCaffe's networks for images that are smaller than ImageNet's: they are enlarged on their way in."""

from torch import nn

from phalanx.models import googlenet as whole_googlenet
from phalanx.models import nin as whole_nin


def nin(num_classes: int = 10, in_channels: int = 1, size: int = 51, base_channels: int = 96) -> nn.Module:
    """Network-in-Network on images enlarged to `size`, at least 43; the paper's has 96 maps in its first layer."""
    return _enlarging(whole_nin(num_classes, in_channels, base_channels), size)


def googlenet(num_classes: int = 10, in_channels: int = 1, size: int = 64) -> nn.Module:
    """GoogLeNet on images enlarged to `size`, best a multiple of 32."""
    return _enlarging(whole_googlenet(num_classes, in_channels), size)


def _enlarging(model: nn.Module, size: int) -> nn.Module:
    return nn.Sequential(nn.Upsample(size=(size, size), mode="bilinear", align_corners=False), model)
