"""Import paths in recipes, `module:name`: the user's models, tasks and callbacks. Importing runs the user's module.
`hf:PATH`, the alternative, names a directory and runs nothing.
"""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from phalanx.errors import RecipeError
from phalanx.recipe.snapshot_paths import resolve_code_dir
from phalanx.recipe.validation_errors import suggest_nearest

HF_PREFIX = "hf:"
HF_CONFIG_FILE = "config.json"
MAX_MESSAGE_CHARS = 600
"""Characters that are shown of an error message of a library or of the user's code: some have pages."""


def huggingface_location(build: str) -> str | None:
    """The path or URL of the Hugging Face directory that `hf:PATH`, `hf:URL` or `hf://OWNER/NAME` names; None for
    another value."""
    if build.startswith(f"{HF_PREFIX}//"):
        return build
    return build.removeprefix(HF_PREFIX) if build.startswith(HF_PREFIX) else None


def import_object(path: str, recipe_dir: Path | None = None, key: str = "import path") -> Any:
    """The object that `module:name` names. The module is that of `recipe_dir` (the recipe's) if it has one, which comes
    last on the import path from now on: no file in it takes the place of a library's module.

    `key` says in errors which key of the recipe holds the path, such as `model.build`.
    RecipeError: not of that form, no such module, no such name in it, or the module fails while it is imported.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module_name.split("."), *name.split(".")]):
        raise RecipeError(f"{key}: found {path!r}, expected module:name, such as phalanx.models:transformer")
    if recipe_dir is not None:
        recipe_dir = resolve_code_dir(recipe_dir)
        if str(recipe_dir) not in sys.path:
            sys.path.append(str(recipe_dir))
    try:
        if recipe_dir is not None:
            _import_from(recipe_dir, module_name.partition(".")[0], key)
        value: Any = importlib.import_module(module_name)
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            searched = f"; looked in {recipe_dir} and the installed packages" if recipe_dir is not None else ""
            raise RecipeError(f"{key}: {path!r}: there is no module {error.name!r}{searched}") from None
        raise RecipeError(
            f"{key}: importing {module_name!r} failed: {describe_exception(error, recipe_dir)}"
        ) from error
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            public_names = [public_names for public_names in dir(value) if not public_names.startswith("_")]
            owner = getattr(value, "__name__", type(value).__name__)
            raise RecipeError(
                f"{key}: {path!r}: {owner} has no {part!r}{suggest_nearest(part, public_names)}"
            ) from None
    if not callable(value):
        raise RecipeError(f"{key}: {path!r} is {type(value).__name__}, expected a function or a class")
    return value


def check_installed(path: str, key: str) -> None:
    """Raise RecipeError where the package of `module:name`, which a recipe at a URL names, is not installed."""
    package = path.partition(":")[0].partition(".")[0]
    if package.isidentifier() and importlib.util.find_spec(package) is None:
        raise RecipeError(
            f"{key}: {path!r}: no package {package!r} is installed, and code next to a recipe at a URL is not fetched: "
            "install it, or download the recipe with its code"
        )


def _import_from(folder: Path, name: str, key: str) -> None:
    """Import the module or package `name` of `recipe_dir`, if there is one. RecipeError when the name is taken."""
    spec = PathFinder.find_spec(name, [str(folder)])
    if spec is None or spec.loader is None or spec.origin is None:  # none, or only a folder of that name
        return
    loaded = sys.modules.get(name)
    origin = None if loaded is None else getattr(loaded.__spec__, "origin", None)
    if name in sys.stdlib_module_names or (loaded is not None and origin != spec.origin):
        owner = f"that of {origin}" if name not in sys.stdlib_module_names else "that of a module of Python's own"
        raise RecipeError(f"{key}: {spec.origin}: its name is {owner}, which would be hidden; rename the file")
    if loaded is None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise


def describe_exception(error: BaseException, recipe_dir: Path | None = None) -> str:
    """`NameError: name 'x' is not defined (my_model.py:3)`: type, message and the user's line, in one line."""
    text = describe_message(error) or "no message"
    text = text if len(text) <= MAX_MESSAGE_CHARS else f"{text[: MAX_MESSAGE_CHARS - 4]} ..."
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    return f"{type(error).__name__}: {text}{_user_line(error.__traceback__, recipe_dir)}"


def describe_message(error: BaseException) -> str:
    """The message of an exception in one line: of pydantic's errors the keys, what was found, and what is wrong."""
    if isinstance(error, ValidationError):
        return "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: found {problem['input']!r}: {problem['msg']}"
            for problem in error.errors(include_url=False)
        )
    message = str(error)
    if type(error).__name__ == "AcceleratorError":  # torch appends advice for kernel authors
        message = message.partition("\n")[0]
    return " ".join(message.split())


def _user_line(trace: TracebackType | None, folder: Path | None) -> str:
    """The innermost line in the recipe's folder, else the innermost outside of the import machinery and this file."""
    frames = [frame for frame in traceback.extract_tb(trace) if "importlib" not in frame.filename]
    frames = [frame for frame in frames if frame.filename != __file__]
    user_frames = [frame for frame in frames if folder is not None and _is_user_code(Path(frame.filename), folder)]
    for frame in reversed(user_frames or frames):
        return f" ({frame.filename}:{frame.lineno})"
    return ""


def _is_user_code(file: Path, folder: Path) -> bool:
    """Whether a file is code of the user's in `recipe_dir`, and not of a package that is installed below it."""
    return file.is_relative_to(folder) and not {"site-packages", "dist-packages"} & set(file.parts)


def check_known_arguments(builder: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Raise RecipeError for an argument that the builder does not take. Needs no data."""
    try:
        parameters = inspect.signature(builder).parameters
    except ValueError:  # some builtin types
        raise RecipeError(f"model.build: {builder} has no signature; expected a function or a class") from None
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    unknown = [key for key in args if key not in parameters and not takes_any]
    if unknown:
        raise RecipeError(
            f"model.args.{unknown[0]}: the builder takes no such argument; it takes {', '.join(parameters) or 'none'}"
        )


def fill_arguments(builder: Callable[..., Any], args: dict[str, Any], data_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return `args`, plus each of `data_args` that is not None (vocab_size, seq_len, num_classes), takes part in the
    builder's signature and is missing. Raises RecipeError for arguments that the builder does not take, and for
    required ones that are missing."""
    check_known_arguments(builder, args)
    parameters = inspect.signature(builder).parameters
    filled = {k: v for k, v in data_args.items() if k in parameters and k not in args and v is not None}
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and name not in args | filled
    ]
    if missing:
        raise RecipeError(f"model.args.{missing[0]}: the builder needs it, and it does not follow from the data")
    return {**args, **filled}
