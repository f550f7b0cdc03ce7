"""Options that only one backend understands, as typed fields of a dataclass for each backend: `-o NAME=VALUE`.

The dataclasses are the one list of names, types and defaults: backends read them, help texts and docs show them.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from phalanx.errors import UsageError
from phalanx.jobs.spec import Job

OPTION_CLASSES = {
    "slurm": "phalanx.jobs.backends.slurm.sbatch_options:SlurmOptions",
    "kubernetes": "phalanx.jobs.backends.kubernetes.manifest:KubernetesOptions",
    "ray": "phalanx.jobs.backends.ray.backend:RayOptions",
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
    parse: Callable[[str], Any] = str,
    **metadata: Any,
) -> Any:
    """Declare an option as a field of a dataclass.

    Args:
        help: One sentence.
        value_type: What stands for its value in help texts.
        default: Its value where it is not given; MISSING where it must be given.
        shown_default: The default in words, where it is not that of the field.
        default_factory: Makes a default that is mutable; `default` is MISSING then.
        parse: Reads its value. ValueError says what was expected.
        metadata: More about it, for the backend.
    """
    more = {"help": help, "value_type": value_type, "shown_default": shown_default, "parse": parse, **metadata}
    return field(default=default, default_factory=default_factory, metadata=more)


def parse_backend_options(job: Job, backend: str, options_class: Any) -> Any:
    """Return the options of a job for its backend. Raises UsageError for an unknown one and for a wrong value."""
    parsers = {each.name.replace("_", "-"): each.metadata["parse"] for each in fields(options_class)}
    values: dict[str, Any] = {}
    for name, text in job.backend_options.items():
        if name not in parsers:
            near = get_close_matches(name, parsers, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(parsers)}"
            raise UsageError(f"job {job.name}: {backend} has no option {name!r}; {hint}")
        try:
            values[name.replace("-", "_")] = parsers[name](text)
        except ValueError as error:
            raise UsageError(f"job {job.name}: option {name}={text}: {error}") from None
    return options_class(**values)


def parse_count(text: str) -> int:
    """Read a whole number."""
    if not re.fullmatch(r"[0-9]+", text):
        raise ValueError("expected a whole number, 0 or more")
    return int(text)


def parse_choice(*choices: str) -> Callable[[str], str]:
    """Return the reader of a value that is one of `choices`."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return text

    return parse


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
