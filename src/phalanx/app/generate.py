"""Write text with a language model: that of a run's checkpoint, or of a Hugging Face directory."""

import datetime
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from phalanx.app.evaluate import CheckpointSelection, ReportWarning, load_model
from phalanx.data import DataInfo, Tokenizer
from phalanx.data.chat import ChatEncoder, ChatPlan, Prompt
from phalanx.data.chat_template import Message, find_chat_template
from phalanx.data.rows import BadRowError
from phalanx.data.tokenizers import find_stop_tokens, load_run_tokenizer, load_tokenizer, show_control_token
from phalanx.errors import DataError, UsageError
from phalanx.recipe.data_schema import ChatConfig
from phalanx.recipe.imports import HF_CONFIG_FILE, HF_PREFIX
from phalanx.recipe.locations import huggingface_directory
from phalanx.run import Run
from phalanx.storage.url import is_url
from phalanx.train.distributed.environment import dist_env_from_environment
from phalanx.train.hf.config import get_text_config
from phalanx.train.hf.model import build_with_weights
from phalanx.train.inference import SamplingOptions as SamplingOptions
from phalanx.train.inference import generate_tokens, given_device


@dataclass(frozen=True)
class TextModel:
    """A language model in evaluation mode, with what turns text into its tokens and back."""

    location: str
    model: nn.Module
    tokenizer: Tokenizer
    window: int
    """Most tokens that the model sees at once."""
    device: torch.device
    ends: frozenset[int]
    """Tokens that end a text or a turn."""
    chat: ChatEncoder | None = None
    """Renders messages; None without a chat template."""

    def encode_text(self, text: str) -> Prompt:
        """Return the prompt of a text to continue, in which names of control tokens are these tokens. Raises UsageError
        if it is empty."""
        if not (tokens := self.tokenizer.encode_prompt(text)):
            raise UsageError("--prompt: give at least one character to continue")
        return Prompt(text, tokens)

    def encode_messages(self, messages: Sequence[Message]) -> Prompt:
        """Return the prompt of messages to answer, in which names of control tokens are text. Raises UsageError without
        a chat template, or if it refuses the messages."""
        if self.chat is None:
            raise UsageError(
                f"{self.location}: has no chat template, so it knows no messages; `phalanx generate` continues a text, "
                "and a run of `task: chat` keeps the template that it was trained with"
            )
        try:
            return self.chat.encode_prompt(messages)
        except BadRowError as error:
            raise UsageError(f"{self.location}: {error}") from None


def load_text_model(
    location: str, selection: CheckpointSelection, device: str | None = None, warn: ReportWarning = lambda text: None
) -> TextModel:
    """Load a language model with its tokenizer and chat template.

    Args:
        location: a run, its URL, or a Hugging Face directory.
        device: default: the `device` of the run's recipe; of a Hugging Face directory `auto`.
        warn: called for what of a run is lost or damaged.

    Raises:
        UsageError: there is no such model or checkpoint, or it is no language model.
        DataError: the checkpoint is damaged, or the tokenizer is not that of the training.
    """
    if (directory := find_huggingface_model(location)) is None:
        return _load_from_run(Run.open_existing(location), selection, device, warn)
    if selection != CheckpointSelection():
        raise UsageError(f"{location}: is a Hugging Face directory, without steps; leave out --step and --best")
    return _load_huggingface(location, directory, device or "auto")


def find_huggingface_model(location: str) -> Path | None:
    """Return the Hugging Face directory at a path, or the local copy of `hf://OWNER/NAME`; None for a run."""
    path = Path(location)
    if location.startswith(f"{HF_PREFIX}//"):
        return huggingface_directory(location, None, "DIR")
    is_model = not is_url(location) and (path / HF_CONFIG_FILE).is_file() and not Run(path).has_started()
    return path if is_model else None


def _load_huggingface(location: str, directory: Path, device_name: str) -> TextModel:
    tokenizer = load_tokenizer(directory)
    device = dist_env_from_environment({}, device_name).device
    facts = DataInfo("tokens", tokenizer.vocab_size, None, None, None)
    model = build_with_weights(directory, {}, facts, device).eval()
    window = getattr(get_text_config(model.config), "max_position_embeddings", None) or sys.maxsize
    ends = _join_ends(tokenizer, find_stop_tokens(directory))
    text_model = TextModel(location, model, tokenizer, window, device, ends)
    return _add_chat(text_model, directory, _today())


def _load_from_run(run: Run, selection: CheckpointSelection, device: str | None, warn: ReportWarning) -> TextModel:
    torch_device = dist_env_from_environment({}, device or given_device(run)).device
    trained = load_model(run, selection, torch_device, warn)
    facts = trained.facts
    if facts.kind != "tokens" or facts.seq_len is None:
        raise UsageError(f"{run.location}: this run's model does not write text; it was trained on {facts.kind}")
    described = run.read_json_or_empty(run.plan).get("tokenizer")
    tokenizer = load_run_tokenizer(run.tokenizer, described, run.companions)
    if tokenizer.vocab_size != facts.vocab_size:
        what = f"has {tokenizer.vocab_size:,} tokens" if run.tokenizer.exists() else "is missing"
        raise DataError(f"{run.tokenizer}: {what}, and the model was trained on {facts.vocab_size:,} tokens")
    stops = described.get("stops") if isinstance(described, dict) else None
    ends = _join_ends(tokenizer, stops if isinstance(stops, list) else [])
    text_model = TextModel(run.location, trained.model, tokenizer, facts.seq_len, torch_device, ends)
    chat = trained.recipe.data.chat
    return _add_chat(text_model, run.companions, _today() if chat is None else chat.date)


def _join_ends(tokenizer: Tokenizer, stops: Sequence[int]) -> frozenset[int]:
    separator = tokenizer.separator_token
    return frozenset([*stops, *([] if separator is None else [separator])])


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def _add_chat(text_model: TextModel, directory: Path, date: datetime.date | None) -> TextModel:
    """Return the model with the chat template of a directory, if it has one. `date`: what the template writes as the
    day's, None where it was trained without one."""
    if (template := find_chat_template(directory)) is None:
        return text_model
    encoder = ChatEncoder(ChatPlan(ChatConfig(date=date), template), text_model.tokenizer)
    end_of_turn: list[int] = []
    with suppress(BadRowError):  # a template that cannot be trained on: the model's own ends are all there is
        end_of_turn.append(encoder.find_end_of_turn())
    return replace(text_model, chat=encoder, ends=text_model.ends.union(end_of_turn))


def generate_text(
    text_model: TextModel,
    prompt: Prompt,
    sampling: SamplingOptions,
    *,
    ignore_end: bool = False,
    report_end: Callable[[str, int], object] = lambda name, num_tokens: None,
) -> Iterator[str]:
    """Yield the pieces of text that continue a prompt, as they are generated, up to the end of the text.

    Args:
        ignore_end: continue behind the end of a text, which is shown as the name of its token in brackets.
        report_end: called with the token that ended the text, and the number of tokens with it.
    """
    tokenizer = text_model.tokenizer
    tokens = generate_tokens(text_model.model, prompt.tokens, sampling, text_model.window, text_model.device)
    if ignore_end:
        return decode_incrementally(tokenizer, tokens, text_model.ends)

    def report(token: int, count: int) -> None:
        report_end(tokenizer.control_tokens.get(token, f"token {token}"), count)

    return decode_incrementally(tokenizer, _until_end(tokens, text_model.ends, report))


def _until_end(tokens: Iterator[int], ends: Collection[int], report: Callable[[int, int], None]) -> Iterator[int]:
    """Return the tokens before the first that ends a text; report that one, and how many tokens there are with it."""
    for count, token in enumerate(tokens, 1):
        if token in ends:
            report(token, count)
            return
        yield token


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
        full = f"The context of {text_model.window:,} tokens is full"
        report_note(f"{full}: {dialogue.num_dropped} old messages left out.")
    free = text_model.window - len(dialogue.prompt.tokens)
    sampling = replace(sampling, num_tokens=min(sampling.num_tokens, free))
    ends: list[str] = []
    yield from generate_text(text_model, dialogue.prompt, sampling, report_end=lambda name, _: ends.append(name))
    if not ends:
        cause = "the context is full" if sampling.num_tokens == free else "that is its limit"
        report_note(f"The answer was cut after {sampling.num_tokens} tokens: {cause}.")


def decode_incrementally(
    tokenizer: Tokenizer, tokens: Iterator[int], ends: Collection[int] = frozenset()
) -> Iterator[str]:
    """Decode tokens one by one, and show those that end a text. A token may end within a character, which is then held
    back until it is whole, or the text is over."""
    pending: list[int] = []
    decoded = ""
    for token in tokens:
        is_end = token in ends
        if not is_end:
            pending.append(token)
        # The text of a byte-pair token depends on those before it: decode all, and show what is new.
        text = tokenizer.decode(pending)
        new = text[len(decoded) :] if is_end or not text.endswith("\ufffd") else ""
        decoded += new
        yield new
        if is_end:
            yield show_control_token(tokenizer.control_tokens.get(token, str(token)))
            pending = []
            decoded = ""
    if rest := tokenizer.decode(pending)[len(decoded) :]:
        yield rest
