"""`phalanx chat`: a dialogue with a model in the terminal."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.options import (
    BestOption,
    DeviceOption,
    ModelArgument,
    SeedOption,
    StepOption,
    TemperatureOption,
    TokensOption,
    TopKOption,
    TrustCodeOption,
    print_warning,
)
from phalanx.errors import UsageError
from phalanx.std_streams import escape_control_chars

if TYPE_CHECKING:
    from phalanx.data.chat_template import Message


def chat(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.", show_default="none")] = None,
    tokens: TokensOption = 1000,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = None,
    seed: SeedOption = 0,
    step: StepOption = None,
    best: BestOption = False,
    trust_code: TrustCodeOption = False,
    device: DeviceOption = None,
) -> None:
    """Talk with a model that has a chat template: after `task: chat`, or a Hugging Face directory.

    /clear forgets the dialogue, /exit or Ctrl-D ends it, and Ctrl-C stops an answer. When the context is full, the
    oldest turns are left out.
    """
    from phalanx.app.evaluate import CheckpointSelection
    from phalanx.app.generate import SamplingOptions, answer_dialogue, fit_dialogue, load_text_model

    text_model = load_text_model(model, CheckpointSelection(step, best, trust_code), device, print_warning)
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
    shown = escape_control_chars if sys.stdout.isatty() else str  # what a model writes may steer a terminal
    try:
        for piece in pieces:
            printed.append(piece)
            sys.stdout.write(shown(piece))
            sys.stdout.flush()
    except KeyboardInterrupt:
        _print_note("stopped")
    sys.stdout.write("\n")
    return "".join(printed)


def _print_note(note: str) -> None:
    sys.stdout.flush()
    print(f"\n({escape_control_chars(note)})", file=sys.stderr)
