"""Load the teacher of a distillation."""

from pathlib import Path

import torch
from torch import nn

from phalanx.data import DataInfo
from phalanx.errors import RecipeError
from phalanx.recipe.locations import huggingface_directory, localize_named, name_recipe_key
from phalanx.run import Run
from phalanx.train.hf import model as hf_model
from phalanx.train.hf.inputs import is_transformers_model

TEACHER_KEY = "task.teacher"


def load_teacher(location: str, folder: Path | None, facts: DataInfo, device: torch.device) -> nn.Module:
    """Load the model of a run's newest checkpoint, or of `hf:PATH`. Raises RecipeError if it has fewer tokens than the
    data, or there is none."""
    with name_recipe_key(TEACHER_KEY):
        directory = huggingface_directory(location, folder, TEACHER_KEY)
        if directory is not None:
            model = hf_model.build_with_weights(directory, {}, facts, device)
        else:
            model = _load_run(localize_named(location, folder, TEACHER_KEY), device)
    num_tokens = getattr(model.config, "vocab_size", None) if is_transformers_model(model) else None
    if isinstance(num_tokens, int) and facts.vocab_size is not None and num_tokens < facts.vocab_size:
        raise RecipeError(
            f"{TEACHER_KEY}: {location} has {num_tokens} tokens, and the data {facts.vocab_size}; a teacher must "
            "have the student's tokens"
        )
    return model


def _load_run(path: Path, device: torch.device) -> nn.Module:
    from phalanx.train.inference import load_trained_model

    if not path.is_dir():
        raise RecipeError(f"{path}: no run here; expected a run, or hf:PATH of a Hugging Face directory")
    return load_trained_model(Run(path), None, False, device).model
