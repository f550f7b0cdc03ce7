"""`phalanx generate`: print text from a run's checkpoint while it is generated."""

import json
import sys
from typing import Annotated

import typer

from phalanx.cli.options import (
    BestOption,
    DeviceOption,
    JsonOption,
    ModelArgument,
    SeedOption,
    StepOption,
    TemperatureOption,
    TokensOption,
    TopKOption,
    TrustCodeOption,
    print_warning,
)
from phalanx.std_streams import escape_control_chars


def generate(
    model: ModelArgument,
    prompt: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="A user's message if the model has a chat template; names of control tokens in it are text. Else, and "
            "with --raw, a text to continue: it begins as the documents do that were trained on, and names of control "
            "tokens in it, such as <|im_start|>, are these tokens.",
        ),
    ] = "def ",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    show_prompt: Annotated[
        bool, typer.Option("--show-prompt", help="Print the prompt as the template renders it.")
    ] = False,
    tokens: TokensOption = 300,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = None,
    seed: SeedOption = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue behind the end of a text, which is shown in brackets.")
    ] = False,
    step: StepOption = None,
    best: BestOption = False,
    trust_code: TrustCodeOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Generate text with a language model: continue a text, or answer a message.

    A model with a chat template, as after `task: chat`, answers, up to its end-of-turn token.
    """
    from phalanx.app.evaluate import CheckpointSelection
    from phalanx.app.generate import SamplingOptions, generate_text, load_text_model

    text_model = load_text_model(model, CheckpointSelection(step, best, trust_code), device, print_warning)
    answers = text_model.chat is not None and not raw
    encoded = (
        text_model.encode_messages([{"role": "user", "content": prompt}]) if answers else text_model.encode_text(prompt)
    )
    ends: list[tuple[str, int]] = []
    pieces = generate_text(
        text_model,
        encoded,
        SamplingOptions(tokens, temperature, top_k, seed),
        ignore_end=ignore_eos,
        report_end=lambda name, count: ends.append((name, count)),
    )
    if as_json:
        text = "".join(pieces)
        end, count = ends[0] if ends else (None, tokens)
        typer.echo(json.dumps({"prompt": encoded.text, "text": text, "num_tokens": count, "end": end}))
        return
    if show_prompt or not answers:
        sys.stdout.write(encoded.text)
    shown = escape_control_chars if sys.stdout.isatty() else str  # what a model writes may steer a terminal
    for piece in pieces:
        sys.stdout.write(shown(piece))
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    for name, count in ends:
        if count < tokens and not answers:  # an answer ends with its turn
            print(f"the text ended with {name} after {count} tokens; --ignore-eos continues behind it", file=sys.stderr)
