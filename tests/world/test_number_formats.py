"""The formats in which ranks of a divided model compute are those of one process under autocast: bit for bit the same
with sharded parameters, and the same formats in tensor-parallel layers."""

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from phalanx.models.moe import MoE
from phalanx.recipe.schema import AdapterConfig
from phalanx.train.adapters.lora import add_adapters
from phalanx.train.distributed.fsdp import CASTING_MODULES, apply_fsdp
from phalanx.train.distributed.tensor_parallel import apply_tensor_parallel
from phalanx.train.ops.float8 import Float8Linear
from process_worlds import ProcessWorlds

WIDTH, LENGTH = 32, 8


class Attention(nn.Module):
    """A block as torch's own layers make it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        out: Tensor = x + self.down(F.gelu(self.up(x)))
        return out


class Convolution(nn.Module):
    """Statistics in fp32 buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(self.convolution(x.transpose(1, 2))).transpose(1, 2)
        return out


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn = nn.RMSNorm(WIDTH), MoE(WIDTH, 4, 2, 32, 32, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.ffn(self.norm(x).to(torch.get_autocast_dtype("cpu")))
        return out


class Scaled(nn.Module):
    """A parameter of the block's own, which multiplies in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.full((1, WIDTH), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scale * self.linear(x)
        return out


class Normalized(nn.Module):
    """A weight that is computed in fp32 from two parameters, and one from a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(self.first(x))
        return out


class Kinds(nn.Module):
    """A block of each kind between an embedding and an output layer."""

    def __init__(self, tied: bool, adapted: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList([Attention(), Convolution(), Experts(), Scaled(), Normalized()])
        self.head = nn.Linear(WIDTH, 20, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if adapted:
            add_adapters(self, AdapterConfig(rank=2, target_modules=["up", "down"]))
            for block in self.blocks:
                for name, parameter in block.named_parameters():
                    parameter.requires_grad_(parameter.requires_grad or "norm" in name)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits.float().square().sum()


def named_gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            yield name, gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def compare(rank: int, world: int, *, precision: str, tied: bool, adapted: bool) -> list[str]:
    """Names of what differs from the unsharded model, when every rank has the same samples."""
    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    whole = Kinds(tied, adapted)
    sharded, tokens = deepcopy(whole), torch.randint(0, 20, (2, LENGTH))
    losses = []
    apply_fsdp(sharded, list(sharded.blocks), init_device_mesh("cpu", (world,)), precision=precision)
    for model in (whole, sharded):
        for _ in range(2):  # micro-batches
            with torch.autocast("cpu", dtype=dtype):
                loss = model(tokens)
            loss.backward()
        losses.append(loss.detach())
    expected, found = dict(named_gradients(whole)), dict(named_gradients(sharded))
    differing = [name for name in expected if name not in found or not torch.equal(found[name], world * expected[name])]
    return differing + (["loss"] if not torch.equal(*losses) else []) + sorted(found.keys() - expected.keys())


@pytest.mark.parametrize(
    ("precision", "tied", "adapted"), [("bf16", True, False), ("fp16", False, False), ("bf16", False, True)]
)
def test_shards_compute_the_bits_of_one_process(
    world: ProcessWorlds, precision: str, tied: bool, adapted: bool
) -> None:
    assert world.run(2, compare, precision=precision, tied=tied, adapted=adapted) == [[]] * 2


def gathered(rank: int, world: int) -> dict[str, str]:
    """The dtype in which a forward finds each parameter."""
    model = Kinds(tied=False, adapted=False)
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda module, *_, name=name: found.update(
                {f"{name}.{key}": str(p.dtype) for key, p in module.named_parameters(recurse=False)}
            )
        )
    apply_fsdp(model, list(model.blocks), init_device_mesh("cpu", (world,)), precision="bf16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randint(0, 20, (2, LENGTH)))
    assert not any(isinstance(part, FSDPModule) for block in model.blocks for part in list(block.modules())[1:])
    return found


def test_only_what_autocast_casts_is_gathered_in_16_bits(world: ProcessWorlds) -> None:
    found, again = world.run(2, gathered)
    assert found == again
    half = {name for name, dtype in found.items() if dtype == "torch.bfloat16"}
    assert {name.rpartition(".")[0] for name in half} == {
        *(f"blocks.0.{name}" for name in ("attention", "up", "down")),
        "blocks.1.convolution",
        *(f"blocks.2.ffn.{name}" for name in ("router.score", "experts")),
        *(f"blocks.2.ffn.shared.{name}" for name in ("gate", "up", "down")),
    }


LAYERS = [
    nn.Linear(WIDTH, 16),
    nn.MultiheadAttention(WIDTH, 4),
    *(kind(WIDTH, 8, 3) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
    *(kind(WIDTH, 8, 3) for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_layers_compute_the_same_with_weights_that_are_cast_before(layer: nn.Module) -> None:
    tested = {type(module) for layer in LAYERS for module in layer.modules()}
    assert tested | {Float8Linear} == CASTING_MODULES
    sizes = {"Conv1d": 1, "Conv2d": 2, "Conv3d": 3}.get(type(layer).__name__.replace("Transpose", ""), 0)
    x = torch.randn(4, WIDTH, *[5] * sizes)
    cast, results = deepcopy(layer).bfloat16(), []
    for each in (layer, cast):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = each(x, x, x)[0] if isinstance(each, nn.MultiheadAttention) else each(x)
        out.float().square().sum().backward()
        results.append((out, [p.grad.float() for p in each.parameters() if p.grad is not None]))
    assert torch.equal(results[0][0], results[1][0])
    assert all(map(torch.equal, results[0][1], results[1][1]))


class Conv1D(nn.Module):
    """The linear layer of transformers' GPT-2."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, 1), self.weight).view(*x.shape[:-1], self.nf)


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
        self.transposed = nn.Sequential(Conv1D(2 * WIDTH, WIDTH), Conv1D(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.transposed(self.linear(x))
        return out


STYLES = {
    "linear": "region",
    "linear.0": "columns",
    "linear.1": "rows",
    "transposed": "region",
    "transposed.0": "columns-conv1d",
    "transposed.1": "rows-conv1d",
}


def divided(rank: int, world: int) -> tuple[dict[str, list[str]], float]:
    """The formats of results before and after tensor ranks divide the layers, and how far the outputs are apart."""
    torch.manual_seed(0)
    model, x = Regions(), torch.randn(2, LENGTH, WIDTH)
    found: dict[str, list[str]] = {name: [] for name in STYLES}
    for name in STYLES:
        hook = model.get_submodule(name).register_forward_hook
        hook(lambda module, args, out, name=name: found[name].append(str(out.dtype)))
    outputs = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(model(x).detach().float())
        if len(outputs) == 1:
            apply_tensor_parallel(model, STYLES, dist.group.WORLD)
    return found, float((outputs[1] - outputs[0]).norm() / outputs[0].norm())


def test_layers_of_tensor_ranks_give_the_format_of_whole_ones(world: ProcessWorlds) -> None:
    for formats, distance in world.run(2, divided):
        assert formats == {name: ["torch.bfloat16"] * 2 for name in STYLES}
        assert distance < 1e-2
