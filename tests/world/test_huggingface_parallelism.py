"""Hugging Face models divided over processes: they train as on one, and what is exported is transformers' own model."""

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from phalanx.recipe.schema import Parallelism
from phalanx.run.event_types import EvaluationDone, StepDone
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.checkpoint.format import list_checkpoints
from phalanx.train.hf.inputs import get_logits
from phalanx.train.inference import load_trained_model
from train_harness import HarnessRun, TrainHarness, Values

tiny: Any = pytest.importorskip("tiny_huggingface")
transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("without_args_of_ours")

TOLERANCE = 1e-5
VOCAB = 257  # bytes, and one more: no number of ranks divides it
LAYOUTS: dict[str, Values] = {
    "shard 2": {"shard": 2},
    "tensor 2": {"tensor": 2},
    "tensor 2 x shard 2": {"tensor": 2, "shard": 2},
    "context 2": {"context": 2},
    "pipeline 2": {"pipeline": 2},
}


def save(lab: TrainHarness, kind: str) -> str:
    """A model of a kind beside the lab's recipes: grouped heads, norms of queries and keys, fused and tied matrices."""
    folder = lab.folder / f"layouts-{kind}"
    if not folder.is_dir():
        torch.manual_seed(0)
        options = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if kind == "gpt2" else {}
        config = tiny.make_config(kind, vocab_size=VOCAB, **options)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return f"hf:{folder.name}"


def recipe(lab: TrainHarness, kind: str, layout: Values | None = None, **more: Any) -> Values:
    changes: Values = {"model": {"build": save(lab, kind)}, "steps": 10, "evaluation": {"every": 10}, **more}
    changes |= {"checkpoint": {"every": None}, "batch": {"global_size": 8, "micro_size": 2}}
    return changes | ({} if layout is None else {"parallelism": layout})


def divided(lab: TrainHarness, kind: str, layout: Values, **more: Any) -> HarnessRun:
    return lab.train_reference(recipe(lab, kind, layout, **more), Parallelism(**layout).world)


def compare(found: HarnessRun, expected: HarnessRun) -> None:
    for key in ("loss", "grad_norm"):
        here, there = ([getattr(event, key) for event in run.events_of_kind(StepDone)] for run in (found, expected))
        assert len(here) == len(there) == 10, found.message
        torch.testing.assert_close(torch.tensor(here), torch.tensor(there), rtol=TOLERANCE, atol=0)
    scores = [run.events_of_kind(EvaluationDone)[-1].loss for run in (found, expected)]
    assert scores[0] == pytest.approx(scores[1], rel=TOLERANCE)


# Llama and GPT-2 under each parallelism are in the parity matrix.
CASES = [
    ("qwen3", "tensor 2"),
    *(pytest.param("qwen3", layout, marks=pytest.mark.slow) for layout in LAYOUTS if layout != "tensor 2"),
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_divided_model_trains_as_on_one_process(lab: TrainHarness, kind: str, name: str) -> None:
    compare(divided(lab, kind, LAYOUTS[name]), lab.train_reference(recipe(lab, kind)))


def test_the_auxiliary_loss_of_experts_is_that_of_one_process(lab: TrainHarness) -> None:
    args = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
    model = {"build": save(lab, "mixtral"), "args": args}
    compare(
        divided(lab, "mixtral", {"shard": 2}, model=model), lab.train_reference(recipe(lab, "mixtral", model=model))
    )


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param("gpt2", {"tensor": 2}, id="gpt2"),
        pytest.param("qwen3", {"tensor": 2, "shard": 2}, id="qwen3", marks=pytest.mark.slow),
    ],
)
def test_transformers_computes_the_same_with_an_export_of_a_divided_model(
    lab: TrainHarness, kind: str, layout: Values, tmp_path: Path
) -> None:
    run = divided(lab, kind, layout).run
    export_huggingface(list_checkpoints(run.checkpoints)[0], tmp_path / "out")
    model, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    trained = load_trained_model(run, None, False, torch.device("cpu")).model
    tokens = torch.randint(0, VOCAB, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens).logits, get_logits(trained(tokens)), rtol=0, atol=TOLERANCE)


def test_no_thread_runs_where_workers_are_forked_with_transformers_loaded(lab: TrainHarness) -> None:
    lab.train_reference(recipe(lab, "llama"))
    lab.fork_server.call(
        "phalanx.autoconfig.trials:measure_matmul_rate", {"device": "cpu", "threads": 1}
    )  # BLAS ends its threads before
    assert psutil.Process(lab.fork_server.process.pid).num_threads() == 1


ADAPTED = [
    ("llama", "shard 2"),
    pytest.param("llama", "tensor 2", marks=pytest.mark.slow),
    pytest.param("gpt2", "tensor 2", marks=pytest.mark.slow),
    pytest.param("llama", "context 2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "name"), [*ADAPTED, pytest.param("gpt2", "pipeline 2", marks=pytest.mark.slow)])
def test_adapters_of_a_divided_model_train_as_on_one_process(lab: TrainHarness, kind: str, name: str) -> None:
    adapter = {"adapter": {"rank": 4}}
    compare(divided(lab, kind, LAYOUTS[name], **adapter), lab.train_reference(recipe(lab, kind, **adapter)))


STARTED_FROM_WEIGHTS = {
    "kind": "dora",
    "init": "pissa",
    "rank": 4,
    "target_modules": ["embed_tokens", "q_proj", "down_proj"],
    "modules_to_save": ["norm"],
}


@pytest.mark.parametrize("name", ["shard 2", pytest.param("pipeline 2", marks=pytest.mark.slow)])
def test_adapters_that_start_from_divided_weights_train_as_on_one_process(lab: TrainHarness, name: str) -> None:
    adapter = {"adapter": STARTED_FROM_WEIGHTS}
    compare(divided(lab, "llama", LAYOUTS[name], **adapter), lab.train_reference(recipe(lab, "llama", **adapter)))
