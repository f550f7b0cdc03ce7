"""Read a text that a user wrote: a recipe, or another file of settings."""

from pathlib import Path

from phalanx.errors import DataError, RecipeError, is_storage_error
from phalanx.recipe.validation_errors import suggest_nearest
from phalanx.safe_files import read_bytes

MAX_FILE_BYTES = 1 << 20


def read_user_text(path: Path) -> str:
    """Read the text of a file that the user wrote. Raises RecipeError when it is missing or is not text."""
    try:
        return read_bytes(path, MAX_FILE_BYTES).decode("utf-8-sig")
    except DataError as error:
        raise RecipeError(f"{path}: cannot be read: {str(error).removeprefix(f'{path}: ')}") from None
    except FileNotFoundError:
        siblings = sorted(other.name for other in path.absolute().parent.glob("*.y*ml"))
        raise RecipeError(f"{path}: there is no such file{suggest_nearest(path.name, siblings)}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{path}:{line}: not UTF-8 text (byte 0x{error.object[error.start]:02x})") from None
    except OSError as error:
        if is_storage_error(error):
            raise
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
