"""Trials before a run, in this process: what a model needs for a sample, how long it takes, what can be imported."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.autoconfig import timing_trial
from phalanx.autoconfig.profile_trial import profile_model, profile_model_meta
from phalanx.autoconfig.resolve import check_forward
from phalanx.autoconfig.timing_trial import time_precisions
from phalanx.autoconfig.trial_names import OTHER_LOAD_KEY
from phalanx.autoconfig.trials import check_imports
from phalanx.compat import set_deterministic
from phalanx.errors import RecipeError
from phalanx.recipe import Recipe
from phalanx.recipe.grad_sync_defaults import NONDETERMINISTIC_OP_KEY
from small_data import prepare

SEQUENCE, WIDTH = 16, 24
MODEL = f"""
from torch import nn

def make(vocab_size):
    return nn.Sequential(nn.Embedding(vocab_size, {WIDTH}), nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, vocab_size))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe's folder with a model and prepared data."""
    folder = tmp_path_factory.mktemp("trial")
    (folder / "own_trial_model.py").write_text(MODEL)
    (folder / "a.txt").write_text("0123456789abcdef" * 200)
    prepare(folder, folder / "data", {"text": "*.txt"})
    return folder


def payload(folder: Path, **more: Any) -> dict[str, Any]:
    recipe = {
        "model": {"build": "own_trial_model:make"},
        "data": {"source": {"prepared": str(folder / "data")}, "seq_len": SEQUENCE},
    }
    return {
        "recipe": Recipe.model_validate(recipe).model_dump(mode="json"),
        "folder": str(folder),
        "threads": 1,
        **more,
    }


def test_a_profile_counts_parameters_and_flops_by_its_rule(folder: Path) -> None:
    found = profile_model(payload(folder))
    assert found["trainable_parameters"] == 256 * WIDTH + WIDTH * (WIDTH + 1) + 256 * (WIDTH + 1)
    assert found["flops_per_sample"] == 3 * 2 * SEQUENCE * (WIDTH * WIDTH + WIDTH * 256)
    assert (found["unit"], found["units_per_sample"]) == ("tokens", SEQUENCE)
    assert "x 3 for forward and backward" in found["flops_rule"]


def test_a_profile_tells_what_a_sample_takes_at_the_peak_without_the_weights(folder: Path) -> None:
    hidden, logits = 4 * WIDTH, 4 * 256
    least = SEQUENCE * (2 * hidden + 2 * logits)  # scores and their gradient, say
    assert least <= profile_model(payload(folder))["peaks"]["whole"]["none"] <= 2 * least


CHANGING = """
import torch
from torch import nn

class Bounded(nn.Module):
    def __init__(self, vocab_size, how):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 8)
        self.how = how

    def forward(self, tokens):
        if self.how == "data":
            self.embedding.weight.data.clamp_(-0.5, 0.5)
        if self.how == "counted":
            with torch.no_grad():
                self.embedding.weight.copy_(self.embedding.weight.roll(1, 0))
        return self.embedding(tokens) @ self.embedding.weight.T
"""


@pytest.mark.parametrize(
    ("how", "expected"), [("data", ["embedding.weight"]), ("counted", ["embedding.weight"]), ("", [])]
)
def test_parameters_that_a_forward_changes_are_found_and_refused_where_they_are_sharded(
    folder: Path, how: str, expected: list[str]
) -> None:
    (folder / "own_changing_model.py").write_text(CHANGING)
    asked = payload(folder)
    asked["recipe"]["model"] = {"build": "own_changing_model:Bounded", "args": {"how": how}}
    found = profile_model(asked)
    assert found["parameters_changed_by_forward"] == expected
    for layout in ({"replicate": 2}, {"replicate": 2, "shard": 2}, {"context": 2}):
        given = Recipe.model_validate({"parallelism": layout})
        if not expected or layout == {"replicate": 2}:
            check_forward(given, found)
        else:
            with pytest.raises(
                RecipeError, match=r"parallelism.shard: forwards of the model change parameter 'embedding"
            ):
                check_forward(given, found)


GROWING = """
import torch
from torch import nn

class Growing(nn.Module):
    def __init__(self, vocab_size, how):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 8)
        self.how = how

    def forward(self, tokens):
        if self.how.startswith("buffer") and not hasattr(self, "seen"):
            self.register_buffer("seen", torch.ones(1), persistent=self.how == "buffer")
        if self.how == "parameter" and not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(1))
        return self.embedding(tokens) @ self.embedding.weight.T
"""


@pytest.mark.parametrize("how", ["buffer", "parameter", "buffer that is not saved"])
def test_what_a_model_registers_in_its_first_forward_is_refused_before_a_run(folder: Path, how: str) -> None:
    (folder / "own_growing_model.py").write_text(GROWING)
    asked = payload(folder)
    asked["recipe"]["model"] = {"build": "own_growing_model:Growing", "args": {"how": how}}
    if how == "buffer that is not saved":
        assert profile_model(asked)["trainable_parameters"] == 256 * 8
        return
    name = "seen" if how == "buffer" else "scale"
    with pytest.raises(
        RecipeError, match=f"^a trial forward of the model: {how} {name} came after the model was built"
    ):
        profile_model(asked)


def shipped(folder: Path, **model: Any) -> dict[str, Any]:
    """A payload with the shipped transformer."""
    given = payload(folder, losses=["whole", "chunked"])
    given["recipe"]["model"] = Recipe.model_validate({"model": model}).model.model_dump(mode="json")
    return given


def test_a_model_of_more_bytes_than_the_machine_has_is_refused_before_it_is_built(folder: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"model.args: phalanx.models:transformer has .* parameters with them, .* GiB"
    ):
        profile_model(shipped(folder, args={"layers": 2, "hidden_size": 1 << 20, "num_heads": 1 << 13}))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_imagined_is_what_a_profile_finds(folder: Path, precision: str) -> None:
    given = shipped(folder, args={"layers": 2, "hidden_size": 64, "num_heads": 2}) | {"precision": precision}
    assert profile_model_meta(given) == profile_model(given)


def test_a_small_model_is_left_to_the_trial_with_values(folder: Path) -> None:
    given = shipped(folder, args={"layers": 2, "hidden_size": 64, "num_heads": 2})
    num_parameters = profile_model_meta(given)["trainable_parameters"]
    assert profile_model_meta(given | {"num_small": num_parameters}) == {}
    assert profile_model_meta(given | {"num_small": num_parameters - 1}) != {}


def test_a_hugging_face_model_is_imagined_without_its_weights(tmp_path: Path, folder: Path) -> None:
    tiny = pytest.importorskip("tiny_huggingface")
    tiny.save_random_model(tmp_path / "llama", "llama")
    given = shipped(folder, build=f"hf:{tmp_path / 'llama'}", args={"vocab_size": 256})
    (tmp_path / "llama" / "model.safetensors").unlink()
    found = profile_model_meta(given)
    assert found["trainable_parameters"] == sum(
        p.numel()
        for p in tiny.transformers.AutoModelForCausalLM.from_config(
            tiny.make_config("llama", vocab_size=256)
        ).parameters()
    )
    assert found["peaks"]["whole"]["full"] < found["peaks"]["whole"]["none"]


def test_nothing_is_allocated_for_a_model_that_is_imagined(folder: Path) -> None:
    """Its 26 billion parameters would take 100 GB."""
    found = profile_model_meta(shipped(folder, args={"layers": 2, "hidden_size": 32768, "num_heads": 64}))
    assert found["trainable_parameters"] > 25e9
    assert found["flops_per_sample"] > 6 * SEQUENCE * 25e9
    assert found["peaks"]["whole"]["full"] < found["peaks"]["whole"]["none"]


def test_a_model_that_asks_for_values_cannot_be_imagined(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "own_trial_values.py").write_text(
        "from torch import nn\n"
        "class Asks(nn.Embedding):\n"
        "    def forward(self, tokens):\n"
        "        return super().forward(tokens % (2 + int(tokens.max())))\n"
        "def make(vocab_size): return Asks(vocab_size, vocab_size)\n"
    )
    given = payload(folder)
    given["recipe"]["model"]["build"], given["folder"] = "own_trial_values:make", str(tmp_path)
    assert profile_model_meta(given) == {}
    assert profile_model(given)["trainable_parameters"] == 256 * 256


def test_a_race_times_each_precision_and_the_update(folder: Path) -> None:
    seconds = time_precisions(payload(folder, threads=1, micro=2, precisions=["fp32", "bf16"]))
    assert seconds.pop(OTHER_LOAD_KEY) >= 0
    assert set(seconds) == {"fp32", "bf16", "update"}
    assert all(value > 0 for value in seconds.values())


def test_a_precision_that_is_far_slower_is_timed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, compute_loss, calls = [0.0], timing_trial.compute_loss, []

    def compute_with_slow_bf16(loss_fn: Any, *given: Any, **options: Any) -> Any:
        calls.append(loss_fn.precision)
        now[0] += 10.0 if loss_fn.precision == "bf16" else 1.0
        return compute_loss(loss_fn, *given, **options)

    monkeypatch.setattr(timing_trial, "compute_loss", compute_with_slow_bf16)
    monkeypatch.setattr(timing_trial.time, "perf_counter", lambda: now[0])
    seconds = time_precisions(payload(folder, threads=1, micro=2, precisions=["fp32", "bf16"]))
    assert (seconds["fp32"], seconds["bf16"]) == (1.0, 10.0)
    assert calls.count("bf16") == 1 < calls.count("fp32")


STRICT = """
import torch
from phalanx.train.tasks import LanguageModeling

def summed(name):
    if torch.are_deterministic_algorithms_enabled():  # as torch says it of a GPU's kernel
        raise RuntimeError(f"{name} does not have a deterministic implementation, but you set 'torch.use_determ")

class Loss(LanguageModeling):
    def loss(self, output, batch):
        summed("cumsum_cuda_kernel")
        return super().loss(output, batch)

class Metric(LanguageModeling):
    def metrics(self, output, batch):
        summed("bincount_cuda")
        return {}
"""


@pytest.mark.parametrize(("task", "name"), [("Loss", "cumsum_cuda_kernel"), ("Metric", "bincount_cuda")])
def test_an_operation_of_loss_or_metrics_without_a_deterministic_kernel_is_named(
    tmp_path: Path, folder: Path, task: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_trial_strict.py").write_text(STRICT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(timing_trial, "configure_kernels", lambda device, precision, strict: set_deterministic(strict))
    given = payload(folder, micro=2, precisions=["fp32"], determinism="fixed-world")
    given["recipe"]["task"] = f"own_trial_strict:{task}"
    try:
        found = time_precisions(given)
    finally:
        set_deterministic(False)
    assert found[NONDETERMINISTIC_OP_KEY] == name
    assert found["fp32"] > 0


FAILING = {
    "forward": ("1 / 0", "forward of the model and its loss failed: ZeroDivisionError: division by zero"),
    "detached": ("super().forward(tokens).detach()", "backward of the model failed: RuntimeError: .*not require grad"),
    "in place": (
        "torch.relu_(super().forward(tokens).exp()).mul_(2)",
        "backward of the model failed: RuntimeError: .*modified by an inplace operation",
    ),
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_model_that_fails_in_its_trial_is_refused_with_the_error(kind: str, folder: Path, tmp_path: Path) -> None:
    output, why = FAILING[kind]
    name = f"own_trial_{kind.replace(' ', '_')}"
    lines = ["import torch", "from torch import nn", "class Own(nn.Embedding):", "    def forward(self, tokens):"]
    lines += [f"        return {output}", "def make(vocab_size): return Own(vocab_size, vocab_size)"]
    (tmp_path / f"{name}.py").write_text("\n".join(lines))
    given = payload(folder)
    given["recipe"]["model"]["build"] = f"{name}:make"
    given["folder"] = str(tmp_path)
    with pytest.raises(RecipeError, match=f"a trial {why}"):
        profile_model(given)


def imported(folder: Path, **names: Any) -> str:
    base = {"build": "own_trial_model:make", "task": "language-modeling", "callbacks": [], "folder": str(folder)}
    return check_imports({**base, **names})


def test_what_a_model_imports_from_the_recipes_folder_counts_as_its_source(tmp_path: Path) -> None:
    (tmp_path / "own_trial_part.py").write_text("WIDTH = 2\n")
    (tmp_path / "own_trial_whole.py").write_text("from own_trial_part import WIDTH\ndef make(): return WIDTH\n")
    before = imported(tmp_path, build="own_trial_whole:make")
    (tmp_path / "own_trial_part.py").write_text("WIDTH = 3\n")
    assert imported(tmp_path, build="own_trial_whole:make") != before


@pytest.mark.parametrize(
    ("names", "key"),
    [
        ({"build": "own_trial_model:mak"}, "model.build"),
        ({"task": "translation"}, "task"),
        ({"callbacks": ["own_trial_model:make"]}, "callbacks.0"),
    ],
)
def test_what_cannot_be_imported_is_named_by_its_key(folder: Path, names: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError, match=f"^{key}"):
        imported(folder, **names)


def test_frozen_weights_in_8_bits_count_as_a_quarter(folder: Path) -> None:
    def frozen(base_dtype: str | None) -> Any:
        given = shipped(folder, args={"layers": 2, "hidden_size": 128, "num_heads": 2, "vocab_size": 256})
        given["recipe"]["adapter"] = {"rank": 4, "base_dtype": base_dtype}
        return profile_model(given)["frozen_parameters"]

    embedding = 256 * 128
    share = (frozen("int8") - embedding) / (frozen(None) - embedding)
    assert share == pytest.approx((1 + 4 / 64) / 4, abs=0.01)
