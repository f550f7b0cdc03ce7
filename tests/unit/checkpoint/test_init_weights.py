"""The weights that a run begins with: found by name, refused before anything is read, read into what a worker holds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoints import save
from phalanx.errors import DataError, RecipeError
from phalanx.recipe.schema import AdapterConfig
from phalanx.train.adapters.lora import add_adapters
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.checkpoint.format import list_checkpoints
from phalanx.train.checkpoint.load_plan import open_hf_weights, open_initial_weights
from phalanx.train.distributed.mesh import make_single_worker_mesh
from phalanx.train.distributed.meta_device import allocate_meta_parameters
from phalanx.train.distributed.module_state import get_model_tensors
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.train_state import TrainState
from phalanx.train.trainer import Trainer
from small_train import TinyLM, make_parts, tiny_lm

CPU = torch.device("cpu")
SPEC = AdapterConfig(rank=2, target_modules=["hidden", "head"])


def trained(folder: Path) -> nn.Module:
    """A model after a short run in `folder`."""
    parts = make_parts(folder)
    Trainer(parts, TrainState(), {}).fit()
    return parts.model


def saved(folder: Path, model: nn.Module) -> None:
    """A model in a checkpoint."""
    save(folder, 6, get_model_tensors(model))


def adapted(model: nn.Module) -> nn.Module:
    add_adapters(model, SPEC, torch.Generator().manual_seed(0))
    return model


def fill(model: nn.Module, where: str, folder: Path) -> None:
    open_initial_weights(where, folder, model).fill_parameters(ParallelModel(make_single_worker_mesh(), (model,)))


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(p.equal(q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/step-000000006"])
def test_weights_to_start_from_may_be_named_by_run_or_checkpoint(tmp_path: Path, where: str) -> None:
    first, model = trained(tmp_path), tiny_lm(seed=7)
    fill(model, where, tmp_path)
    assert same(model, first)


def test_they_may_be_an_export(tmp_path: Path) -> None:
    first, model = trained(tmp_path / "run"), tiny_lm(seed=7)
    export_huggingface(list_checkpoints(tmp_path / "run" / "checkpoints")[0], tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("{}")
    fill(model, "hf:out", tmp_path)
    assert same(model, first)


def test_they_are_converted_to_the_models_dtype(tmp_path: Path) -> None:
    first, model = trained(tmp_path), tiny_lm(seed=7).double()
    fill(model, "", tmp_path)
    assert same(model, first.double())


def test_a_new_adapter_keeps_its_values(tmp_path: Path) -> None:
    first, model = trained(tmp_path), adapted(tiny_lm(seed=7))
    before = model.get_parameter("hidden.lora_a").clone()
    fill(model, "", tmp_path)
    assert torch.equal(model.get_parameter("hidden.lora_a"), before)
    assert torch.equal(model.get_parameter("hidden.weight"), first.get_parameter("hidden.weight"))


def test_adapters_are_not_dropped_silently(tmp_path: Path) -> None:
    saved(tmp_path, adapted(tiny_lm()))
    with pytest.raises(
        DataError, match=r"init_from: .*step-000000006 was trained with adapters \(head.lora_a\), which this"
    ):
        open_initial_weights("", tmp_path, tiny_lm())
    open_initial_weights("", tmp_path, tiny_lm(), adapter_added_later=True)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(3, 3), "has no tensor 'weight', which the model needs"),
        (TinyLM(width=4), r"embedding.weight has shape \[11, 8\], the model's has \[11, 4\]"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, model: nn.Module, message: str) -> None:
    trained(tmp_path)
    with pytest.raises(DataError, match=message):
        open_initial_weights("", tmp_path, model)


def test_a_tensor_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    model = tiny_lm()
    model.gate = nn.Linear(2, 2, bias=False)
    saved(tmp_path, model)
    with pytest.raises(DataError, match=r"holds 1 tensors that the model does not have, such as gate\.weight"):
        open_initial_weights("", tmp_path, tiny_lm())


def test_a_directory_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="init_from: found 'hf:nowhere', expected hf:PATH"):
        open_initial_weights("hf:nowhere", tmp_path, tiny_lm())


def test_memory_comes_without_losing_ties_buffers_or_what_is_frozen() -> None:
    model: Any = nn.Module()
    model.a, model.b = nn.Linear(2, 3, device="meta"), nn.Linear(2, 3, device="meta")
    model.b.weight = model.a.weight
    model.a.bias.requires_grad_(False)
    model.real = nn.Parameter(torch.ones(2))
    model.register_buffer("table", torch.arange(3))
    allocate_meta_parameters([model], CPU)
    assert model.b.weight is model.a.weight
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["a.bias"]
    assert torch.equal(model.real, torch.ones(2))
    assert torch.equal(model.table, torch.arange(3))


def test_files_fill_a_model_that_was_built_without_memory(tmp_path: Path) -> None:
    tiny = pytest.importorskip("tiny_huggingface")
    from phalanx.train.hf import model as hf_model

    expected = tiny.save_random_model(tmp_path, "llama-tied")
    model = hf_model.build_on_meta(tmp_path, {})
    found = open_hf_weights(tmp_path, model)
    allocate_meta_parameters([model], CPU)
    found.fill_parameters(ParallelModel(make_single_worker_mesh(), (model,)))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(model.eval()(tiny.random_tokens()).logits, expected(tiny.random_tokens()).logits)
