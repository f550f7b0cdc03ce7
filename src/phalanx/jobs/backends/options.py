"""Options that only one backend understands, as typed fields of a dataclass for each backend: `-o NAME=VALUE`.

The dataclasses are the one list of names, types and defaults: backends read them, help texts and docs show them.
"""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from typing import Any

OPTION_CLASSES = {
    "slurm": "phalanx.jobs.backends.slurm.sbatch_options:SlurmOptions",
    "kubernetes": "phalanx.jobs.backends.kubernetes.options:KubernetesOptions",
    "ray": "phalanx.jobs.backends.ray.options:RayOptions",
}
"""The dataclass of each backend that has options. None of them imports torch or the backend's client library."""


@dataclass(frozen=True)
class OptionHelp:
    """What a user reads of an option. `value_type`: what stands for its value, such as NUMBER or `yes|no`."""

    name: str
    value_type: str
    default: str
    is_required: bool
    help: str

    @property
    def note(self) -> str:
        """What stands behind the help: the default, or that there is none."""
        return "required" if self.is_required else f"default: {self.default}" if self.default else ""


def backend_option(
    help: str,
    value_type: str,
    default: Any = None,
    shown_default: str = "",
    default_factory: Any = MISSING,
    **metadata: Any,
) -> Any:
    """Declare an option as a field of a dataclass.

    Args:
        help: One sentence.
        value_type: What stands for its value in help texts.
        default: Its value where it is not given; MISSING where it must be given.
        shown_default: The default in words, where it is not that of the field.
        default_factory: Makes a default that is mutable; `default` is MISSING then.
        metadata: More about it, for the backend.
    """
    more = {"help": help, "value_type": value_type, "shown_default": shown_default, **metadata}
    return field(default=default, default_factory=default_factory, metadata=more)


def option_names(options_class: Any) -> tuple[str, ...]:
    """Names of a backend's options as users write them."""
    return tuple(each.name.replace("_", "-") for each in fields(options_class))


def list_option_help(backend: str) -> Iterator[OptionHelp]:
    """Options of a backend, in the order of its dataclass."""
    module, _, name = OPTION_CLASSES[backend].partition(":")
    for each in fields(getattr(import_module(module), name)):
        shown = each.metadata["shown_default"]
        if not shown and each.default not in (None, MISSING, ()):
            shown = str(each.default)
        is_required = each.default is MISSING and each.default_factory is MISSING
        name = each.name.replace("_", "-")
        yield OptionHelp(name, each.metadata["value_type"], shown, is_required, each.metadata["help"])
