"""Convolutional networks: the papers' parameter counts and layer shapes."""

import pytest
import torch
from torch import nn

from phalanx.models import googlenet, nin, resnet


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def shapes(model: nn.Module, size: int) -> list[tuple[int, ...]]:
    """Output shape, without the batch, of each layer for an image of this size."""
    x, found = torch.empty(1, 3, size, size, device="meta"), []
    for layer in model.to("meta").eval().children():
        x = layer(x)
        found.append(tuple(x.shape[1:]))
    return found


def test_network_in_network_has_the_papers_parameters() -> None:
    assert count(nin()) == 7_595_176


def test_googlenet_has_the_papers_parameters() -> None:
    assert count(googlenet()) == 6_998_552


@pytest.mark.parametrize(("size", "first"), [(224, 54), (227, 55)])
def test_network_in_network_has_the_zoos_layer_shapes(size: int, first: int) -> None:
    found = shapes(nin(), size)
    assert found[0] == (96, first, first)
    assert found[3] == (96, 27, 27)
    assert found[7] == (256, 13, 13)
    assert found[11] == (384, 6, 6)
    assert found[15] == (1000, 6, 6)
    assert found[-1] == (1000,)


def test_googlenet_has_the_shapes_of_the_papers_table() -> None:
    found = shapes(googlenet(), 224)
    table = [(64, 112, 112), (64, 56, 56), (192, 56, 56), (192, 28, 28), (256, 28, 28), (480, 28, 28), (480, 14, 14)]
    table += [(512, 14, 14), (528, 14, 14), (832, 14, 14), (832, 7, 7), (1024, 7, 7), (1024, 1, 1), (1000,)]
    rest = iter(found)
    assert all(any(shape == layer for layer in rest) for shape in table), found


@pytest.mark.parametrize("build", [nin, googlenet])
def test_classes_and_channels_are_the_callers(build: type[nn.Module]) -> None:
    model = build(num_classes=7, in_channels=1).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 1, 224, 224, generator=torch.Generator().manual_seed(0))).shape == (1, 7)


@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 16), (3, 33)])
def test_resnet_takes_images_of_any_size(channels: int, size: int) -> None:
    with torch.no_grad():
        assert resnet(in_channels=channels, base_channels=8)(torch.zeros(2, channels, size, size)).shape == (2, 10)


def test_resnet_treats_each_sample_by_itself() -> None:
    torch.manual_seed(0)
    model, images = resnet(in_channels=1, base_channels=8), torch.randn(4, 1, 28, 28)
    with torch.no_grad():
        torch.testing.assert_close(model(images)[2:], model(images[2:]), rtol=1e-5, atol=1e-6)


def test_resnet_stages_halve_the_size_and_double_the_width() -> None:
    found = shapes(resnet(base_channels=16), 32)
    assert found[:7] == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 2 + [(64, 8, 8)] * 2


@pytest.mark.parametrize(
    ("model", "size"), [(lambda: nin(10), 67), (lambda: googlenet(10), 64), (lambda: resnet(base_channels=8), 16)]
)
def test_a_gradient_reaches_every_parameter(model: type[nn.Module], size: int) -> None:
    torch.manual_seed(0)
    net = model()
    net(torch.randn(2, 3, size, size)).square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_a_narrow_nin_has_the_same_layers_in_proportion() -> None:
    wide, narrow = shapes(nin(10), 43), shapes(nin(10, base_channels=12), 43)
    assert [(maps * 12 // 96, *size) for maps, *size in wide[:-3]] == [tuple(shape) for shape in narrow[:-3]]
    assert narrow[-1] == wide[-1]


@pytest.mark.parametrize("width", [0, 32])
def test_a_width_that_nin_cannot_have_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match="must be a multiple of 3"):
        nin(10, base_channels=width)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"base_channels": 20}, "multiple of 8"),
        ({"blocks": (2, 0)}, "at least one"),
    ],
)
def test_a_resnet_that_cannot_be_is_refused(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        resnet(**arguments)  # type: ignore[arg-type]
