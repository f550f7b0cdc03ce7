"""`phalanx generate`: print text from a run's checkpoint while it is generated."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.ctrl_c import import_torch
from phalanx.cli.numbers import number
from phalanx.cli.stderr import print_warning
from phalanx.std_streams import escape_control_chars


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    prompt: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Text to continue. Names of control tokens in it, such as <|im_start|>, are these tokens. It begins "
            "as the documents do that were trained on.",
        ),
    ] = "def ",
    tokens: Annotated[int, typer.Option(min=1, max=10**9, metavar="N", help="Number of tokens to generate.")] = 300,
    temperature: Annotated[
        float,
        typer.Option(
            min=0, max=1e6, callback=number, metavar="T", help="Sampling temperature; 0: always the most likely token."
        ),
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(min=1, max=10**9, metavar="K", help="Sample among the K most likely tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, metavar="S", help="Seed of the sampling.")] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue behind the end of a text, which is shown in brackets.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(min=0, max=10**10, metavar="N", help="Step of the checkpoint.", show_default="newest")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Use the checkpoint with the lowest validation loss.")] = False,
    trust_code: Annotated[
        bool,
        typer.Option("--trust-code", help="Import the run's code even if you did not train with it on this machine."),
    ] = False,
) -> None:
    """Generate text with a language model from a run's checkpoint."""
    from phalanx.run import Run

    run_dir = Run.open_existing(run)
    import_torch()
    from phalanx.app.generate import SamplingOptions, generate_text
    from phalanx.app.trained_model import CheckpointSelection

    sampling = SamplingOptions(tokens, temperature, top_k, seed)
    stops: list[str] = []
    pieces = generate_text(
        run_dir,
        CheckpointSelection(step, best, trust_code),
        prompt,
        sampling,
        print_warning,
        ignore_end=ignore_eos,
        report_stop=stops.append,
    )
    shown = escape_control_chars if sys.stdout.isatty() else str  # what a model writes may steer a terminal
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(shown(piece))
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    for stop in stops:
        print(stop, file=sys.stderr)
