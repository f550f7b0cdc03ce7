"""`phalanx generate` and `phalanx chat`: print text from a model while it is generated, and talk with it."""

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli import options
from phalanx.errors import UsageError
from phalanx.std_streams import escape_control_chars

if TYPE_CHECKING:
    from phalanx.data.chat_template import Message


def generate(
    model: options.ModelArgument,
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
    tokens: options.TokensOption = 300,
    temperature: options.TemperatureOption = 0.8,
    top_k: options.TopKOption = None,
    seed: options.SeedOption = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue behind the end of a text, which is shown in brackets.")
    ] = False,
    step: options.StepOption = None,
    best: options.BestOption = False,
    trust_code: options.TrustCodeOption = False,
    device: options.DeviceOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Generate text with a language model: continue a text, or answer a message.

    A model with a chat template, as after `task: chat`, answers, up to its end-of-turn token.
    """
    from phalanx.app.evaluate import CheckpointSelection
    from phalanx.app.generate import SamplingOptions, generate_text, load_text_model

    text_model = load_text_model(model, CheckpointSelection(step, best, trust_code), device, options.print_warning)
    answers = text_model.chat is not None and not raw
    message = {"role": "user", "content": prompt}
    encoded = text_model.encode_messages([message]) if answers else text_model.encode_text(prompt)
    ends: list[tuple[str, int]] = []
    sampling = SamplingOptions(tokens, temperature, top_k, seed)
    pieces = generate_text(
        text_model, encoded, sampling, ignore_end=ignore_eos, report_end=lambda name, num: ends.append((name, num))
    )
    if as_json:
        text = "".join(pieces)
        end, count = ends[0] if ends else (None, tokens)
        typer.echo(json.dumps({"prompt": encoded.text, "text": text, "num_tokens": count, "end": end}))
        return
    if show_prompt or not answers:
        sys.stdout.write(encoded.text)
    for piece in pieces:
        _print_piece(piece)
    sys.stdout.write("\n")
    sys.stdout.flush()
    for name, count in ends:
        if count < tokens and not answers:  # an answer ends with its turn
            print(f"the text ended with {name} after {count} tokens; --ignore-eos continues behind it", file=sys.stderr)


def chat(
    model: options.ModelArgument,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.", show_default="none")] = None,
    tokens: options.TokensOption = 1000,
    temperature: options.TemperatureOption = 0.8,
    top_k: options.TopKOption = None,
    seed: options.SeedOption = 0,
    step: options.StepOption = None,
    best: options.BestOption = False,
    trust_code: options.TrustCodeOption = False,
    device: options.DeviceOption = None,
) -> None:
    """Talk with a model that has a chat template: after `task: chat`, or a Hugging Face directory.

    /clear forgets the dialogue, /exit or Ctrl-D ends it, and Ctrl-C stops an answer. When the context is full, the
    oldest turns are left out.
    """
    from phalanx.app.evaluate import CheckpointSelection
    from phalanx.app.generate import SamplingOptions, answer_dialogue, fit_dialogue, load_text_model

    text_model = load_text_model(model, CheckpointSelection(step, best, trust_code), device, options.print_warning)
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    # a template that refuses messages, or is missing, is reported before anything is typed
    text_model.encode_messages([*first, {"role": "user", "content": "-"}])
    sampling = SamplingOptions(tokens, temperature, top_k, seed)
    messages = list(first)
    for text in _read_lines():
        if text == "/clear":
            messages = list(first)
            continue
        try:
            dialogue = fit_dialogue(text_model, [*messages, {"role": "user", "content": text}], tokens)
        except UsageError as error:
            _print_note(str(error))
            continue
        answer = _print_answer(answer_dialogue(text_model, dialogue, sampling, _print_note))
        messages = [*dialogue.messages, {"role": "assistant", "content": answer}] if answer else messages


def _read_lines() -> Iterator[str]:
    """Yield what the user types, up to /exit or the end of the input."""
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D ends)")
            continue
        if text == "/exit":
            return
        if text:
            yield text


def _print_answer(pieces: Iterator[str]) -> str:
    """Print the pieces of an answer as they come, until Ctrl-C; return what was printed."""
    printed: list[str] = []
    try:
        for piece in pieces:
            printed.append(piece)
            _print_piece(piece)
    except KeyboardInterrupt:
        _print_note("stopped")
    sys.stdout.write("\n")
    return "".join(printed)


def _print_piece(piece: str) -> None:
    """Print a piece of a text at once; what a model writes may steer a terminal."""
    sys.stdout.write(escape_control_chars(piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


def _print_note(note: str) -> None:
    sys.stdout.flush()
    print(f"\n({escape_control_chars(note)})", file=sys.stderr)
