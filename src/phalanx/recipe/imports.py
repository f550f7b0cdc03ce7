"""Import paths in recipes, `module:name`: models, tasks and callbacks of the user's own. Runs the user's module.
Beside them stands `hf:PATH`, which names a directory and runs nothing.
"""

import importlib
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from phalanx.errors import RecipeError
from phalanx.recipe.explain import nearest
from phalanx.recipe.travelled import code_of

HUGGING_FACE = "hf:"
CONFIG = "config.json"


def huggingface_directory(build: str, folder: Path | None, key: str = "model.build") -> Path | None:
    """The directory that `hf:PATH` names, PATH relative to `folder` (the recipe's); None for an import path.

    RecipeError when it is no directory with a config.json.
    """
    if not build.startswith(HUGGING_FACE):
        return None
    name = build.removeprefix(HUGGING_FACE)
    path = (folder or Path.cwd()) / Path(name).expanduser()
    if not name or not path.is_dir():
        raise RecipeError(
            f"{key}: found {build!r}, expected hf:PATH of a Hugging Face directory; there is none at {path}"
        )
    if not (path / CONFIG).is_file():
        raise RecipeError(f"{key}: {path} has no {CONFIG}, so it is no Hugging Face model; save_pretrained writes one")
    return path


def import_object(path: str, folder: Path | None = None, key: str = "import path") -> Any:
    """The object that `module:name` names; `folder` (the recipe's) comes first on the import path from now on.

    `key` says in errors which key of the recipe holds the path, such as `model.build`.
    RecipeError: not of that form, no such module, no such name in it, or the module fails while it is imported.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module_name.split("."), *name.split(".")]):
        raise RecipeError(
            f"{key}: found {path!r}, expected an import path module:name, such as phalanx.models:transformer"
        )
    if folder is not None:
        folder = code_of(folder)
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        value: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            where = f"; looked in {folder} and the installed packages" if folder is not None else ""
            raise RecipeError(f"{key}: {path!r}: there is no module {error.name!r}{where}") from None
        raise RecipeError(f"{key}: importing {module_name!r} failed: {told(error, folder)}") from error
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            known = [known for known in dir(value) if not known.startswith("_")]
            owner = getattr(value, "__name__", type(value).__name__)
            raise RecipeError(f"{key}: {path!r}: {owner} has no {part!r}{nearest(part, known)}") from None
    return value


def told(error: BaseException, folder: Path | None = None) -> str:
    """`NameError: name 'x' is not defined (my_model.py:3)`: type, message and the user's line, in one line."""
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    return f"{type(error).__name__}: {text}{_line(error.__traceback__, folder)}"


def _line(trace: TracebackType | None, folder: Path | None) -> str:
    """The innermost line in the recipe's folder, else the innermost outside of the import machinery and this file."""
    frames = [frame for frame in traceback.extract_tb(trace) if "importlib" not in frame.filename]
    frames = [frame for frame in frames if frame.filename != __file__]
    own = [frame for frame in frames if folder is not None and Path(frame.filename).is_relative_to(folder)]
    for frame in reversed(own or frames):
        return f" ({frame.filename}:{frame.lineno})"
    return ""
