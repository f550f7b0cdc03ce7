"""Random numbers of noise layers, a model's own attention and adapters under every parallelism: the losses and gradient
norms of one process, as without. Dropout of usual models is in the parity matrix."""

from pathlib import Path
from typing import Any

import pytest
import torch

import noisy_models
from phalanx.errors import ExitCode
from phalanx.recipe.schema import Parallelism
from phalanx.run.event_types import StepDone
from train_harness import HarnessRun, TrainHarness, Values

TOLERANCE = 1e-5
STEPS = 10
TRAINING: Values = {
    "steps": STEPS,
    "batch": {"global_size": 8, "micro_size": 2},
    "checkpoint": {"every": None},
    "evaluation": {"every": None},
    "callbacks": [],
    "optimizer": {"lr": 1e-3, "schedule": {"warmup_steps": 5}},
}
SIZES = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "layers": 2}


pytestmark = pytest.mark.usefixtures("without_args_of_ours")


@pytest.fixture(autouse=True)
def models(lab: TrainHarness) -> None:
    """The models of this file."""
    source = Path(noisy_models.__file__).read_text(encoding="utf-8")
    (lab.folder / "noisy_models.py").write_text(source, encoding="utf-8")


def noisy(**args: Any) -> Values:
    return {"model": {"build": "noisy_models:noisy", "args": args, "tp_plan": noisy_models.PLAN}}


def gpt2(lab: TrainHarness) -> Values:
    tiny: Any = pytest.importorskip("tiny_huggingface")
    transformers: Any = pytest.importorskip("transformers")
    folder = lab.folder / "dropout-gpt2"
    if not folder.is_dir():
        torch.manual_seed(0)
        config = tiny.make_config("gpt2", vocab_size=257)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return {"model": {"build": f"hf:{folder.name}"}}


def changes_of(lab: TrainHarness, case: str) -> Values:
    full: Values = {"memory": {"activation_checkpointing": "full"}}
    match case:
        case "adapters":
            own = {"model": {"args": SIZES}, "adapter": {"rank": 4, "dropout": 0.2}}
        case "noisy":
            own = {**noisy(), **full}
        case "own attention":
            own = noisy(own_attention=True)
        case _:
            own = {**gpt2(lab), "adapter": {"rank": 4, "dropout": 0.2}}
    return {**TRAINING, **own}


def numbers(run: HarnessRun) -> torch.Tensor:
    assert run.code == ExitCode.DONE, run.message
    return torch.tensor([[event.loss, event.grad_norm] for event in run.events_of_kind(StepDone)], dtype=torch.float64)


TENSOR, CONTEXT, PIPELINE = {"tensor": 2}, {"context": 2}, {"pipeline": 2}
PAIR = {"tensor": 2, "context": 2}
OFTEN: list[tuple[str, Values]] = [("noisy", TENSOR), ("noisy", CONTEXT), ("noisy", PIPELINE), ("adapters", TENSOR)]
REST: list[tuple[str, Values]] = [
    *[("noisy", layout) for layout in ({"shard": 2}, PAIR, {"context": 2, "pipeline": 2})],
    ("own attention", TENSOR),
    *[("adapters", layout) for layout in (CONTEXT, PIPELINE, {"shard": 2})],
    ("gpt2 adapters", PAIR),
]


def cell(case: str, layout: Values, marks: Any = ()) -> Any:
    return pytest.param(case, layout, id=f"{case}-{' '.join(f'{k} {v}' for k, v in layout.items())}", marks=marks)


@pytest.mark.parametrize(
    ("case", "layout"), [cell(*one) for one in OFTEN] + [cell(*one, marks=pytest.mark.slow) for one in REST]
)
def test_random_numbers_are_those_of_one_process(lab: TrainHarness, case: str, layout: Values) -> None:
    changes = changes_of(lab, case)
    alone = numbers(lab.train_reference(changes))
    divided = numbers(lab.train({**changes, "parallelism": layout}, Parallelism(**layout).world))
    assert len(divided) == STEPS
    torch.testing.assert_close(divided, alone, rtol=TOLERANCE, atol=0)
