"""The profile of a recipe's model: traced once and cached, so that later calls need no torch."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash
from pydantic import TypeAdapter

import phalanx
from phalanx.errors import RecipeError
from phalanx.planner.model_profile import ModelProfile
from phalanx.recipe import Recipe, import_object
from phalanx.recipe.imports import describe_message, fill_arguments
from phalanx.recipe.load import LoadedRecipe
from phalanx.recipe.locations import huggingface_directory
from phalanx.run.cache import load_or_measure

if TYPE_CHECKING:
    from torch import nn

    from phalanx.data import DataInfo

NumberFormat = Literal["half", "single", "mixed"]
"""In what a model is followed: 16 bits, as on GPUs; fp32; or as autocast has it on a CPU."""
PROFILE_ADAPTER = TypeAdapter(ModelProfile)


def profile_model(loaded: LoadedRecipe, facts: "DataInfo", number_format: NumberFormat = "half") -> ModelProfile:
    """Return what a recipe's model needs of a machine: traced on the meta device, or read from the cache."""
    recipe = loaded.recipe
    key = {
        "follower": _compute_tracer_version(),
        "numbers": number_format,
        "model": recipe.model.model_dump(mode="json"),
        "adapter": None if recipe.adapter is None else recipe.adapter.model_dump(mode="json"),
        "facts": vars(facts),
        "code": _hash_model_code(recipe.model.build, loaded.recipe_dir),
        "versions": [phalanx.__version__, version("torch")],
    }

    def trace_model() -> dict[str, Any]:
        profile: dict[str, Any] = PROFILE_ADAPTER.dump_python(_trace_model(loaded, facts, number_format), mode="json")
        return profile

    return PROFILE_ADAPTER.validate_python(load_or_measure("profiles", key, trace_model))


def _trace_model(loaded: LoadedRecipe, facts: "DataInfo", number_format: NumberFormat) -> ModelProfile:
    """The profile of a recipe's model, by running through it without memory."""
    import torch
    from torch import nn

    from phalanx.planner.trace.trace_model import (
        build_on_meta,
        image_classification_forward,
        language_modeling_forward,
        profile_autocast,
        profile_fake_tensors,
        profile_model,
    )
    from phalanx.recipe import describe_exception

    recipe, folder = loaded.recipe, loaded.recipe_dir
    directory = huggingface_directory(recipe.model.build, folder)

    def make() -> nn.Module:
        if directory is not None or recipe.adapter is not None:
            from phalanx.train.distributed.meta_device import allocate_meta_parameters
            from phalanx.train.model_builder import build_model

            cpu = torch.device("cpu")
            model = build_model(recipe.model, facts, folder, recipe.seed, cpu, recipe.adapter, load=False)
            if directory is not None:
                _check_dense(model, recipe.model.build)
                allocate_meta_parameters([model], cpu)  # its parameters are where its buffers are
            return model
        # The trainer's way would import the trainer, which takes half a second.
        builder = import_object(recipe.model.build, folder, key="model.build")
        data_sizes = {"vocab_size": facts.vocab_size, "seq_len": facts.seq_len, "num_classes": facts.num_classes}
        try:
            model = builder(**fill_arguments(builder, recipe.model.args, data_sizes))
        except (TypeError, ValueError) as error:
            raise RecipeError(f"model.args: {recipe.model.build} refuses them: {describe_message(error)}") from error
        if not isinstance(model, nn.Module):
            raise RecipeError(f"model.build: {recipe.model.build} returned {type(model).__name__}, not an nn.Module")
        return model

    if facts.kind == "tokens":
        assert facts.vocab_size is not None
        assert facts.seq_len is not None
        forward, tokens = language_modeling_forward(facts.vocab_size, facts.seq_len), facts.seq_len
    else:
        assert facts.image_shape is not None
        height, width, channels = facts.image_shape
        forward, tokens = image_classification_forward(channels, height, width), 1
    try:
        if number_format == "mixed":
            return profile_autocast(make, forward, tokens)
        dtype = torch.bfloat16 if number_format == "half" else torch.float32
        if directory is not None:
            return profile_fake_tensors(make, forward, tokens, dtype)
        return profile_model(build_on_meta(make, dtype), forward, tokens)
    except RecipeError:
        raise
    except Exception as error:  # a model of the user's own may fail at being followed in any way
        own = ""
        if ":" in recipe.task_kind:
            kind = "next tokens" if facts.kind == "tokens" else "classes"
            own = f"; the loss was that of {kind}, since `phalanx plan` does not follow {recipe.task_kind}: "
            own += "`phalanx train --dry-run` tries it on this machine"
        raise RecipeError(
            f"model: {recipe.model.build} cannot be traced on the meta device: {describe_exception(error)}{own}"
        ) from error


def _check_dense(model: "nn.Module", build: str) -> None:
    """Raise RecipeError for a mixture of experts of transformers: the shapes of its experts' products depend on
    values."""
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if "experts" in name.split(".") or (parameter.dim() == 3 and "Conv" not in type(owner).__name__):
            raise RecipeError(
                f"model: {build} is a mixture of experts ({name}); what transformers computes of one depends on the "
                "values of tokens, so it cannot be planned; plan phalanx.models:moe of the same sizes, or have "
                "`phalanx train --dry-run` try this one on the machine itself"
            )


def _compute_tracer_version() -> str:
    """A hash of what makes and reads profiles: what another version of it remembered is not understood."""
    planner_dir = Path(__file__).parents[1] / "planner"
    files = [*sorted((planner_dir / "trace").glob("*.py")), planner_dir / "model_profile.py"]
    return xxhash.xxh3_64_hexdigest(b"".join(file.read_bytes() for file in files))


def _hash_model_code(build: str, folder: Path) -> str:
    """Hash the source that builds a model: the module's file and the other files in its folder."""
    module = build.partition(":")[0]
    if (directory := huggingface_directory(build, folder)) is not None:
        return xxhash.xxh3_64_hexdigest((directory / "config.json").read_bytes())
    module_file = folder / (module.replace(".", "/") + ".py")
    if module_file.is_file():
        files = sorted(folder.glob("*.py"))
    else:
        spec = find_spec(module.partition(".")[0])
        package = Path(spec.origin).parent if spec is not None and spec.origin else folder
        files = sorted((package / Path(*module.split(".")[1:])).glob("*.py")) or sorted(package.glob("*.py"))
    return xxhash.xxh3_64_hexdigest(b"".join(file.read_bytes() for file in files))


def cache_profile(payload: dict[str, Any]) -> None:
    """Follow the model of a recipe, so that its profile is remembered. For a process of its own: it imports torch."""
    from phalanx.data.cache import expect_data_info

    recipe, folder = Recipe.model_validate(payload["recipe"]), Path(payload["folder"])
    facts = expect_data_info(recipe.data, folder)
    for number_format in (
        ("single", "mixed") if recipe.precision == "auto" else (select_number_format(recipe.precision),)
    ):
        profile_model(LoadedRecipe(recipe, None, folder, {}), facts, number_format)


def select_number_format(precision: str) -> NumberFormat:
    """In what a model is followed for a CPU."""
    return "mixed" if precision == "bf16" else "single"
