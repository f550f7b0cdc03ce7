"""Training that rounds weights as an INT4 export does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import save
from phalanx.data import DataInfo
from phalanx.errors import UsageError
from phalanx.recipe.schema import ModelConfig
from phalanx.train.checkpoint.compressed_tensors import INT4_FORM, Int4AwareLinear, load_export, round_weight
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.hf.reload import compute_scores
from phalanx.train.model_builder import build_model, describe_model

tiny: Any = pytest.importorskip("tiny_huggingface")
transformers: Any = pytest.importorskip("transformers")

FACTS = DataInfo("tokens", tiny.VOCAB, None, 32, None)
SPEC = ModelConfig(build="hf:origin", quantization_aware="int4")
CPU = torch.device("cpu")


def save_origin(folder: Path, dtype: torch.dtype, kind: str = "llama") -> None:
    torch.manual_seed(0)
    sizes = {} if kind == "gpt2" else {"hidden_size": 128, "intermediate_size": 256}
    model = transformers.AutoModelForCausalLM.from_config(tiny.make_config(kind, **sizes))
    model.to(dtype).save_pretrained(folder / "origin")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forward_is_that_of_the_int4_export_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    save_origin(tmp_path, dtype)
    model = build_model(SPEC, FACTS, tmp_path, 0, CPU).eval()
    with torch.no_grad():  # training leaves weights that the dtype of the files cannot hold
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.add_(1e-3 * torch.randn_like(parameter))
    meta = {"model": describe_model(SPEC, FACTS, tmp_path)}
    checkpoint = save(tmp_path / "run" / "checkpoints", 1, dict(model.state_dict()), meta)
    out = export_huggingface(checkpoint, tmp_path / "out", form=INT4_FORM)
    inputs = tiny.random_tokens()
    aware, _ = compute_scores(model, inputs)
    assert torch.equal(aware, compute_scores(load_export(out, INT4_FORM), inputs)[0])
    for layer in (module for module in model.modules() if isinstance(module, Int4AwareLinear)):
        layer.rounds_weight = False
    assert not torch.equal(aware, compute_scores(model, inputs)[0])


def test_gradients_pass_the_rounding_unchanged() -> None:
    layer = Int4AwareLinear(128, 16)
    inputs = torch.randn(4, 128)
    layer(inputs).square().sum().backward()
    rounded = round_weight(layer.weight.detach(), torch.float32).requires_grad_()
    torch.nn.functional.linear(inputs, rounded, layer.bias).square().sum().backward()
    assert torch.equal(layer.weight.grad, rounded.grad)


def test_layers_that_the_export_leaves_are_not_rounded(tmp_path: Path) -> None:
    save_origin(tmp_path, torch.float32)
    model = build_model(SPEC, FACTS, tmp_path, 0, CPU)
    aware = {name for name, module in model.named_modules() if isinstance(module, Int4AwareLinear)}
    assert len(aware) == 7 * tiny.LAYERS
    assert "lm_head" not in aware


def test_a_model_that_has_no_int4_export_is_refused(tmp_path: Path) -> None:
    save_origin(tmp_path, torch.float32, "gpt2")
    with pytest.raises(UsageError, match=r"GPT2LMHeadModel has no nn.Linear.*model.quantization_aware: null"):
        build_model(SPEC, FACTS, tmp_path, 0, CPU)
