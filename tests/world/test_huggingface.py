"""A Hugging Face directory fine-tuned, whole and with adapters, interrupted, and exported again for transformers."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.errors import ExitCode, PhalanxError, RecipeError
from phalanx.run import Run
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.checkpoint.format import list_checkpoints
from phalanx.train.hf.inputs import get_logits
from phalanx.train.inference import load_trained_model
from train_harness import HarnessRun, TrainHarness, Values, plan_fault

tiny: Any = pytest.importorskip("tiny_huggingface")
transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("without_args_of_ours")

LORA: Values = {"rank": 4}


def save(lab: TrainHarness, kind: str) -> str:
    """A model beside the lab's recipes whose vocabulary has room for bytes, and a tokenizer file with it."""
    folder = lab.folder / f"hf-{kind}"
    if not folder.is_dir():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(tiny.make_config(kind, vocab_size=256))
        model.save_pretrained(folder)
        (folder / "tokenizer_config.json").write_text("{}")
    return f"hf:{folder.name}"


def train(lab: TrainHarness, kind: str, changes: Values | None = None, **more: Any) -> HarnessRun:
    return lab.train({"model": {"build": save(lab, kind)}, "steps": 6, **(changes or {})}, **more)


def check_export(run: Run, out: Path) -> None:
    """transformers reads the export without complaint and computes what the trained model computes."""
    export_huggingface(list_checkpoints(run.checkpoints)[0], out)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(told.values())
    trained = load_trained_model(run, None, False, torch.device("cpu")).model
    tokens = tiny.random_tokens()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens).logits, get_logits(trained(tokens)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama-tied", {}),
        ("gpt2", {"adapter": LORA, "data": {"source": {"text": "*.txt"}, "document_masking": True}}),
    ],
    ids=["whole", "adapter"],
)
def test_fine_tuning_learns_survives_a_kill_bit_by_bit_and_is_exported(
    lab: TrainHarness, kind: str, changes: Values, tmp_path: Path
) -> None:
    clean = train(lab, kind, changes)
    killed = train(lab, kind, changes, faults=[plan_fault(5)])
    assert clean.losses[-1] < clean.losses[0]
    assert killed.result["num_restarts"] == 1
    assert killed.digest == clean.digest
    check_export(clean.run, tmp_path / "out")


def test_a_directory_that_lacks_tensors_is_refused_before_the_run_exists(lab: TrainHarness, tmp_path: Path) -> None:
    save(lab, "llama")
    broken = lab.folder / "hf-broken"
    shutil.copytree(lab.folder / "hf-llama", broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    run = lab.new_run()
    with pytest.raises(PhalanxError, match=r"LlamaForCausalLM needs 1 tensor \(lm_head.weight\), which the") as caught:
        lab.train({"model": {"build": "hf:hf-broken"}}, run=run)
    assert caught.value.code == ExitCode.DATA
    assert not run.path.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"build": "hf:nowhere"}},
            r"model.build: found 'hf:nowhere', expected hf:PATH of a Hugging Face dir",
        ),
        ({"model": {"build": "hf:samples"}}, r"model.build: .*samples has no config.json"),
    ],
)
def test_a_path_that_is_no_such_directory_is_an_error_of_the_recipe(
    lab: TrainHarness, changes: Values, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        lab.train(changes)
