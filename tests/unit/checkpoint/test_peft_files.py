"""Adapters in PEFT's format: what a reader of that format computes of them, and how they are read back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from checkpoints import save
from phalanx.data import DataInfo
from phalanx.errors import DataError
from phalanx.recipe.schema import AdapterConfig, ModelConfig
from phalanx.train.adapters.initial_values import init_from_weights
from phalanx.train.adapters.targets import is_adapter_name
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.checkpoint.peft_files import CONFIG_FILE, WEIGHTS_FILE, open_peft_adapter
from phalanx.train.distributed.mesh import make_single_worker_mesh
from phalanx.train.distributed.module_state import get_model_tensors
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.model_builder import build_model, describe_model

tiny: Any = pytest.importorskip("tiny_huggingface")
transformers: Any = pytest.importorskip("transformers")

FACTS = DataInfo("tokens", tiny.VOCAB, None, 32, None)
PREFIX = "base_model.model."


def build(folder: Path, spec: AdapterConfig, seed: int = 0) -> nn.Module:
    """Our model of `folder/base` with adapters."""
    model = build_model(ModelConfig(build="hf:base"), FACTS, folder, seed, torch.device("cpu"), spec)
    init_from_weights([model], spec)
    return model.eval()


def write(folder: Path, architecture: str, **values: Any) -> tuple[nn.Module, AdapterConfig]:
    """A model with an adapter that does something, and `folder/peft`, its export."""
    if architecture in tiny.MODEL_KINDS:
        tiny.save_random_model(folder / "base", architecture)
    else:
        tiny.build_random_model(architecture).save_pretrained(folder / "base")
    spec = AdapterConfig(**{"rank": 4, "alpha": 8, **values})
    model = build(folder, spec)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    described = describe_model(ModelConfig(build="hf:base"), FACTS, folder)
    meta = {"model": described, "recipe": {"adapter": spec.model_dump()}}
    checkpoint = save(folder / "run" / "checkpoints", 1, get_model_tensors(model), meta)
    export_huggingface(checkpoint, folder / "peft", form="peft")
    return model, spec


def apply_as_peft(model: Any, folder: Path) -> nn.Module:
    """Change the weights of a model of transformers as PEFT computes with them, by the names in its files."""
    config, tensors = json.loads((folder / CONFIG_FILE).read_text()), load_file(folder / WEIGHTS_FILE)
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    for name in config["target_modules"]:
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Embedding):
            delta = (tensors.pop(f"{name}.lora_embedding_B") @ tensors.pop(f"{name}.lora_embedding_A")).T
        else:
            delta = tensors.pop(f"{name}.lora_B.weight") @ tensors.pop(f"{name}.lora_A.weight")
            delta = delta.T if config["fan_in_fan_out"] else delta
        adapted = layer.weight.data + scale * delta
        if config["use_dora"]:
            dim = 0 if isinstance(layer, nn.Embedding) or config["fan_in_fan_out"] else 1
            magnitude = tensors.pop(f"{name}.lora_magnitude_vector").unsqueeze(dim)
            adapted = magnitude * adapted / adapted.norm(dim=dim, keepdim=True)
        layer.weight = nn.Parameter(adapted)
    for name, tensor in tensors.items():  # modules_to_save
        model.get_parameter(name).data = tensor
    return model.eval()


@pytest.mark.parametrize(
    ("architecture", "spec"),
    [
        ("llama", {"kind": "rslora", "modules_to_save": ["lm_head", "norm"]}),
        ("gpt2", {"kind": "dora"}),
        ("llama-tied", {"kind": "dora", "target_modules": ["embed_tokens", "q_proj"]}),
    ],
)
def test_a_reader_of_the_format_computes_the_same(tmp_path: Path, architecture: str, spec: dict[str, Any]) -> None:
    model, _ = write(tmp_path, architecture, **spec)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        expected = apply_as_peft(base, tmp_path / "peft")(tiny.random_tokens()).logits
        torch.testing.assert_close(model(tiny.random_tokens()).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama-tied"])
def test_it_is_read_back_as_it_was(tmp_path: Path, kind: str) -> None:
    names = ["c_attn", "wte"] if kind == "gpt2" else ["embed_tokens", "up_proj"]
    model, spec = write(tmp_path, kind, kind="dora", target_modules=names, modules_to_save=["ln_f"][: kind == "gpt2"])
    again = build(tmp_path, spec, seed=7)
    adapter = open_peft_adapter("peft", tmp_path, again, spec)
    adapter.fill_parameters(ParallelModel(make_single_worker_mesh(), (again,)))
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in again.named_parameters())


def test_stacks_of_experts_are_read_back_as_they_were(tmp_path: Path) -> None:
    model, spec = write(tmp_path, "mixtral")
    again = build(tmp_path, spec, seed=7)
    adapter = open_peft_adapter("peft", tmp_path, again, spec)
    adapter.fill_parameters(ParallelModel(make_single_worker_mesh(), (again,)))
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in again.named_parameters())
    assert any("experts.base_layer.lora_A" in name for name in adapter.source.names)


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"rank": 8}, {}, "has rank 4, and the recipe 8; give adapter.rank=4"),
        ({"kind": "dora"}, {}, "has kind lora, and the recipe dora"),
        ({"target_modules": ["q_proj"]}, {}, "has in addition base_model.model.model.layers.0.self_attn.v_proj"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, {}, "lacks base_model.model.model.layers.0.self_attn.o_"),
        ({}, {"peft_type": "IA3"}, "is of PEFT's type 'IA3'; expected LORA"),
        ({}, {"init_lora_weights": "pissa_niter_4"}, "was initialized with pissa_niter_4, which changes the base"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    _, spec = write(tmp_path, "llama", target_modules=["q_proj", "v_proj"])
    file = tmp_path / "peft" / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    spec = spec.model_copy(update=change)
    with pytest.raises(DataError, match=rf"^adapter.init_from: .*peft {message}"):
        open_peft_adapter("peft", tmp_path, build(tmp_path, spec), spec)


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    _, spec = write(tmp_path, "llama", target_modules=["q_proj"])
    file = tmp_path / "peft" / WEIGHTS_FILE
    save_file({n: t[:, :16].clone() if "lora_A" in n else t for n, t in load_file(file).items()}, file)
    with pytest.raises(DataError, match=r"another base model: .*lora_A.weight has shape \[4, 16\], expected \[4, 32\]"):
        open_peft_adapter("peft", tmp_path, build(tmp_path, spec), spec)


@pytest.mark.parametrize(("adapter", "message"), [(None, "trained without `adapter`"), ({"init": "pissa"}, "pissa")])
def test_without_an_adapter_that_means_something_alone_there_is_none_to_export(
    tmp_path: Path, adapter: dict[str, str] | None, message: str
) -> None:
    tiny.save_random_model(tmp_path / "base", "llama")
    model = build_model(ModelConfig(build="hf:base"), FACTS, tmp_path, 0, torch.device("cpu"))
    described = describe_model(ModelConfig(build="hf:base"), FACTS, tmp_path)
    meta = {"model": described, "recipe": {"adapter": adapter}}
    checkpoint = save(tmp_path / "run" / "checkpoints", 1, get_model_tensors(model), meta)
    with pytest.raises(DataError, match=f"{message}.* --form safetensors"):
        export_huggingface(checkpoint, tmp_path / "out", form="peft")
    assert not (tmp_path / "out").exists()


def test_only_the_adapter_and_what_is_trained_in_full_is_written(tmp_path: Path) -> None:
    model, _ = write(tmp_path, "llama", modules_to_save=["norm"])
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(load_file(tmp_path / "peft" / WEIGHTS_FILE)) == len(trained) > sum(map(is_adapter_name, trained))
