"""The profile of a recipe's model: followed once, and remembered, so that who asks again needs no torch."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

import phalanx
from phalanx.beside import Call
from phalanx.errors import RecipeError
from phalanx.plan.profile import Profile, from_plain, to_plain
from phalanx.recipe import Recipe, huggingface_directory, import_object
from phalanx.recipe.arguments import arguments
from phalanx.recipe.load import Loaded
from phalanx.run.cache import remembered

if TYPE_CHECKING:
    from torch import nn

    from phalanx.data import Facts

Numbers = Literal["half", "single", "mixed"]
"""In what a model is followed: 16 bits, as on GPUs; fp32; or as autocast has it on a CPU."""


def profile_of(loaded: Loaded, facts: "Facts", numbers: Numbers = "half", beside: Call | None = None) -> Profile:
    """What a recipe's model asks of a machine: followed without memory, `beside` this process where that is given, or
    remembered from before."""
    recipe = loaded.recipe
    key = {
        "follower": _follower(),
        "numbers": numbers,
        "model": recipe.model.model_dump(mode="json"),
        "adapter": None if recipe.lora is None else recipe.lora.model_dump(mode="json"),
        "facts": vars(facts),
        "code": _code(recipe.model.build, loaded.folder),
        "versions": [phalanx.__version__, version("torch")],
    }

    def follow() -> dict[str, Any]:
        asked = {"recipe": loaded.recipe.model_dump(mode="json"), "folder": str(loaded.folder)}
        asked |= {"facts": vars(facts), "numbers": numbers}
        found = None if beside is None else beside("phalanx.profiling:followed", asked)
        return _followed(loaded, facts, numbers) if found is None else found

    return from_plain(remembered("profiles", key, follow))


def followed(payload: dict[str, Any]) -> dict[str, Any]:
    """`_followed` of JSON values, for a process of its own."""
    from phalanx.data import Facts

    facts = Facts(**{**payload["facts"], "shape": payload["facts"]["shape"] and tuple(payload["facts"]["shape"])})
    loaded = Loaded(Recipe.model_validate(payload["recipe"]), None, Path(payload["folder"]), {})
    return _followed(loaded, facts, payload["numbers"])


def _followed(loaded: Loaded, facts: "Facts", numbers: Numbers) -> dict[str, Any]:
    """The profile of a recipe's model as JSON values, by running through it without memory."""
    import torch
    from torch import nn

    from phalanx.plan.tracing import build, image_loss, language_loss, profile, profile_fake, profile_mixed
    from phalanx.recipe import told

    recipe, folder = loaded.recipe, loaded.folder

    if (directory := huggingface_directory(recipe.model.build, folder)) is not None:
        from phalanx.train.huggingface import preload

        preload(str(directory))  # its modules cannot be imported while the compiler is put aside

    def make() -> nn.Module:
        if recipe.model.build.startswith("hf:") or recipe.lora is not None:
            from phalanx.train.huggingface import materialise
            from phalanx.train.model import build_model

            cpu = torch.device("cpu")
            model = build_model(recipe.model, facts, folder, recipe.seed, cpu, recipe.lora, load=False)
            if directory is not None:
                _check_dense(model, recipe.model.build)
                materialise(model, cpu)  # its parameters are where its buffers are
            return model
        # The trainer's way would import the trainer, which takes half a second.
        builder = import_object(recipe.model.build, folder, key="model.build")
        known = {"vocab_size": facts.vocab, "seq_len": facts.sequence, "num_classes": facts.classes}
        try:
            model = builder(**arguments(builder, recipe.model.args, known))
        except (TypeError, ValueError) as error:
            raise RecipeError(f"model.args: {recipe.model.build} refuses them: {error}") from error
        if not isinstance(model, nn.Module):
            raise RecipeError(f"model.build: {recipe.model.build} returned {type(model).__name__}, not an nn.Module")
        return model

    if facts.kind == "tokens":
        assert facts.vocab is not None
        assert facts.sequence is not None
        forward, tokens = language_loss(facts.vocab, facts.sequence), facts.sequence
    else:
        assert facts.shape is not None
        height, width, channels = facts.shape
        forward, tokens = image_loss(channels, height, width), 1
    try:
        if numbers == "mixed":
            return to_plain(profile_mixed(make, forward, tokens))
        dtype = torch.bfloat16 if numbers == "half" else torch.float32
        if directory is not None:
            return to_plain(profile_fake(make, forward, tokens, dtype))
        return to_plain(profile(build(make, dtype), forward, tokens))
    except RecipeError:
        raise
    except Exception as error:  # a model of the user's own may fail at being followed in any way
        own = ""
        if ":" in recipe.task:
            kind = "next tokens" if facts.kind == "tokens" else "classes"
            own = f"; the loss was that of {kind}, since `phalanx plan` does not follow {recipe.task}: "
            own += "`phalanx train --dry-run` tries it on this machine"
        raise RecipeError(
            f"model: {recipe.model.build} cannot be followed without memory and values: {told(error)}{own}"
        ) from error


def _check_dense(model: "nn.Module", build: str) -> None:
    """RecipeError for a mixture of experts of transformers', in whose code each expert's products depend on values."""
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if "experts" in name.split(".") or (parameter.dim() == 3 and "Conv" not in type(owner).__name__):
            raise RecipeError(
                f"model: {build} is a mixture of experts ({name}); what transformers computes of one depends on the "
                "values of tokens, so it cannot be planned; plan phalanx.models:moe of the same sizes, or have "
                "`phalanx train --dry-run` try this one on the machine itself"
            )


def _follower() -> str:
    """A hash of what makes and reads profiles: what another version of it remembered is not understood."""
    room = Path(__file__).parent / "plan"
    files = [
        *sorted((room / "tracing").glob("*.py")),
        *(room / f"{name}.py" for name in ("profile", "experts", "lifetimes")),
    ]
    return xxhash.xxh3_64_hexdigest(b"".join(file.read_bytes() for file in files))


def _code(build: str, folder: Path) -> str:
    """A hash of the source that builds a model: of the module's file and of those beside it."""
    module = build.partition(":")[0]
    if build.startswith("hf:"):
        config = folder / build.removeprefix("hf:") / "config.json"
        return xxhash.xxh3_64_hexdigest(config.read_bytes()) if config.is_file() else ""
    beside = folder / (module.replace(".", "/") + ".py")
    if beside.is_file():
        files = sorted(folder.glob("*.py"))
    else:
        spec = find_spec(module.partition(".")[0])
        package = Path(spec.origin).parent if spec is not None and spec.origin else folder
        files = sorted((package / Path(*module.split(".")[1:])).glob("*.py")) or sorted(package.glob("*.py"))
    return xxhash.xxh3_64_hexdigest(b"".join(file.read_bytes() for file in files))


def follow(payload: dict[str, Any]) -> None:
    """Follow the model of a recipe, so that its profile is remembered. For a process of its own: it imports torch."""
    from phalanx.data.foretold import foretold

    recipe, folder = Recipe.model_validate(payload["recipe"]), Path(payload["folder"])
    facts = foretold(recipe.data, folder)
    for numbers in ("single", "mixed") if recipe.precision == "auto" else (numbers_of(recipe.precision),):
        profile_of(Loaded(recipe, None, folder, {}), facts, numbers)


def numbers_of(precision: str) -> Numbers:
    """In what a model is followed for a CPU."""
    return "mixed" if precision == "bf16" else "single"
