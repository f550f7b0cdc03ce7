"""Families of transformers: read as transformers reads them, whole and in parts, packed, exported, and read again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from checkpoints import save
from phalanx.autoconfig.causality_check import check_document_masking
from phalanx.data import DataInfo
from phalanx.errors import DataError, RecipeError
from phalanx.recipe.schema import ModelConfig
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.distributed.module_state import get_model_tensors
from phalanx.train.hf import model as hf_model
from phalanx.train.hf.inputs import get_logits
from phalanx.train.model_builder import describe_model
from phalanx.train.tasks import LanguageModeling
from tiny_huggingface import ARCHITECTURES, VOCAB, build_random_model, random_tokens, transformers

pytest.importorskip("transformers.conversion_mapping", reason="names are converted from transformers 5 on")

CPU = torch.device("cpu")
FACTS = DataInfo("tokens", VOCAB, None, 16, None)
NEVER_SEPARATE = {
    "bloom": "fails where it is to keep documents separate",
    "jamba": "layers of",
    "mamba": "layers of",
    "minimax": "layers of",
}
"""Architectures whose documents no mask keeps separate, and what the error says."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("architectures")


@pytest.fixture(params=sorted(ARCHITECTURES))
def origin(request: pytest.FixtureRequest, folders: Path) -> Path:
    """The directory of an architecture, as transformers writes it."""
    directory = folders / str(request.param)
    if not directory.exists():
        build_random_model(request.param).save_pretrained(directory)
    return directory


def reference(directory: Path) -> nn.Module:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values())
    made: nn.Module = model.eval()
    return made


def loaded(directory: Path) -> nn.Module:
    return hf_model.build_with_weights(directory, {}, None, CPU).eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return get_logits(model(random_tokens()))


def test_an_architecture_is_read_in_parts(origin: Path) -> None:
    model = hf_model.build_on_meta(origin, {})
    source = hf_model.open_source(model, origin)
    expected = reference(origin).state_dict()
    for name, (held, *_) in hf_model.match_tensor_names(model, source).items():
        whole = expected[name]
        if whole.dim() and whole.shape[0] > 1:
            offset, extent = [whole.shape[0] // 2] + [0] * (whole.dim() - 1), [1, *whole.shape[1:]]
            part = whole[offset[0] : offset[0] + 1]
            assert torch.equal(source.read(held, offset, extent).to(part.dtype), part), name


def test_an_architecture_is_read_as_transformers_reads_it_exported_as_it_came_and_read_again(
    origin: Path, tmp_path: Path
) -> None:
    model, theirs = loaded(origin), reference(origin)
    assert model.state_dict().keys() == theirs.state_dict().keys()
    torch.testing.assert_close(logits(model), logits(theirs), rtol=0, atol=1e-5)
    meta = {"model": describe_model(ModelConfig(build=f"hf:{origin.name}", args={}), FACTS, origin.parent)}
    checkpoint = save(tmp_path / "run" / "checkpoints", 1, get_model_tensors(model), meta)
    out = export_huggingface(checkpoint, tmp_path / "out", file_bytes=20_000)
    listed = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    before = load_file(origin / "model.safetensors")
    assert listed.keys() == before.keys()
    after = {name: tensor for file in set(listed.values()) for name, tensor in load_file(out / file).items()}
    assert all(torch.equal(after[name].to(tensor.dtype), tensor) for name, tensor in before.items())
    torch.testing.assert_close(logits(reference(out)), logits(model), rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(loaded(out)), logits(model), rtol=0, atol=1e-5)


def test_an_architecture_keeps_documents_separate_or_is_refused(origin: Path) -> None:
    model = loaded(origin)
    sample = random_tokens(1, 16)
    batch = {"tokens": sample, "documents": torch.zeros(1, 16, dtype=torch.int32)}
    if origin.name in NEVER_SEPARATE:
        with pytest.raises(RecipeError, match=f"data.document_masking: .*{NEVER_SEPARATE[origin.name]}"):
            check_document_masking(model, LanguageModeling(), batch)
        return
    check_document_masking(model, LanguageModeling(), batch)
    with torch.no_grad():
        one, none = get_logits(model(sample, documents=batch["documents"])), get_logits(model(sample))
    torch.testing.assert_close(one, none, rtol=0, atol=1e-5)


# --- what does not fit ------------------------------------------------------------------------------------------------


def rewrite(directory: Path, out: Path, change: Any) -> Path:
    shutil.copytree(directory, out)
    save_file(change(load_file(out / "model.safetensors")), out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_an_expert_that_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    build_random_model("mixtral").save_pretrained(tmp_path / "origin")
    names = sorted(load_file(tmp_path / "origin" / "model.safetensors"))
    expert = next(name for name in names if ".experts.3.w1." in name)

    def without(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name != expert}

    def wider(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, expert: torch.zeros(7, 7)}

    for number, change in enumerate((without, wider)):
        with pytest.raises(DataError, match=r"model\.layers\.0\.mlp\.experts\.gate_up_proj"):
            loaded(rewrite(tmp_path / "origin", tmp_path / str(number), change))


def test_code_of_a_directory_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('this ran')\n")
    maps = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": maps, "architectures": ["Own"]}))
    with pytest.raises(RecipeError, match="auto_map names code of the directory's own, which is never run"):
        hf_model.build_on_meta(tmp_path, {})
