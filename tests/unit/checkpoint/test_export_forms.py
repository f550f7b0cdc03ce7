"""Quantized forms of an export: what is stored, and that compressed-tensors reads it as it was meant."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import save
from phalanx.data import DataInfo
from phalanx.errors import UsageError
from phalanx.recipe.schema import ModelConfig
from phalanx.train.checkpoint import compressed_tensors
from phalanx.train.checkpoint.compressed_tensors import QUANTIZED_FORMS, choose_layers, load_export
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.hf.reload import compute_scores
from phalanx.train.model_builder import build_model, describe_model

tiny: Any = pytest.importorskip("tiny_huggingface")
transformers: Any = pytest.importorskip("transformers")

FACTS = DataInfo("tokens", tiny.VOCAB, None, 32, None)


def random_weight(outputs: int = 48, inputs: int = 256, seed: int = 0) -> torch.Tensor:
    """A weight with heavy tails, as those of trained models."""
    generator = torch.Generator().manual_seed(seed)
    return 0.02 * torch.empty(outputs, inputs).normal_(generator=generator).pow_(3)


def test_the_scale_with_the_least_squared_error_is_taken() -> None:
    groups = random_weight().unflatten(1, (-1, compressed_tensors.GROUP_SIZE))
    largest = groups.abs().amax(-1, keepdim=True) / compressed_tensors.MAX_CODE

    def error(scale: torch.Tensor) -> torch.Tensor:
        return ((groups / scale).round().clamp(-8, 7) * scale - groups).square().sum(-1, keepdim=True)

    chosen = error(compressed_tensors.choose_scales(groups, torch.float32))
    assert all(bool((chosen <= error(largest * ratio)).all()) for ratio in compressed_tensors.CLIP_RATIOS)
    assert chosen.sum() < 0.9 * error(largest).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_a_weight_comes_back_within_half_a_step(name: str, dtype: torch.dtype) -> None:
    form, weight = QUANTIZED_FORMS[name], random_weight()
    weight[3] = 0  # a pruned output
    weight[5] *= 1e-6
    stored = form.quantize(weight, dtype)
    assert stored.keys() == set(form.suffixes)
    assert stored["weight_scale"].dtype == dtype
    back = form.dequantize(stored)
    assert back.isfinite().all()
    assert not back[3].any()
    if name == "fp8":  # 3 bits behind the point, and a scale that may have been rounded down
        assert ((back - weight).abs() <= weight.abs() / 15 + stored["weight_scale"].float() / 512).all()
    else:
        clipped = weight.unflatten(1, (-1, 128)).abs() > 7 * stored["weight_scale"].float().unsqueeze(-1)
        steps = (back - weight).unflatten(1, (-1, 128)).abs() / stored["weight_scale"].float().unsqueeze(-1)
        assert (steps[~clipped] <= 0.5001).all()


def test_inputs_are_rounded_by_token() -> None:
    inputs = torch.tensor([[448.0, 1.06, -3.3], [1000.0, 1.0, 0.0]])[None]
    rounded = compressed_tensors.round_inputs(inputs)
    torch.testing.assert_close(rounded[0, 0], torch.tensor([448.0, 1.0, -3.25]))
    torch.testing.assert_close(rounded[0, 1], torch.tensor([1000.0, 1.0, 0.0]), rtol=1 / 15, atol=0)


def export_quantized(folder: Path, name: str, kind: str = "llama", **values: Any) -> tuple[torch.nn.Module, Path]:
    """A random model of a kind and its export."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, **values}
    config = tiny.make_config(kind, **sizes) if kind != "gpt2" else tiny.make_config(kind)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "origin")
    spec = ModelConfig(build="hf:origin")
    model = build_model(spec, FACTS, folder, 0, torch.device("cpu")).eval()
    meta = {"model": describe_model(spec, FACTS, folder)}
    checkpoint = save(folder / "run" / "checkpoints", 1, dict(model.state_dict()), meta)
    return model, export_huggingface(checkpoint, folder / "out", form=QUANTIZED_FORMS[name], dtype="bf16")


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_linear_layers_of_blocks_are_quantized_and_the_rest_is_not(tmp_path: Path, name: str, kind: str) -> None:
    model, out = export_quantized(tmp_path, name, kind)
    tensors = load_file(out / "model.safetensors")
    quantized = {key.removesuffix(".weight_scale") for key in tensors if key.endswith("_scale")}
    linear = {key for key, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert quantized == linear - {"lm_head"}
    plain = {key: tensor.dtype for key, tensor in tensors.items() if key.rpartition(".")[0] not in quantized}
    assert set(plain.values()) == {torch.bfloat16}
    assert "model.embed_tokens.weight" in plain
    assert transformers.AutoConfig.from_pretrained(out).to_dict()["quantization_config"]["ignore"] == ["lm_head"]


@pytest.mark.parametrize(("name", "limit"), [("fp8", 0.1), ("int4", 0.3)])
def test_our_reader_computes_nearly_what_the_model_does(tmp_path: Path, name: str, limit: float) -> None:
    model, out = export_quantized(tmp_path, name)
    inputs = tiny.random_tokens()
    expected, _ = compute_scores(model, inputs)
    again, _ = compute_scores(load_export(out, QUANTIZED_FORMS[name]), inputs)
    relative = float((again - expected).norm() / expected.norm())
    assert 1e-4 < relative < limit  # quantized, and not badly


def test_a_layer_that_groups_do_not_divide_is_not_quantized(tmp_path: Path) -> None:
    _, out = export_quantized(tmp_path, "int4", intermediate_size=192)
    config = transformers.AutoConfig.from_pretrained(out).to_dict()["quantization_config"]
    assert {name.rpartition(".")[2] for name in config["ignore"]} == {"down_proj", "lm_head"}


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("gpt2", {}, "GPT2LMHeadModel has no nn.Linear .*in its blocks, so it cannot be quantized; use --form safe"),
        ("llama", {"hidden_size": 32, "intermediate_size": 48}, "with a multiple of 128 inputs"),
    ],
)
def test_a_model_that_the_form_does_not_fit_is_refused(
    tmp_path: Path, kind: str, values: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        export_quantized(tmp_path, "int4", kind, **values)
    assert not (tmp_path / "out").exists()


def test_fused_experts_are_refused() -> None:
    with pytest.raises(UsageError, match="MixtralForCausalLM has fused experts"):
        choose_layers(QUANTIZED_FORMS["fp8"], tiny.build_random_model("mixtral"))


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_compressed_tensors_decompresses_what_was_meant(tmp_path: Path, name: str) -> None:
    compressed_tensors: Any = pytest.importorskip(
        "compressed_tensors", reason="compressed-tensors is not installed: what it reads is not compared with ours"
    )
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    assert compressed_tensors
    form = QUANTIZED_FORMS[name]
    config = QuantizationConfig.model_validate(form.describe(["lm_head"]))
    scheme = config.config_groups["group_0"]
    stored = form.quantize(random_weight(), torch.float32)
    back = BaseCompressor.get_value_from_registry(config.format).decompress(dict(stored), scheme)["weight"]
    assert torch.equal(back, form.dequantize(stored))
