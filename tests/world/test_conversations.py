"""Training on conversations, preferences and a teacher: against loops of a few lines without packing, under every
parallelism as on one process, and after a kill with the same bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import train_harness as harness_module
from chat_inputs import save_chat_model, write_chat_inputs
from phalanx.data import open_data
from phalanx.errors import ExitCode, PhalanxError
from phalanx.recipe.load import load_resolved_recipe
from phalanx.run.event_types import EvaluationDone, StepDone
from train_harness import TrainHarness, Values, plan_fault

transformers: Any = pytest.importorskip("transformers")

SLOW = pytest.mark.slow
"""Runs that `make test-fine-tuning` has and `make test` has not."""
LR, BETA, NUM_STEPS = 0.5, 0.2, 3
TASKS: dict[str, tuple[str, Any]] = {
    "chat": ("chat", "chat"),
    "dpo": ("pairs", {"kind": "preference", "loss": "dpo", "beta": BETA}),
    "orpo": ("pairs", {"kind": "preference", "loss": "orpo", "beta": BETA}),
    "kto": ("labels", {"kind": "preference", "loss": "kto", "beta": BETA}),
    "distillation": ("chat", {"kind": "distillation", "teacher": "hf:teacher"}),
    "stored-teacher": ("chat", {"kind": "distillation", "teacher": "hf:teacher", "teacher_top_k": 8}),
    "on-policy": ("chat", {"kind": "distillation", "teacher": "hf:teacher", "on_policy": 0.5, "max_new_tokens": 5}),
    "grpo": ("chat", {"kind": "grpo", "reward": "chat_rewards:letters", "group_size": 6, "max_new_tokens": 5}),
}


@pytest.fixture(scope="module", autouse=True)
def inputs(lab: TrainHarness) -> None:
    write_chat_inputs(lab.folder)
    save_chat_model(lab.folder / "teacher", seed=1)
    (lab.folder / "chat_rewards.py").write_text(
        Path(__file__).parents[1].joinpath("helpers/chat_rewards.py").read_text()
    )


@pytest.fixture(autouse=True)
def _no_model_args(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness_module, "BASE_RECIPE", {**harness_module.BASE_RECIPE, "model": {}, "data": {}})


def recipe(name: str, **changes: Any) -> Values:
    source, task = TASKS[name]
    data: Values = {"source": {"jsonl": f"{source}.jsonl"}, "tokenizer": "base", "seq_len": 64}
    if name == "on-policy":
        data |= {"chat": {}, "packing": "single"}
    if name in ("distillation", "stored-teacher"):
        data |= {"chat": {}, "packing": "whole", "document_masking": True}
    return {
        "model": {"build": "hf:base"},
        "task": task,
        "data": data,
        "evaluation": {"every": 3, "holdout_fraction": 0.2},
        "batch": {"global_size": 4, "micro_size": 1},
        "steps": 6,
        "checkpoint": {"every": 2},
        **changes,
    }


@pytest.mark.parametrize(
    ("name", "parallelism", "workers"),
    [
        ("chat", {"shard": 2}, 2),
        pytest.param("chat", {"context": 2}, 2, marks=SLOW),
        pytest.param("chat", {"pipeline": 2}, 2, marks=SLOW),
        pytest.param("dpo", {"replicate": 2}, 2, marks=SLOW),
        pytest.param("dpo", {"shard": 2}, 2, marks=SLOW),
        ("dpo", {"tensor": 2}, 2),
        pytest.param("kto", {"shard": 2}, 2, marks=SLOW),
        pytest.param("distillation", {"shard": 2}, 2, marks=SLOW),
        pytest.param("distillation", {"tensor": 2}, 2, marks=SLOW),
    ],
    ids=str,
)
def test_a_parallelism_has_the_losses_of_one_process(
    lab: TrainHarness, name: str, parallelism: Values, workers: int
) -> None:
    alone = lab.train_reference(recipe(name))
    divided = lab.train(recipe(name, parallelism=parallelism), workers)
    torch.testing.assert_close(torch.tensor(divided.curves), torch.tensor(alone.curves), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("chat", marks=SLOW),
        "dpo",
        pytest.param("stored-teacher", marks=SLOW),
        "on-policy",
        pytest.param("distillation", marks=SLOW),
        pytest.param("grpo", marks=SLOW),
    ],
)
def test_a_killed_run_ends_with_the_same_bits(lab: TrainHarness, name: str) -> None:
    killed = lab.train(recipe(name), faults=[plan_fault(4)])
    assert killed.result["num_restarts"] == 1
    assert killed.digest == lab.train_reference(recipe(name)).digest


@pytest.mark.parametrize("name", ["dpo", *(pytest.param(name, marks=SLOW) for name in ("stored-teacher", "on-policy"))])
def test_elastic_runs_with_a_reference_or_answers_of_their_own_have_the_same_bits_on_any_number_of_replicas(
    lab: TrainHarness, name: str
) -> None:
    alone, two = (lab.train(recipe(name, determinism="elastic"), workers) for workers in (1, 2))
    assert two.digest == alone.digest


@pytest.mark.parametrize(("parallelism", "workers"), [({}, 1), pytest.param({"shard": 2}, 2, marks=SLOW)], ids=str)
def test_a_stored_teacher_of_all_tokens_has_the_losses_of_one_that_runs(
    lab: TrainHarness, parallelism: Values, workers: int
) -> None:
    num_tokens = json.loads((lab.folder / "base/config.json").read_text())["vocab_size"]
    task = {**TASKS["stored-teacher"][1], "teacher_top_k": num_tokens}
    stored = lab.train(recipe("stored-teacher", task=task, parallelism=parallelism or "auto"), workers)
    online = lab.train_reference(recipe("distillation"))
    torch.testing.assert_close(torch.tensor(stored.curves), torch.tensor(online.curves), rtol=1e-5, atol=1e-6)


@SLOW
def test_the_reference_of_a_run_at_a_url_follows_it_to_another_machine(
    lab: TrainHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = {"lr": 3e-3, "schedule": {"warmup_steps": 0, "decay": "constant"}}
    changes = {**recipe("dpo", evaluation={"every": None}, optimizer=optimizer), "callbacks": [], "steps": 6}
    reference = lab.train({**changes, "parallelism": {"replicate": 1}})
    url, file = f"file://{tmp_path}/store/run", lab.recipe_file(changes, "dpo-at-url")
    assert lab.command("train", file, "steps=3", "--run", url).returncode == ExitCode.DONE
    monkeypatch.setattr(lab, "cache", tmp_path / "cache of another machine")
    resumed = lab.command("train", file, "--run", url)
    assert f"digest   {reference.digest}" in resumed.stderr, resumed.stderr


@pytest.mark.parametrize(
    ("parallelism", "key"), [({"context": 2}, "parallelism.context"), ({"pipeline": 2}, "parallelism.pipeline")]
)
def test_preferences_refuse_what_divides_a_sequence_or_its_reference(
    lab: TrainHarness, parallelism: Values, key: str
) -> None:
    with pytest.raises(PhalanxError, match=key) as raised:
        lab.train(recipe("dpo", parallelism=parallelism), 2)
    assert raised.value.code == ExitCode.RECIPE


def test_answers_of_its_own_need_a_whole_model_on_each_worker(lab: TrainHarness) -> None:
    with pytest.raises(PhalanxError, match="on_policy samples with a whole model on each worker"):
        lab.train(recipe("on-policy", parallelism={"shard": 2}), 2)


def test_rewards_rise_and_answers_are_trained_with_the_log_probabilities_they_were_sampled_with(
    lab: TrainHarness,
) -> None:
    optimizer = {"lr": 1e-2, "weight_decay": 0.0, "schedule": {"warmup_steps": 0, "decay": "constant"}}
    run = lab.train(recipe("grpo", steps=24, evaluation={"every": 8, "holdout_fraction": 0.2}, optimizer=optimizer))
    first, *_, last = [event.metrics for event in run.events_of_kind(EvaluationDone)]
    assert (last["reward"] or 0.0) > (first["reward"] or 0.0) + 0.1
    assert first["log_prob_difference"] == last["log_prob_difference"] == 0.0


@pytest.mark.parametrize(
    ("reward", "named"),
    [("nan", "finite numbers"), ("too_few", "one for each answer"), ("endless", "takes longer than 0.2 s")],
)
def test_a_reward_that_fails_is_named_before_the_first_step(lab: TrainHarness, reward: str, named: str) -> None:
    task = {**TASKS["grpo"][1], "reward": f"chat_rewards:{reward}", "reward_timeout_s": 0.2}
    with pytest.raises(PhalanxError, match=f"task.reward: chat_rewards:{reward}.*{named}"):
        lab.train(recipe("grpo", task=task))


def test_a_reward_gets_the_prompts_and_the_answers_of_the_data(lab: TrainHarness) -> None:
    task = {**TASKS["grpo"][1], "reward": "chat_rewards:matches"}
    [scored] = lab.train(recipe("grpo", task=task, steps=1)).events_of_kind(EvaluationDone)
    assert 1 <= (scored.metrics["reward"] or 0.0) <= 6


class Answers:
    """Conversations by transformers' own template and tokenizer, each alone and without packing, with the answers found
    by the words that begin and end them."""

    def __init__(self, folder: Path, source: str):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
        self.records = [json.loads(line) for line in (folder / f"{source}.jsonl").read_text().splitlines()]
        self._header = self.tokenizer.encode("<|im_start|>assistant\n")
        self._end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")

    def encode(self, messages: list[Values]) -> tuple[Tensor, Tensor]:
        """Tokens [1, n], and targets [1, n - 1] with -100 outside answers."""
        tokens = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        targets, at, size = [-100] * len(tokens), 0, len(self._header)
        while at < len(tokens):
            if tokens[at : at + size] == self._header:
                at += size
                stop = tokens.index(self._end, at) + 1
                targets[at:stop] = tokens[at:stop]
                at = stop
            at += 1
        return torch.tensor([tokens]), torch.tensor([targets[1:]])

    def log_prob(self, model: Any, messages: list[Values]) -> Tensor:
        """The sum of the log-probabilities of the answers."""
        tokens, targets = self.encode(messages)
        return -F.cross_entropy(model(tokens).logits[0, :-1], targets[0], reduction="sum", ignore_index=-100)


def chat_loss(answers: Answers, model: Any, reference: Any) -> Tensor:
    encoded = [answers.encode(record["messages"]) for record in answers.records]
    losses = [F.cross_entropy(model(tokens).logits[0, :-1], targets[0], reduction="sum") for tokens, targets in encoded]
    return sum(losses) / sum(int((targets != -100).sum()) for _, targets in encoded)  # type: ignore[no-any-return]


def dpo_loss(answers: Answers, model: Any, reference: Any) -> Tensor:
    losses = []
    for record in answers.records:
        sequences = [record["prompt"] + record[key] for key in ("chosen", "rejected")]
        chosen, rejected = (
            answers.log_prob(model, each) - answers.log_prob(reference, each).detach() for each in sequences
        )
        losses.append(-F.logsigmoid(BETA * (chosen - rejected)))
    return torch.stack(losses).mean()


def kto_loss(answers: Answers, model: Any, reference: Any) -> Tensor:
    losses = []
    for record in answers.records:
        ratio = answers.log_prob(model, record["messages"]) - answers.log_prob(reference, record["messages"]).detach()
        losses.append(torch.sigmoid(-BETA * ratio if record["label"] else BETA * ratio))
    return torch.stack(losses).mean()


@pytest.mark.parametrize(("name", "loss_fn"), [("chat", chat_loss), ("dpo", dpo_loss), ("kto", kto_loss)])
def test_losses_are_those_of_a_plain_loop_without_packing(lab: TrainHarness, name: str, loss_fn: Any) -> None:
    optimizer = {
        "name": "sgd",
        "lr": LR,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "max_grad_norm": None,
        "schedule": {"warmup_steps": 0, "decay": "constant"},
    }
    changes = {"evaluation": {"every": None, "holdout_fraction": 0.0}, "steps": NUM_STEPS, "optimizer": optimizer}
    run = lab.train(recipe(name, **changes, batch={"global_size": 1, "micro_size": 1}))
    resolved = load_resolved_recipe(run.run.resolved)
    num_samples = open_data(resolved.data, resolved.evaluation, resolved.seed).num_train_samples
    run = lab.train(recipe(name, **changes, batch={"global_size": num_samples, "micro_size": 1}))  # all in each step
    model, reference = (transformers.AutoModelForCausalLM.from_pretrained(lab.folder / "base") for _ in range(2))
    answers, expected = Answers(lab.folder, TASKS[name][0]), []
    for _ in range(NUM_STEPS):
        loss = loss_fn(answers, model, reference)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        expected.append((float(loss.detach()), float(norm)))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= LR * gradient
    steps = run.events_of_kind(StepDone)
    found = [(loss, step.grad_norm) for loss, step in zip(run.losses, steps, strict=True)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert expected[-1][0] < expected[0][0]
