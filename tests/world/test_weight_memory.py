"""No worker ever holds a whole model of a Hugging Face directory, and one that goes on does not read it again."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from phalanx.recipe.schema import Parallelism
from phalanx.run import Run
from phalanx.run.event_types import NonFiniteStep
from train_harness import FAULTS_CALLBACK, HarnessRun, TrainHarness, Values

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("without_args_of_ours")

LAYOUTS: list[Values] = [{"shard": 2}, {"tensor": 2}, {"tensor": 2, "shard": 2}]
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8, "vocab_size": 384}
SLACK = 1 << 16  # bytes of a batch and of tables


@pytest.fixture(scope="module")
def model(lab: TrainHarness) -> nn.Module:
    """A model that is saved beside the lab's recipes, whose largest tensor is a small part of it."""
    transformers.logging.disable_progress_bar()
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    made: nn.Module = transformers.LlamaForCausalLM(config)
    made.save_pretrained(lab.folder / "memory")
    shutil.copy(Path(__file__).parents[1] / "helpers" / "peak_memory.py", lab.folder)
    return made


def train(lab: TrainHarness, layout: Values, run: Run | None = None, **more: Any) -> HarnessRun:
    changes: Values = {
        "model": {"build": "hf:memory"},
        "task": "peak_memory:CountingTask",
        "callbacks": [FAULTS_CALLBACK, "peak_memory:RecordPeak"],
    }
    changes |= {"steps": 1, "parallelism": layout, "evaluation": {"every": None}, "checkpoint": {"every": None}}
    changes |= more
    world_size = Parallelism(**layout).world
    ended = lab.train_reference(changes, world_size) if run is None else lab.train(changes, world_size, run)
    assert ended.code == 0, ended.message
    return ended


def peaks(ended: HarnessRun) -> list[int]:
    path = ended.run.path
    return [int(file.read_text()) for file in sorted(path.parent.glob(f"{path.name}.peak-*"))]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(LAYOUTS[0], id="shard 2"),
        pytest.param(LAYOUTS[1], id="tensor 2", marks=pytest.mark.slow),
        pytest.param(LAYOUTS[2], id="tensor 2 x shard 2", marks=pytest.mark.slow),
    ],
)
def test_a_worker_holds_its_part_and_no_more_than_one_tensor_beside_it(
    lab: TrainHarness, model: nn.Module, layout: Values
) -> None:
    sizes = [parameter.nbytes for parameter in model.parameters()]
    part = sum(sizes) / Parallelism(**layout).world
    found = peaks(train(lab, layout))
    assert len(found) == Parallelism(**layout).world
    for most in found:
        assert part < most < 1.02 * part + max(sizes) + SLACK


def test_who_goes_on_does_not_read_the_weights_again(lab: TrainHarness, model: nn.Module) -> None:
    run = lab.new_run()
    shutil.copytree(train(lab, {"shard": 2}).run.path, run.path)
    weights = lab.folder / "memory" / "model.safetensors"
    before = weights.read_bytes()
    tensors = {name: torch.full_like(tensor, float("nan")) for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    try:
        ended = train(lab, {"shard": 2}, run, steps=2)
    finally:
        weights.write_bytes(before)
    assert len(ended.losses) == 2
    assert not ended.events_of_kind(NonFiniteStep)  # a step with weights that are no numbers would be skipped
