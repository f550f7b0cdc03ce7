"""The arguments of a recipe's builder: those that are given, and those that the data tell."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.errors import RecipeError


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
