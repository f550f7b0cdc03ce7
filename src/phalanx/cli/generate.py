"""`phalanx generate`: text from a run's checkpoint, printed as it comes."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.numbers import number
from phalanx.errors import DataError, UsageError


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.")],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What the text begins with.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, max=10**9, metavar="N", help="How many tokens to add.")] = 300,
    temperature: Annotated[
        float, typer.Option(min=0, max=1e6, callback=number, help="0 takes the likeliest token, 1 samples freely.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(min=1, max=10**9, metavar="K", help="Sample among the K likeliest.")
    ] = None,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="The same seed gives the same text.")] = 0,
    step: Annotated[
        int | None, typer.Option(min=0, max=10**10, metavar="N", help="Which checkpoint.", show_default="newest")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint with the lowest held-out loss.")] = False,
    trust_code: Annotated[
        bool,
        typer.Option("--trust-code", help="Import the run's code, also where you have not trained with it."),
    ] = False,
) -> None:
    """Continue a text with a language model that a run trained."""
    import codecs

    from phalanx.run import Run
    from phalanx.streams import printable

    found = Run.existing(run)
    import torch

    from phalanx.data import load_tokenizer
    from phalanx.train.generate import generate as continuation
    from phalanx.train.trained import load_trained

    trained = load_trained(found, step, best, torch.device("cpu"), trust_code)
    if trained.facts.kind != "tokens" or trained.facts.sequence is None:
        raise UsageError(f"{run}: this run's model does not write text; it was trained on {trained.facts.kind}")
    for note in trained.notes:
        print(f"warning: {printable(note)}", file=sys.stderr)
    tokenizer = load_tokenizer(found.tokenizer if found.tokenizer.exists() else "bytes")
    if tokenizer.vocab != trained.facts.vocab:
        what = f"has {tokenizer.vocab:,} tokens" if found.tokenizer.exists() else "is missing"
        raise DataError(f"{found.tokenizer}: {what}, and the model was trained on {trained.facts.vocab:,} tokens")
    start = [int(token) for token in tokenizer.encode(prompt)]
    if not start:
        raise UsageError("--prompt: give at least one character to continue")
    stream = continuation(
        trained.model,
        start,
        tokens=tokens,
        window=trained.facts.sequence,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        device=torch.device("cpu"),
    )
    shown = printable if sys.stdout.isatty() else str  # what a model writes may steer a terminal
    sys.stdout.write(prompt)
    if tokenizer.name == "bytes":
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in stream:
            sys.stdout.write(shown(decoder.decode(bytes([token]))))
            sys.stdout.flush()
    else:
        # Tokens of a byte-pair tokenizer may end within a character: decode all of it, print what is new.
        written, produced = "", list[int]()
        for token in stream:
            produced.append(token)
            text = tokenizer.decode(produced)
            if not text.endswith("\ufffd"):
                sys.stdout.write(shown(text[len(written) :]))
                sys.stdout.flush()
                written = text
    sys.stdout.write("\n")
