"""A base model in 8 or 4 bits: the layer computes with the dequantized weight, and only its codes are kept."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoints import save
from phalanx.data import DataInfo
from phalanx.errors import RecipeError
from phalanx.models import transformer
from phalanx.planner.finetune_memory import BYTES_PER_BASE_WEIGHT
from phalanx.recipe import Recipe, check_recipe
from phalanx.recipe.schema import AdapterConfig, ModelConfig, Parallelism
from phalanx.train.adapters.initial_values import init_from_weights
from phalanx.train.adapters.lora import adapter_scale, add_adapters, merge_adapters
from phalanx.train.adapters.quantized_base import (
    CODE_DTYPES,
    dequantize,
    dequantize_nf4,
    quantize,
    quantize_layer,
    quantize_nf4,
    read_weight,
)
from phalanx.train.adapters.targets import is_adapter_name
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.checkpoint.load_plan import open_hf_weights
from phalanx.train.distributed.mesh import make_single_worker_mesh
from phalanx.train.distributed.meta_device import allocate_meta_parameters
from phalanx.train.distributed.module_state import get_model_tensors
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.hf.safetensors_reader import open_weight_reader
from phalanx.train.model_builder import build_model, describe_model

SPEC = AdapterConfig(rank=4, base_dtype="int8")
CPU = torch.device("cpu")
NF4 = pytest.param(
    "nf4", marks=pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
)


def small(spec: AdapterConfig = SPEC) -> nn.Module:
    torch.manual_seed(0)
    model = transformer(vocab_size=64, seq_len=16, layers=2, hidden_size=80, num_heads=4)
    add_adapters(model, spec, torch.Generator().manual_seed(0))
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(2))


def test_an_element_is_wrong_by_at_most_half_a_code_of_its_block() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 100)
    weight[0, 70] = 1000.0
    codes, scale = quantize(weight)
    assert codes.dtype == torch.int8
    assert scale.shape == (5, 2)
    error = (dequantize(codes, scale) - weight).abs()
    assert (error[:, :64] <= 0.5001 * scale[:, :1]).all()
    assert error[0, :64].max() < 0.02  # the large element is in another block
    assert not dequantize(*quantize(torch.zeros(2, 64))).any()


@pytest.mark.parametrize("base_dtype", ["int8", NF4])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_forward_and_gradients_are_those_of_the_dequantized_layer(dtype: torch.dtype | None, base_dtype: str) -> None:
    torch.manual_seed(0)
    layer, plain = nn.Linear(100, 30), nn.Linear(100, 30)
    quantize_layer(layer, base_dtype)
    plain.load_state_dict({"weight": read_weight(layer), "bias": layer.bias})
    inputs = [torch.randn(2, 3, 100).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        outputs = [module(x) for module, x in zip((layer, plain), inputs, strict=True)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.float().square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert layer.weight.grad is None


def test_only_frozen_weights_of_the_blocks_are_quantized() -> None:
    model = small(AdapterConfig(rank=4, base_dtype="int8", modules_to_save=["query"]))
    kinds = {name: p.dtype for name, p in model.named_parameters() if name.endswith(".weight")}
    codes = {name.partition(".")[2].partition(".")[2] for name, dtype in kinds.items() if dtype == torch.int8}
    assert codes == {f"{name}.weight" for name in ("attention.key", "attention.value", "attention.out")} | {
        f"ffn.{name}.weight" for name in ("gate", "up", "down")
    }
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("base_dtype", ["int8", NF4])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merged_adapters_compute_the_same(kind: str, base_dtype: str) -> None:
    spec = AdapterConfig(rank=4, base_dtype=base_dtype, kind=kind)
    model = small(spec)
    init_from_weights([model], spec)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter_name(name):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    tensors = {name: t for name, t in model.state_dict().items() if not name.endswith("block_scale")}
    for name, layer in model.named_modules():
        if f"{name}.weight" in tensors:
            tensors[f"{name}.weight"] = read_weight(layer)
    merged = transformer(vocab_size=64, seq_len=16, layers=2, hidden_size=80, num_heads=4)
    merged.load_state_dict(merge_adapters(tensors, adapter_scale(spec)))
    torch.testing.assert_close(merged(tokens()), model(tokens()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base_dtype", ["int8", NF4])
def test_a_directory_is_quantized_as_it_is_read_and_exported_in_its_own_format(tmp_path: Path, base_dtype: str) -> None:
    adapter, code_dtype = SPEC.model_copy(update={"base_dtype": base_dtype}), CODE_DTYPES[base_dtype]
    tiny: Any = pytest.importorskip("tiny_huggingface")
    plain = tiny.save_random_model(tmp_path / "base", "gpt2")
    facts, spec = DataInfo("tokens", tiny.VOCAB, None, 32, None), ModelConfig(build="hf:base")
    model = build_model(spec, facts, tmp_path, 0, CPU, adapter, load=False)
    weights = open_hf_weights(tmp_path / "base", model)
    allocate_meta_parameters([model], CPU)
    base_bytes = sum(p.nbytes for name, p in model.named_parameters() if not is_adapter_name(name))
    assert base_bytes < 0.5 * sum(p.nbytes for p in plain.parameters())
    weights.fill_parameters(ParallelModel(make_single_worker_mesh(), (model,)))
    meta = {"model": describe_model(spec, facts, tmp_path), "recipe": {"adapter": adapter.model_dump()}}
    checkpoint = save(tmp_path / "run" / "checkpoints", 1, get_model_tensors(model), meta)
    reader = open_weight_reader(export_huggingface(checkpoint, tmp_path / "out"))
    for name, weight in plain.named_parameters():
        rounded = dequantize(*quantize(weight, code_dtype)) if ".c_" in name and name.endswith("weight") else weight
        assert torch.equal(reader.read(name), rounded), name


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_nf4_is_bitsandbytes_own_and_takes_half_a_byte_and_a_scale_for_64_numbers() -> None:
    import bitsandbytes.functional as peer

    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    codes, scale = quantize_nf4(weight)
    packed, state = peer.quantize_nf4(weight)
    assert torch.equal(dequantize_nf4(codes, scale), peer.dequantize_nf4(packed, state))
    assert codes.nbytes + scale.nbytes == BYTES_PER_BASE_WEIGHT["nf4"] * weight.numel()
    on_meta = quantize_nf4(weight.to("meta"))
    assert [(each.shape, each.dtype) for each in on_meta] == [(each.shape, each.dtype) for each in (codes, scale)]


def test_without_bitsandbytes_nf4_is_refused_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(RecipeError, match=r"base_dtype: nf4 needs bitsandbytes.*pip install 'phalanx\[bitsandbytes\]'"):
        small(AdapterConfig(rank=4, base_dtype="nf4"))


@pytest.mark.parametrize(
    ("adapter", "parallelism", "message"),
    [
        ({"base_dtype": "int8"}, {"shard": 2}, "adapter.base_dtype: int8 is for workers that hold the whole model"),
        ({"base_dtype": "nf4"}, {"shard": 2}, "adapter.base_dtype: nf4 is for workers that hold the whole model"),
        ({"base_dtype": "int8", "init": "pissa"}, {"replicate": 2}, "adapter.init: pissa changes the weights that"),
        ({"kind": "dora"}, {"tensor": 2}, "adapter.kind: dora needs whole weights, which parallelism.tensor cuts"),
        ({"init": "pissa"}, {"tensor": 2}, "adapter.init: pissa needs whole weights, which parallelism.tensor cuts"),
        ({"init": "pissa", "init_from": "x"}, {"replicate": 2}, "adapter.init: pissa is a start from the model's"),
    ],
)
def test_what_does_not_work_together_is_refused(
    tmp_path: Path, adapter: dict[str, str], parallelism: dict[str, int], message: str
) -> None:
    recipe = Recipe(adapter=AdapterConfig(**adapter), parallelism=Parallelism(**parallelism))
    with pytest.raises(RecipeError, match=message):
        check_recipe(recipe, tmp_path, 2)
