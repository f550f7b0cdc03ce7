"""`phalanx generate`: text from a run's checkpoint, printed as it comes."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.numbers import number
from phalanx.errors import DataError, UsageError


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, max=10**9, metavar="N", help="Number of tokens to generate.")] = 300,
    temperature: Annotated[
        float,
        typer.Option(min=0, max=1e6, callback=number, help="Sampling temperature; 0: always the most likely token."),
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(min=1, max=10**9, metavar="K", help="Sample among the K most likely tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Seed of the sampling.")] = 0,
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
    import codecs

    from phalanx.run import Run
    from phalanx.std_streams import escape_control_chars

    run_dir = Run.open_existing(run)
    import torch

    from phalanx.data import load_tokenizer
    from phalanx.train.inference import generate_tokens as continuation
    from phalanx.train.inference import load_trained_model

    trained = load_trained_model(run_dir, step, best, torch.device("cpu"), trust_code)
    if trained.facts.kind != "tokens" or trained.facts.seq_len is None:
        raise UsageError(f"{run}: this run's model does not write text; it was trained on {trained.facts.kind}")
    for note in trained.notes:
        print(f"warning: {escape_control_chars(note)}", file=sys.stderr)
    tokenizer = load_tokenizer(run_dir.tokenizer if run_dir.tokenizer.exists() else "bytes")
    if tokenizer.vocab_size != trained.facts.vocab_size:
        what = f"has {tokenizer.vocab_size:,} tokens" if run_dir.tokenizer.exists() else "is missing"
        raise DataError(
            f"{run_dir.tokenizer}: {what}, and the model was trained on {trained.facts.vocab_size:,} tokens"
        )
    start = [int(token) for token in tokenizer.encode(prompt)]
    if not start:
        raise UsageError("--prompt: give at least one character to continue")
    stream = continuation(
        trained.model,
        start,
        tokens=tokens,
        window=trained.facts.seq_len,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        device=torch.device("cpu"),
    )
    shown = escape_control_chars if sys.stdout.isatty() else str  # what a model writes may steer a terminal
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
