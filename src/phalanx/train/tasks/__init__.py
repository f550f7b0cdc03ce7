"""Tasks: the inputs of a model for a batch, and its loss as a sum and a number of terms.

A task is a class with `inputs` and `loss`, and optionally `metrics`; the recipe names a user's own by import path. The
trainer divides once, by the number of terms of the global batch, so splitting a batch into micro-batches, workers or
packed sequences never changes the gradient beyond rounding. Do not divide in a task.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.data import DataInfo, RunData, Tokenizer, load_tokenizer
from phalanx.data.chat_images import IMAGE_INPUT, select_image_inputs
from phalanx.data.dataset_files import open_dataset_files
from phalanx.data.tokenizers import find_stop_tokens
from phalanx.errors import RecipeError
from phalanx.recipe import Recipe, describe_exception, import_object
from phalanx.recipe.locations import huggingface_directory
from phalanx.recipe.schema import RECORDS_OF_TASKS, DistillationConfig, GrpoConfig, PreferenceConfig, TaskConfig
from phalanx.train.hf.config import get_text_config
from phalanx.train.hf.image_processor import ImageNormalization, find_image_inputs
from phalanx.train.hf.inputs import find_auxiliary_loss, get_logits, is_transformers_model
from phalanx.train.ops.linear_cross_entropy import cross_entropy, get_current_vocab_shard, linear_cross_entropy

CPU_DEVICE = torch.device("cpu")
SINGLE_LABEL = "single_label_classification"
"""The `problem_type` of transformers that `classification` trains."""
TensorBatch = dict[str, Tensor]


class Task(Protocol):
    """The interface of a task. `metrics` is optional. So is `head_loss(hidden, weight, batch) -> (sum of losses, number
    of terms)`, the loss from the input and the weight of the output layer, for vocabularies so large that logits should
    not be materialized at once; and `roll_out(model, batch) -> batch`, which has the model make the batch that it is
    trained on."""

    def inputs(self, batch: TensorBatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments of the model's `forward`."""

    def loss(self, output: Any, batch: TensorBatch) -> tuple[Tensor, Tensor | int]:
        """Return the sum of the losses of a micro-batch (0-d tensor) and its number of terms."""


def add_auxiliary_loss(total: Tensor, num_terms: Tensor | int, output: Any) -> Tensor:
    """Add the auxiliary loss in a model's output, if there is one, to a sum of losses: as often as it has terms, so the
    loss of a step has its mean over micro-batches, weighted by their terms. Validation measures the task alone."""
    auxiliary_loss = find_auxiliary_loss(output) if torch.is_grad_enabled() else None
    return total if auxiliary_loss is None else total + auxiliary_loss * num_terms


class LanguageModeling:
    """Next-token cross-entropy. Targets of -100 do not count."""

    def inputs(self, batch: TensorBatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        documents = batch.get("documents")
        documents_or_none = {} if documents is None else {"documents": documents}
        return (batch["tokens"],), {**select_image_inputs(batch), **documents_or_none}

    def loss(self, output: Tensor, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        targets = batch["targets"]
        losses = cross_entropy(get_logits(output).flatten(0, 1), targets.flatten())
        num_terms = (targets != -100).sum()
        return add_auxiliary_loss(losses, num_terms, output), num_terms

    def head_loss(self, hidden: Tensor, weight: Tensor, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        """Compute the loss from the input of an output layer without bias, hidden [b, s, w], and its weight [v, w],
        without materializing all logits. Within `vocab_parallel`, weight is this rank's shard of the vocabulary."""
        targets = batch["targets"]
        losses = linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), get_current_vocab_shard())
        return losses, (targets != -100).sum()


def drop_images(batch: TensorBatch) -> TensorBatch:
    """Return a batch without its images, of which a vision-language model then sees the tokens only."""
    return {name: x for name, x in batch.items() if not name.startswith(IMAGE_INPUT)}


def check_images(model: nn.Module, data: RunData, num_shards: int = 1) -> None:
    """Raise RecipeError for data with images and a model that takes none, as those of transformers ignore what they do
    not know; and where ranks that share weights could differ in whether they have images."""
    if data.has_text_only and num_shards > 1:
        raise RecipeError(
            f"parallelism.shard: found {num_shards}, expected 1 where conversations with and without images are mixed: "
            "only some ranks would gather the weights that see; use parallelism.replicate"
        )
    if data.has_images and "pixel_values" not in inspect.signature(model.forward).parameters:
        raise RecipeError(
            f"data.chat.images: {type(model).__name__} takes no images (pixel_values); train a vision-language model, "
            "or leave data.chat.images out"
        )


class AssistantTokens(LanguageModeling):
    """Scores conversations: the loss of language modeling, and the share of tokens that are the most likely ones. It
    needs all logits, which training avoids (`head_loss`)."""

    def metrics(self, output: Any, batch: TensorBatch) -> Mapping[str, tuple[Tensor, Tensor]]:
        targets = batch["targets"]
        return {"token_accuracy": ((get_logits(output).argmax(-1) == targets).sum(), (targets != -100).sum())}


class Classification:
    """Cross-entropy over classes. Images are uint8 [b, h, w, c] and are passed as floats [b, c, h, w]: in -1..1, or as
    the Hugging Face directory of the model normalizes them."""

    normalization: ImageNormalization | None = None
    """Set for a model that has one of its own."""

    def inputs(self, batch: TensorBatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        images = batch["images"].permute(0, 3, 1, 2).to(torch.float32)
        if self.normalization is not None:
            return (self.normalization.apply_(images),), {}
        return (images.div_(127.5).sub_(1.0),), {}

    def loss(self, output: Tensor, batch: TensorBatch) -> tuple[Tensor, int]:
        labels = batch["labels"]
        losses = F.cross_entropy(get_logits(output).float(), labels, reduction="sum")
        return add_auxiliary_loss(losses, labels.numel(), output), labels.numel()

    def metrics(self, output: Tensor, batch: TensorBatch) -> Mapping[str, tuple[Tensor, int]]:
        labels = batch["labels"]
        return {"accuracy": ((get_logits(output).argmax(-1) == labels).sum(), labels.numel())}


def check_model_config(task: Task, model: nn.Module) -> None:
    """Raise RecipeError if the model's config declares that its outputs are not scores of classes, as `classification`
    takes them, or no padding token, which tasks of whole texts need."""
    from phalanx.train.tasks.texts import TextClassification, TextTask

    config = getattr(model, "config", None)
    if isinstance(task, TextTask) and is_transformers_model(model) and get_text_config(config).pad_token_id is None:
        raise RecipeError(
            "model.args.pad_token_id: the model's config has none; give the number of a token that ends no text, such "
            "as the tokenizer's pad_token: the score of a text is at its last token that is another"
        )
    problem_type = getattr(config, "problem_type", None)
    if isinstance(task, Classification | TextClassification) and problem_type not in (None, SINGLE_LABEL):
        raise RecipeError(
            f"task: classification trains one class of several, but the model's config declares problem_type "
            f"{problem_type!r}; use model.args.problem_type={SINGLE_LABEL}, or a task of your own, module:Class"
        )


BUILT_IN_TASKS: dict[str, Callable[[], Task]] = {
    "language-modeling": LanguageModeling,
    "chat": LanguageModeling,
    "classification": Classification,
}


def open_task(recipe: Recipe, folder: Path | None, facts: DataInfo, device: torch.device = CPU_DEVICE) -> Task:
    """Load the task of a recipe, for its model and data; a teacher on `device`. Raises RecipeError also where images do
    not fit the model, or a teacher does not fit the tokens."""
    if isinstance(recipe.task, DistillationConfig):
        from phalanx.train.tasks.distillation import Distillation, load_teacher

        load = partial(load_teacher, recipe.task.teacher, folder, facts, device)
        return Distillation(recipe.task, load, _open_chat_tokenizer(recipe, folder)[1] if recipe.task.on_policy else ())
    if isinstance(recipe.task, GrpoConfig):
        from phalanx.train.tasks.grpo import Grpo

        reward = import_object(recipe.task.reward, folder, key="task.reward")
        return Grpo(recipe.task, reward, *_open_chat_tokenizer(recipe, folder))
    task = load_task(recipe.task, folder)
    if isinstance(task, Classification) and (inputs := find_image_inputs(recipe.model.build, folder, facts)):
        task.normalization = inputs.normalization
    return task


def _open_chat_tokenizer(recipe: Recipe, folder: Path | None) -> tuple[Tokenizer, list[int]]:
    """Return the tokenizer of the data, and the tokens that end an answer."""
    dataset = open_dataset_files(str(recipe.data.sources[0].prepared)).directory
    tokenizer, directory = load_tokenizer(dataset), huggingface_directory(recipe.model.build, folder)
    ends = {tokenizer.separator_token, *([] if directory is None else find_stop_tokens(directory))}
    return tokenizer, [end for end in ends if end is not None]


def load_task(spec: str | TaskConfig, folder: Path | None) -> Task:
    """Load the task that a recipe names. Models with a teacher or rewards are scored as language models. Raises
    RecipeError if it does not exist or lacks a method."""
    if isinstance(spec, PreferenceConfig):
        from phalanx.train.tasks.preference import Preference

        return Preference(spec)
    if not isinstance(spec, str) and spec.kind in RECORDS_OF_TASKS:
        from phalanx.train.tasks.texts import TEXT_TASKS

        return TEXT_TASKS[spec.kind](spec)
    if isinstance(spec, GrpoConfig):
        import_object(spec.reward, folder, key="task.reward")
    name = spec if isinstance(spec, str) else "language-modeling"
    if name in BUILT_IN_TASKS:
        return BUILT_IN_TASKS[name]()
    if ":" not in name:
        raise RecipeError(f"task: no task {name!r}; expected {', '.join(BUILT_IN_TASKS)} or module:Class")
    kind = import_object(name, folder, key="task")
    try:
        task: Task = kind()
    except Exception as error:
        raise RecipeError(f"task: {name}() failed: {describe_exception(error, folder)}") from error
    missing = [method for method in ("inputs", "loss") if not callable(getattr(task, method, None))]
    if missing:
        raise RecipeError(f"task: {name} has no method {' and no method '.join(missing)}; a task needs inputs and loss")
    return task
