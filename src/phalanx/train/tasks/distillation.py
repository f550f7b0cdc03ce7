"""Distillation: learn the teacher's distribution over the next token (Hinton et al. 2015; Agarwal et al. 2024, GKD)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.data import DataInfo
from phalanx.errors import RecipeError
from phalanx.recipe.locations import huggingface_directory, localize_named, name_recipe_key
from phalanx.recipe.schema import DistillationConfig
from phalanx.run import Run
from phalanx.train.hf import model as hf_model
from phalanx.train.hf.inputs import get_logits, is_transformers_model
from phalanx.train.ops.linear_cross_entropy import IGNORED_TARGET
from phalanx.train.tasks import LanguageModeling, TensorBatch, add_auxiliary_loss
from phalanx.train.tasks.grpo import sample_answers, split_sample

TEACHER_KEY = "task.teacher"
LEAST_LOG_PROB = -100.0
"""Stored for the rest of a distribution that has none, so that its product with a probability is a number."""


@dataclass(frozen=True)
class StoredTeacher:
    """What a teacher says of n targets: its k largest log-probabilities and that of all other tokens together, fp32
    [n, k + 1]; the tokens int32 [n, k]; and the first row of each sample id, int64 [ids + 1]."""

    log_probs: Tensor
    tokens: Tensor
    first_rows: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the names of the fields."""
        return dict(vars(self))

    def read(self, sample_ids: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and tokens (int64) of the targets of these samples [b], on the device of the
        student's logits [n, v]. Raises RecipeError for tokens that it does not have."""
        ids = sample_ids.cpu()
        spans = list(zip(self.first_rows[ids].tolist(), self.first_rows[ids + 1].tolist(), strict=True))
        log_probs, tokens = (torch.cat([rows[a:b] for a, b in spans]) for rows in (self.log_probs, self.tokens))
        if len(tokens) and int(tokens.max()) >= student.shape[1]:
            raise RecipeError(f"task.teacher: has a token {int(tokens.max())}, and the model {student.shape[1]} tokens")
        return log_probs.to(student.device), tokens.to(student.device).long()


class Distillation:
    """The task `distillation`. The teacher is a frozen model on the worker's device; it is no part of what is trained
    or saved. There is no `head_loss`: both distributions are needed as a whole.

    A stored teacher is loaded once, to be scored before the first step. Until `set_reference`, as in trials, the
    student is its own teacher.
    """

    def __init__(self, config: DistillationConfig, load: Callable[[], nn.Module], end_tokens: Sequence[int] = ()):
        self.config, self._load, self._end_tokens = config, load, tuple(end_tokens)
        self._teacher = self.load_teacher() if config.teacher_top_k is None else None
        self._stored: StoredTeacher | None = None

    def load_teacher(self) -> nn.Module:
        """Load the teacher, frozen."""
        return self._load().eval().requires_grad_(False)

    def roll_out(self, model: nn.Module, batch: TensorBatch) -> TensorBatch:
        """Return the batch, or in the share `on_policy` of the micro-batches that are trained on one with the student's
        own answers. Which and what follows from seed, step and micro-batch."""
        share = self.config.on_policy if torch.is_grad_enabled() else 0.0
        if not share or float(torch.rand(())) >= share:
            return batch
        prompts = [split_sample(*sample)[0] for sample in zip(batch["tokens"], batch["targets"], strict=True)]
        seed = int(torch.randint(2**62, ()))
        tokens, targets, _ = sample_answers(model, prompts, seed, self.config.max_new_tokens, 1.0, self._end_tokens)
        return {"tokens": tokens, "targets": targets}

    def inputs(self, batch: TensorBatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return LanguageModeling().inputs(batch)

    def loss(self, output: Any, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        is_target = batch["targets"] != IGNORED_TARGET
        student = get_logits(output)[is_target].float()  # [n, v]
        weight, num_terms = self.config.data_loss_weight, is_target.sum()
        losses = (1 - weight) * compute_divergence(*self._compare(student, batch), self.config).sum()
        if weight:
            losses = losses + weight * F.cross_entropy(student, batch["targets"][is_target], reduction="sum")
        return add_auxiliary_loss(losses, num_terms, output), num_terms

    def score(self, teacher: nn.Module, batch: TensorBatch, top_k: int) -> tuple[Tensor, Tensor]:
        """Return what `StoredTeacher` has of the targets of a batch: log-probabilities [n, k + 1], tokens [n, k].
        Raises RecipeError if the teacher has fewer tokens than are to be stored."""
        logits = self._run_teacher(teacher, batch)
        if top_k > logits.shape[1]:
            raise RecipeError(
                f"task.teacher_top_k: found {top_k}, expected at most the {logits.shape[1]} tokens of the teacher"
            )
        log_probs = self._soften(logits)
        tokens = log_probs.topk(top_k).indices
        return merge_rest(log_probs, tokens).clamp(min=LEAST_LOG_PROB), tokens

    def set_reference(self, reference: Mapping[str, Tensor], device: torch.device) -> None:
        """Take what the run stored before its first step. It stays in the file, of which a step reads its part."""
        self._stored = StoredTeacher(**reference)

    def _soften(self, logits: Tensor) -> Tensor:
        return (logits / self.config.temperature).log_softmax(-1)

    @torch.no_grad()
    def _run_teacher(self, teacher: nn.Module, batch: TensorBatch) -> Tensor:
        args, kwargs = self.inputs(batch)
        return get_logits(teacher(*args, **kwargs))[batch["targets"] != IGNORED_TARGET].float()

    def _compare(self, student: Tensor, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the student, of logits [n, v], and of the teacher, over the same classes."""
        log_q, num_tokens = self._soften(student), student.shape[1]
        if self._teacher is not None:
            teacher = self._run_teacher(self._teacher, batch)
            if teacher.shape[1] != num_tokens:
                raise RecipeError(f"task.teacher: has {teacher.shape[1]} tokens, and the model {num_tokens}")
            return log_q, self._soften(teacher)
        if self._stored is None:
            return log_q, log_q.detach()
        log_p, tokens = self._stored.read(batch["sample_ids"], student)
        if tokens.shape[1] == num_tokens:
            return log_q.gather(1, tokens), log_p[:, :-1]
        return merge_rest(log_q, tokens), log_p


def merge_rest(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities [n, k + 1] of tokens [n, k], and of all others together, of log-probabilities
    [n, v]."""
    rest = log_probs.scatter(1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_probs.gather(1, tokens), rest], dim=1)


def compute_divergence(log_q: Tensor, log_p: Tensor, config: DistillationConfig) -> Tensor:
    """Return the divergence [n] of the student's and the teacher's log-probabilities [n, v], times the temperature
    squared."""
    if config.divergence == "forward":
        divergence = kl_divergence(log_p, log_q)
    elif config.divergence == "reverse":
        divergence = kl_divergence(log_q, log_p)
    else:
        share = torch.tensor(config.jsd_beta, dtype=log_p.dtype, device=log_p.device)
        log_mixture = torch.logaddexp(log_p + share.log(), log_q + (1 - share).log())
        divergence = share * kl_divergence(log_p, log_mixture) + (1 - share) * kl_divergence(log_q, log_mixture)
    return divergence * config.temperature**2


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p, q) [n] of log-probabilities [n, v]."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def load_teacher(location: str, folder: Path | None, facts: DataInfo, device: torch.device) -> nn.Module:
    """Load the model of a run's newest checkpoint, or of `hf:PATH`. Raises RecipeError if it has fewer tokens than the
    data, or there is none."""
    from phalanx.train.inference import load_trained_model

    with name_recipe_key(TEACHER_KEY):
        directory = huggingface_directory(location, folder, TEACHER_KEY)
        if directory is not None:
            model = hf_model.build_with_weights(directory, {}, facts, device)
        else:
            path = localize_named(location, folder, TEACHER_KEY)
            if not path.is_dir():
                raise RecipeError(f"{path}: no run here; expected a run, or hf:PATH of a Hugging Face directory")
            model = load_trained_model(Run(path), None, False, device).model
    num_tokens = getattr(model.config, "vocab_size", None) if is_transformers_model(model) else None
    if isinstance(num_tokens, int) and facts.vocab_size is not None and num_tokens < facts.vocab_size:
        raise RecipeError(
            f"{TEACHER_KEY}: {location} has {num_tokens} tokens, and the data {facts.vocab_size}; a teacher must "
            "have the student's tokens"
        )
    return model
