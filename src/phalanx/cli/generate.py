"""`phalanx generate`: print text from a run's checkpoint while it is generated."""

import sys
from typing import Annotated

import typer

from phalanx.cli.options import BestOption, RunArgument, StepOption, TrustCodeOption, print_warning
from phalanx.std_streams import escape_control_chars


def generate(
    run: RunArgument,
    prompt: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Text to continue. Names of control tokens in it, such as <|im_start|>, are these tokens. It begins "
            "as the documents do that were trained on.",
        ),
    ] = "def ",
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Number of tokens to generate.")] = 300,
    temperature: Annotated[
        float, typer.Option(min=0, metavar="T", help="Sampling temperature; 0: always the most likely token.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Sample among the K most likely tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="Seed of the sampling.")] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue behind the end of a text, which is shown in brackets.")
    ] = False,
    step: StepOption = None,
    best: BestOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Generate text with a language model from a run's checkpoint."""
    from phalanx.run import Run

    run_dir = Run.open_existing(run)
    from phalanx.app.evaluate import CheckpointSelection, SamplingOptions, generate_text

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
