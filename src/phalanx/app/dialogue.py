"""Answer the messages of a dialogue with a language model, within what it sees at once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.app.generate import SamplingOptions, TextModel, generate_text
from phalanx.data.chat import Prompt
from phalanx.data.chat_template import Message
from phalanx.errors import UsageError

RESERVED_SHARE = 4
"""One of this many parts of the context is kept free for an answer, unless that has fewer tokens."""


@dataclass(frozen=True)
class FittedDialogue:
    """The messages that fit the model's context, the prompt made of them, and the number of older ones left out."""

    messages: Sequence[Message]
    prompt: Prompt
    num_dropped: int


def fit_dialogue(text_model: TextModel, messages: Sequence[Message], num_tokens: int) -> FittedDialogue:
    """Leave out the oldest turns until the others and an answer of `num_tokens` tokens, or the reserved share of the
    context, fit. System messages stay. Raises UsageError if the last turn alone does not fit, or without a template."""
    reserved = min(num_tokens, text_model.window // RESERVED_SHARE)
    num_system = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    system, turns = list(messages[:num_system]), list(messages[num_system:])
    while True:
        prompt = text_model.encode_messages([*system, *turns])
        starts = [n for n, message in enumerate(turns) if n and message["role"] == "user"]
        free = text_model.window - len(prompt.tokens)
        if free >= reserved or (free > 0 and not starts):
            return FittedDialogue([*system, *turns], prompt, len(messages) - num_system - len(turns))
        if not starts:
            raise UsageError(
                f"the message has {len(prompt.tokens):,} tokens in the chat template, and the model sees "
                f"{text_model.window:,}; shorten it"
            )
        turns = turns[starts[0] :]


def answer_dialogue(
    text_model: TextModel,
    dialogue: FittedDialogue,
    sampling: SamplingOptions,
    report_note: Callable[[str], object] = lambda note: None,
) -> Iterator[str]:
    """Yield the pieces of the assistant's next message, up to its end-of-turn token. `report_note` gets why it may
    lack something: the context was full, or the answer was cut."""
    if dialogue.num_dropped:
        report_note(
            f"The context of {text_model.window:,} tokens is full: {dialogue.num_dropped} old messages left out."
        )
    free = text_model.window - len(dialogue.prompt.tokens)
    sampling = replace(sampling, num_tokens=min(sampling.num_tokens, free))
    ends: list[str] = []
    yield from generate_text(
        text_model, dialogue.prompt, sampling, report_end=lambda name, num_tokens: ends.append(name)
    )
    if not ends:
        cause = "the context is full" if sampling.num_tokens == free else "that is its limit"
        report_note(f"The answer was cut after {sampling.num_tokens} tokens: {cause}.")
