"""Make a model smaller: keep the channels of feed-forwards and the blocks that matter most for samples of the data
(Muralidharan et al. 2024, Minitron). Distillation then recovers what was lost.

A channel matters as much as it adds to the output of its layer: its root mean square, times the norm of the weights
that read it. A block matters as much as it turns its input: 1 - cosine of input and output, the mean over tokens.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.errors import UsageError


@dataclass(frozen=True)
class PrunableFamily:
    """Where a model has its blocks, the linear layers within each that write (`inputs`) and read (`output`) the inner
    channels of its feed-forward, and the keys of its config for their numbers."""

    blocks: str
    inputs: tuple[str, ...]
    output: str
    width_key: str
    depth_key: str
    by_rows: bool = True
    """Whether weights are [out, in], as in nn.Linear; else [in, out]."""


_LLAMA_FAMILY = PrunableFamily(
    "model.layers", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "intermediate_size", "num_hidden_layers"
)
PRUNABLE_FAMILIES = {
    "phalanx.models:transformer": PrunableFamily(
        "blocks", ("ffn.gate", "ffn.up"), "ffn.down", "ffn_hidden_size", "layers"
    ),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA_FAMILY),
    "gpt2": PrunableFamily("transformer.h", ("mlp.c_fc",), "mlp.c_proj", "n_inner", "n_layer", by_rows=False),
}
"""Families by `model.build`, or by the `model_type` of config.json."""


@dataclass(frozen=True)
class PruningRequest:
    """What to keep: a share of the channels and a number of blocks (None: all)."""

    intermediate: float | None
    layers: int | None

    def __post_init__(self) -> None:
        if self.intermediate is None and self.layers is None:
            raise UsageError("nothing to prune: give --intermediate, --layers or both")
        if self.intermediate is not None and not 0 < self.intermediate < 1:
            raise UsageError(f"--intermediate: found {self.intermediate:g}, expected a share above 0 and below 1")


@dataclass(frozen=True)
class PruningPlan:
    """Which blocks are kept, the channels [width] of each of them, and what they have of the importance of all."""

    family: PrunableFamily
    layers: tuple[int, ...]
    channels: tuple[Tensor, ...]
    num_layers: int
    num_channels: int
    channel_importance: float
    layer_importance: float

    def describe_args(self) -> dict[str, int]:
        """Return the keys of the model's config that change."""
        return {self.family.width_key: len(self.channels[0]), self.family.depth_key: len(self.layers)}

    def edit_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the smaller model's config.json, of transformers or of a model of ours (`build` and `args`)."""
        if "build" in config:
            return {**config, "args": {**config["args"], **self.describe_args()}}
        kinds = config.get("layer_types")
        types = {"layer_types": [kinds[layer] for layer in self.layers]} if kinds else {}
        return {**config, **self.describe_args(), **types}

    def convert(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return what is kept of a tensor, by its name in the smaller model."""
        last_part = self.family.blocks.rpartition(".")[2]
        found = re.fullmatch(rf"((?:.*\.)?{last_part}\.)(\d+)\.(.+)", name)
        if found is None:
            return {name: tensor}
        if int(found[2]) not in self.layers:
            return {}
        index, (part, _, kind) = self.layers.index(int(found[2])), found[3].rpartition(".")
        if part in self.family.inputs:
            tensor = tensor.index_select(0 if self.family.by_rows else -1, self.channels[index])
        elif part == self.family.output and kind == "weight":
            tensor = tensor.index_select(1 if self.family.by_rows else 0, self.channels[index])
        return {f"{found[1]}{index}.{found[3]}": tensor}

    def mask_model(self, model: nn.Module) -> None:
        """Have the whole model compute what the smaller one does: channels that go are zero, blocks that go pass their
        input on."""
        for number, block in enumerate(model.get_submodule(self.family.blocks).children()):
            if number not in self.layers:
                block.register_forward_hook(
                    lambda _, args, output: args[0] if isinstance(output, Tensor) else (args[0], *output[1:])
                )
                continue
            mask = torch.zeros(self.num_channels).index_fill_(0, self.channels[self.layers.index(number)], 1.0)
            reader = block.get_submodule(self.family.output)
            reader.register_forward_pre_hook(lambda _, args, mask=mask: (args[0] * mask,))


def find_family(described: Mapping[str, Any]) -> PrunableFamily:
    """Return the family of the model that a checkpoint's metadata describe. Raises UsageError if it is of no known
    one."""
    kind = described.get("huggingface", {}).get("config", {}).get("model_type") or described.get("build")
    if kind not in PRUNABLE_FAMILIES:
        raise UsageError(f"{kind}: such a model cannot be pruned; it can be one of {', '.join(PRUNABLE_FAMILIES)}")
    return PRUNABLE_FAMILIES[kind]


@torch.no_grad()
def plan_pruning(
    model: nn.Module, family: PrunableFamily, request: PruningRequest, inputs: Iterable[Tensor]
) -> PruningPlan:
    """Choose what a model in evaluation mode keeps, by what it computes of tokens [b, s]. Raises UsageError if it has
    fewer blocks than are asked for, or none that could go."""
    blocks = list(model.get_submodule(family.blocks).children())
    if request.layers is not None and not 0 < request.layers < len(blocks):
        raise UsageError(f"--layers: found {request.layers}, expected 1 to {len(blocks) - 1}: there are {len(blocks)}")
    readers: list[Any] = [block.get_submodule(family.output) for block in blocks]
    norms = [reader.weight.float().norm(dim=0 if family.by_rows else 1) for reader in readers]
    squares, turns = torch.zeros(len(blocks), len(norms[0])), torch.zeros(len(blocks))

    def count_channels(number: int, _: nn.Module, args: Any) -> None:
        squares[number] += args[0].float().square().flatten(0, -2).sum(0)

    def count_turn(number: int, _: nn.Module, args: Any, output: Any) -> None:
        after = output if isinstance(output, Tensor) else output[0]
        turns[number] += torch.sum(1 - F.cosine_similarity(args[0].float(), after.float(), dim=-1))

    handles = [reader.register_forward_pre_hook(partial(count_channels, i)) for i, reader in enumerate(readers)]
    handles += [block.register_forward_hook(partial(count_turn, i)) for i, block in enumerate(blocks)]
    for tokens in inputs:
        model(tokens)
    for handle in handles:
        handle.remove()
    energies, width = squares * torch.stack(norms).square(), squares.shape[1]
    kept_width = max(1, int(width * (request.intermediate or 1)))
    layers = _take_largest(turns, request.layers or len(blocks))
    channels = tuple(_take_largest(energies[layer], kept_width) for layer in layers)
    kept = torch.stack([energies[layer][index].sum() for layer, index in zip(layers, channels, strict=True)]).sum()
    shares = float(kept / energies[layers].sum()), float(turns[layers].sum() / turns.sum())
    return PruningPlan(family, tuple(layers.tolist()), channels, len(blocks), width, *shares)


def _take_largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the largest values, in order; of equal ones the first."""
    return values.argsort(descending=True, stable=True)[:count].sort().values
