"""Convolutional networks for images: Network-in-Network, GoogLeNet and a small ResNet, as plain PyTorch modules.

The first two are those that large-batch and scaling papers count with (FireCaffe, Iandola et al. 2016). Their layers
are the Caffe model zoo's; their weights are drawn for ReLU (He et al. 2015), not with the zoo's hand-set deviations.
forward(images [b, in_channels, height, width] float) -> logits [b, num_classes].
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# nn.LocalResponseNorm(5) has the zoo's alpha = 1e-4 (divided by the size, as Caffe does) and beta = 0.75 by default.


def _init_weights(model: nn.Module) -> None:
    """He et al. 2015 for everything that a ReLU follows; a plain classifier starts near zero; biases start at zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _conv_relu(in_channels: int, out_channels: int, kernel: int, stride: int = 1, padding: int = 0) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, kernel, stride, padding), nn.ReLU())


def _max_pool(stride: int = 2, padding: int = 0) -> nn.MaxPool2d:
    # Caffe rounds the size of a pooled map up.
    return nn.MaxPool2d(3, stride, padding, ceil_mode=True)


def nin(num_classes: int = 1000, in_channels: int = 3, base_channels: int = 96) -> nn.Sequential:
    """Network-in-Network for ImageNet (Lin, Chen and Yan 2014; Caffe zoo's `nin_imagenet`), images of 224 or 227; the
    least that it takes are 43.

    Convolutions each followed by two of 1x1, no dense layer: the last maps, one a class, are averaged.
    7,595,176 parameters with 1000 classes and 3 channels. `base_channels`: maps of the first convolution; the others
    have as many more or less. Raises ValueError when it is no multiple of 3.
    """
    if base_channels < 3 or base_channels % 3:
        raise ValueError(
            f"base_channels={base_channels} must be a multiple of 3: the maps of all layers are in proportion to 96"
        )
    a, b, c, d = base_channels, base_channels * 8 // 3, base_channels * 4, base_channels * 32 // 3  # 96, 256, 384, 1024
    model = nn.Sequential(
        *(_conv_relu(in_channels, a, 11, stride=4), _conv_relu(a, a, 1), _conv_relu(a, a, 1), _max_pool()),  # 54 -> 27
        *(_conv_relu(a, b, 5, padding=2), _conv_relu(b, b, 1), _conv_relu(b, b, 1), _max_pool()),  # 27 -> 13
        *(_conv_relu(b, c, 3, padding=1), _conv_relu(c, c, 1), _conv_relu(c, c, 1), _max_pool()),  # 13 -> 6
        nn.Dropout(0.5),
        *(_conv_relu(c, d, 3, padding=1), _conv_relu(d, d, 1), _conv_relu(d, num_classes, 1)),
        nn.AdaptiveAvgPool2d(1),  # 6 -> 1
        nn.Flatten(),
    )
    _init_weights(model)
    return model


class InceptionBlock(nn.Module):
    """Four views of the same maps side by side: 1x1, 3x3 and 5x5 (each after a 1x1 reduction), and pooled 3x3."""

    def __init__(self, in_channels: int, one: int, reduce3: int, three: int, reduce5: int, five: int, pool: int):
        super().__init__()
        self.one = _conv_relu(in_channels, one, 1)
        self.three = nn.Sequential(_conv_relu(in_channels, reduce3, 1), _conv_relu(reduce3, three, 3, padding=1))
        self.five = nn.Sequential(_conv_relu(in_channels, reduce5, 1), _conv_relu(reduce5, five, 5, padding=2))
        self.pool = nn.Sequential(_max_pool(stride=1, padding=1), _conv_relu(in_channels, pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        # x [b, inputs, h, w] -> [b, one + three + five + pool, h, w]
        return torch.cat((self.one(x), self.three(x), self.five(x), self.pool(x)), dim=1)


def googlenet(num_classes: int = 1000, in_channels: int = 3) -> nn.Sequential:
    """GoogLeNet (Szegedy et al. 2015, table 1), images of 224, without auxiliary heads, with local response
    normalisation and no batch normalisation. 6,998,552 parameters with 1000 classes and 3 channels."""
    model = nn.Sequential(
        *(_conv_relu(in_channels, 64, 7, stride=2, padding=3), _max_pool(), nn.LocalResponseNorm(5)),  # 112 -> 56
        *(_conv_relu(64, 64, 1), _conv_relu(64, 192, 3, padding=1), nn.LocalResponseNorm(5), _max_pool()),  # 56 -> 28
        InceptionBlock(192, 64, 96, 128, 16, 32, 32),  # 3a -> 256
        InceptionBlock(256, 128, 128, 192, 32, 96, 64),  # 3b -> 480
        _max_pool(),  # 28 -> 14
        InceptionBlock(480, 192, 96, 208, 16, 48, 64),  # 4a -> 512
        InceptionBlock(512, 160, 112, 224, 24, 64, 64),  # 4b -> 512
        InceptionBlock(512, 128, 128, 256, 24, 64, 64),  # 4c -> 512
        InceptionBlock(512, 112, 144, 288, 32, 64, 64),  # 4d -> 528
        InceptionBlock(528, 256, 160, 320, 32, 128, 128),  # 4e -> 832
        _max_pool(),  # 14 -> 7
        InceptionBlock(832, 256, 160, 320, 32, 128, 128),  # 5a -> 832
        InceptionBlock(832, 384, 192, 384, 48, 128, 128),  # 5b -> 1024
        nn.AdaptiveAvgPool2d(1),  # 7 -> 1
        nn.Flatten(),
        nn.Dropout(0.4),
        nn.Linear(1024, num_classes),
    )
    _init_weights(model)
    return model


class ResidualBlock(nn.Module):
    """x + conv(relu(norm(conv(relu(norm(x)))))), the pre-activation block of He et al. 2016."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, groups: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        same = in_channels == out_channels and stride == 1
        self.shortcut = None if same else nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # x [b, inputs, h, w] -> [b, outputs, ceil(h / stride), ceil(w / stride)]
        hidden = F.relu(self.norm1(x))
        straight = x if self.shortcut is None else self.shortcut(hidden)
        out: Tensor = straight + self.conv2(F.relu(self.norm2(self.conv1(hidden))))
        return out


def resnet(
    num_classes: int = 10, in_channels: int = 3, base_channels: int = 32, blocks: Sequence[int] = (2, 2, 2)
) -> nn.Sequential:
    """A small ResNet for images of any size from 16 up. `blocks` counts the residual blocks of each stage; each stage
    after the first halves the size and doubles the width.

    It has group normalisation: a batch norm would tie the samples of a micro-batch together, so that results would
    depend on how a batch is split. Raises ValueError when `base_channels` is no multiple of 8 or a stage has no block.
    """
    groups = 8
    if base_channels < groups or base_channels % groups:
        raise ValueError(
            f"base_channels={base_channels} must be a multiple of {groups}, the number of groups of its normalisation"
        )
    if not blocks or min(blocks) < 1:
        raise ValueError(f"blocks={tuple(blocks)} must give at least one block for each stage")
    stages: list[nn.Module] = [nn.Conv2d(in_channels, base_channels, 3, padding=1, bias=False)]
    stage_in_channels = base_channels
    for stage, count in enumerate(blocks):
        stage_out_channels = base_channels * 2**stage
        for block in range(count):
            stages.append(ResidualBlock(stage_in_channels, stage_out_channels, 2 if stage and not block else 1, groups))
            stage_in_channels = stage_out_channels
    model = nn.Sequential(
        *stages,
        nn.GroupNorm(groups, stage_in_channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(stage_in_channels, num_classes),
    )
    _init_weights(model)
    return model
