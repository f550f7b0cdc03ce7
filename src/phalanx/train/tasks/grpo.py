"""Reinforcement learning with a group's mean reward as the baseline (GRPO, Shao et al. 2024), small and exact.

In each micro-batch the model that trains answers each prompt several times; a function of the user's own rewards the
answers. The sampled tokens follow from seed, step and micro-batch, so a run that was killed and resumed samples the
same ones. Log-probabilities while sampling and while training are equal bit by bit on a CPU: both come from a forward
of the same shape. That costs a whole forward for each token: it is meant for short answers and small models.

Each step uses its answers once, so there is no ratio to clip. As in DAPO the mean is over the tokens of all answers.
"""

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.data import Tokenizer
from phalanx.errors import DataError, RecipeError
from phalanx.recipe.schema import GrpoConfig
from phalanx.train.hf.inputs import get_logits
from phalanx.train.ops.linear_cross_entropy import IGNORED_TARGET
from phalanx.train.tasks import TensorBatch, add_auxiliary_loss
from phalanx.train.tasks.preference import compute_token_log_probs

Reward = Callable[[Sequence[str], Sequence[str], Sequence[str]], Sequence[float]]
"""Takes prompts, the model's answers, and the answers in the data; returns a number for each answer."""
MIN_DEVIATION = 1e-4
"""Added to the standard deviation of a group's rewards."""


class Grpo:
    """The task `grpo`. The data are conversations, one in a sample; their answers are for the reward only."""

    def __init__(self, config: GrpoConfig, reward: Reward, tokenizer: Tokenizer, end_tokens: Sequence[int]):
        self.config, self._reward, self._tokenizer, self._end_tokens = config, reward, tokenizer, tuple(end_tokens)

    def roll_out(self, model: nn.Module, batch: TensorBatch) -> TensorBatch:
        """Return a batch of the model's own answers, `group_size` for each of the b prompts: `tokens` and `targets`
        [b g, s] with answers as targets, `advantages` and `rewards` [b g], and `sampled_log_probs` [b g, s]."""
        # Random numbers of the micro-batch in training; in an evaluation the same ones each time.
        seed = int(torch.randint(2**62, ()) if torch.is_grad_enabled() else batch["tokens"].sum())
        samples = list(map(split_sample, batch["tokens"], batch["targets"]))
        prompts = [prompt for prompt, _ in samples for _ in range(self.config.group_size)]
        config, ends = self.config, self._end_tokens
        tokens, targets, log_probs = sample_answers(
            model, prompts, seed, config.max_new_tokens, config.temperature, ends
        )
        texts = [self._decode(row[row != IGNORED_TARGET]) for row in targets]
        asked = [self._decode(prompt) for prompt in prompts]
        wanted = [self._decode(answer) for _, answer in samples for _ in range(self.config.group_size)]
        rewards = torch.tensor(self._compute_rewards(asked, texts, wanted), device=tokens.device)
        groups = rewards.view(-1, self.config.group_size)
        centred = groups - groups.mean(1, keepdim=True)
        return {
            "tokens": tokens,
            "targets": targets,
            "rewards": rewards,
            "advantages": (centred / (groups.std(1, keepdim=True) + MIN_DEVIATION)).flatten(),
            "sampled_log_probs": log_probs,
        }

    def inputs(self, batch: TensorBatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (batch["tokens"],), {}

    def loss(self, output: Any, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        log_probs = compute_token_log_probs(get_logits(output), batch["targets"])
        ratio = (log_probs - batch["sampled_log_probs"]).exp()  # 1, with the gradient of the log-probability
        is_answer = batch["targets"] != IGNORED_TARGET
        losses, num_terms = -(ratio * batch["advantages"][:, None])[is_answer].sum(), is_answer.sum()
        return add_auxiliary_loss(losses, num_terms, output), num_terms

    def metrics(self, output: Any, batch: TensorBatch) -> Mapping[str, tuple[Tensor, int]]:
        """Return the mean reward, the mean number of tokens of an answer, and how far log-probabilities while training
        are from those while sampling."""
        log_probs = compute_token_log_probs(get_logits(output), batch["targets"])
        difference = (log_probs - batch["sampled_log_probs"]).abs().amax(1)
        lengths, count = (batch["targets"] != IGNORED_TARGET).sum(1), len(batch["rewards"])
        return {
            "reward": (batch["rewards"].sum(), count),
            "answer_tokens": (lengths.sum(), count),
            "log_prob_difference": (difference.sum(), count),
        }

    def _decode(self, tokens: Tensor) -> str:
        return self._tokenizer.decode([token for token in tokens.tolist() if token not in self._end_tokens])

    def _compute_rewards(self, prompts: list[str], answers: list[str], references: list[str]) -> list[float]:
        name = self.config.reward
        with _time_limit(self.config.reward_timeout_s, f"task.reward: {name} takes longer than"):
            rewards = self._reward(prompts, answers, references)
        try:
            numbers = [float(reward) for reward in rewards]
        except (TypeError, ValueError):
            raise DataError(f"task.reward: {name} returned {rewards!r:.200}, expected a list of numbers") from None
        if len(numbers) != len(answers) or not all(map(math.isfinite, numbers)):
            raise DataError(
                f"task.reward: {name} returned {numbers!r:.200}, expected {len(answers)} finite numbers: one for each "
                "answer"
            )
        return numbers


@torch.no_grad()
def sample_answers(
    model: nn.Module,
    prompts: Sequence[Tensor],
    seed: int,
    max_new_tokens: int,
    temperature: float,
    end_tokens: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Have a model answer prompts: tokens and targets int64 [n, s], log-probabilities of the targets fp32 [n, s]."""
    device = prompts[0].device
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    size = int(lengths.max()) + max_new_tokens
    tokens = torch.zeros(len(prompts), size, dtype=torch.int64, device=device)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    targets = torch.full_like(tokens, IGNORED_TARGET)
    log_probs = torch.zeros(tokens.shape, device=device)
    generator = torch.Generator().manual_seed(seed)
    rows, is_open = torch.arange(len(prompts)), torch.ones(len(prompts), dtype=torch.bool)
    for number in range(max_new_tokens):
        at = lengths + number - 1
        logits = get_logits(model(tokens))
        weights = (logits[rows, at].float().cpu() / temperature).softmax(-1)
        drawn = torch.multinomial(weights, 1, generator=generator)[:, 0]
        chosen = torch.where(is_open, drawn, IGNORED_TARGET).to(device)
        targets[rows, at] = chosen
        log_probs[rows, at] = compute_token_log_probs(logits, targets)[rows, at]
        tokens[rows, at + 1] = chosen.clamp(min=0)
        is_open &= ~torch.isin(drawn, torch.tensor(list(end_tokens)))
        if not is_open.any():
            break
    return tokens, targets, log_probs


def split_sample(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the prompt and the answer of a sample, [s] tokens with one answer as targets."""
    at = (targets != IGNORED_TARGET).nonzero()[:, 0]
    if not len(at):
        raise RecipeError("task: grpo needs prompts; a sample has no answer, so its prompt has no end")
    return tokens[: int(at[0]) + 1], targets[at]


@contextmanager
def _time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise DataError in the main thread after some seconds; Python code alone is interrupted."""

    def stop(*_: object) -> None:
        raise DataError(f"{what} {seconds:g} s (task.reward_timeout_s)")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
