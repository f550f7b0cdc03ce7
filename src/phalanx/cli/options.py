"""Arguments and options that several commands share, and the warnings that they print."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from phalanx.std_streams import escape_control_chars
from phalanx.storage.url import is_url

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe (YAML), or its URL.")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides, such as steps=500 optimizer.lr=3e-4.")
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run directory, or its URL.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

StepOption = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Step of the checkpoint.", show_default="newest")
]
BestOption = Annotated[bool, typer.Option("--best", help="Use the checkpoint with the lowest validation loss.")]
TrustCodeOption = Annotated[
    bool, typer.Option("--trust-code", help="Import the run's code even if you did not train with it on this machine.")
]

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="RUN|DIR", help="Run directory, or its URL; or a Hugging Face directory, or its hf:// URL."),
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Device to compute on.", show_default="as in the run's recipe"),
]
TokensOption = Annotated[int, typer.Option(min=1, metavar="N", help="Most tokens to generate.")]
TemperatureOption = Annotated[
    float, typer.Option(min=0, metavar="T", help="Sampling temperature; 0: always the most likely token.")
]
TopKOption = Annotated[int | None, typer.Option(min=1, metavar="K", help="Sample among the K most likely tokens.")]
SeedOption = Annotated[int, typer.Option(metavar="S", help="Seed of the sampling.")]

BackendOption = Annotated[str, typer.Option(metavar="BACKEND", help="Backend: local, slurm, kubernetes or ray.")]
NprocOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Workers on each node.",
        show_default="as the recipe's parallelism requires, else one per GPU, else 1",
    ),
]
NodesOption = Annotated[
    str,
    typer.Option(
        metavar="N|MIN:MAX", help="Number of nodes. MIN:MAX: train while MIN are left, and take in nodes that return."
    ),
]
GpusOption = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="GPUs on each node.", show_default="local: one per worker, or all"),
]
CpusOption = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="CPU cores on each node.", show_default="the job's share of a node, or a few a worker"
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory on each node, such as 64G.",
        show_default="the backend's, or a share by GPUs on slurm",
    ),
]
TimeLimitOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Time limit of each attempt: seconds, or such as 30s, 15min, 2h, 1d, 01:30:00.",
        show_default="none",
    ),
]
BackendOptionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--backend-option",
        "-o",
        metavar="KEY=VALUE",
        help="Backend option, such as partition=gpu (repeatable); see below.",
    ),
]
SnapshotOption = Annotated[str | None, typer.Option(metavar="workdir", help="Run a copy of the recipe's directory.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Resume although the recipe or the data changed.")]


def name_output(recipe: str, kind: str) -> Path:
    """The file for a planned or tuned recipe: next to the recipe, or of a URL in this directory."""
    path = Path(recipe.rpartition("/")[2] if is_url(recipe) else recipe)
    return path.with_name(f"{path.stem}.{kind}.yaml")


class BackendOptionsCommand(TyperCommand):
    """List the options of each backend in the help of a command; they are imported only for that."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if any(param.name == "backend_option" for param in self.params):
            from phalanx.jobs.backends.base import OPTION_CLASSES, list_option_help

            for backend in OPTION_CLASSES:
                with formatter.section(f"Backend options with --on {backend}"):
                    formatter.write_dl(
                        (f"-o {each.name}={each.value_type}", f"{each.help}{f'  [{each.note}]' if each.note else ''}")
                        for each in list_option_help(backend)
                    )
        super().format_epilog(ctx, formatter)


def print_warning(text: str) -> None:
    """Print a warning; control characters in it are escaped, since a run may come from a stranger."""
    print(f"warning: {escape_control_chars(text)}", file=sys.stderr)
