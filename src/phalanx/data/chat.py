"""Turn records of conversations into tokens with marks: what is in the loss, where sequences begin, what is rejected.

The loss mask needs no tags in the template: an assistant message is what its rendering adds to that of the messages
before it, up to its end-of-turn token. A template that renders earlier messages otherwise once others follow them, as
those that drop reasoning do, gives a sequence for each assistant message: what the model sees when it answers.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.chat_images import (
    ImageProcessor,
    count_images,
    find_images,
    is_image,
    pack_files,
    put_images,
    read_image_file,
)
from phalanx.data.chat_template import ChatTemplate, Message, RenderedChat, Span, TemplateRenderer
from phalanx.data.manifest import LOSS_BIT, REJECTED_BIT, SEQUENCE_BIT, TOKEN_MASK
from phalanx.data.rows import BadRowError
from phalanx.data.text_records import encode_texts, margin_to_number
from phalanx.data.tokenizers import Tokenizer
from phalanx.errors import RecipeError
from phalanx.recipe.data_schema import ChatConfig

PAIRED_RECORDS = ("pairs", "rewards")
"""Records of a chosen and a rejected conversation."""
MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
_HIDDEN_NAME = re.compile("\ufdd0(\\d+)\ufdd1")
"""Stands for the name of a control token in a message, which is text: characters that are in no text."""
_OTHER_ANSWER: Message = {"role": "assistant", "content": "\ufdd4"}
"""An answer that shares no character with any other."""
_PARTIAL_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
_RESERVED_CHARACTERS = dict.fromkeys((0, *range(0xFDD0, 0xFDD5)), "\ufffd")
"""What stands for marks here and in chat_template.py, and the separator of bytes: in a message they are replaced."""
_SHOWN_CHARACTERS = 400
MarkedTokens = npt.NDArray[np.uint32]
"""Tokens [n] with LOSS_BIT, SEQUENCE_BIT and REJECTED_BIT."""


@dataclass(frozen=True)
class ChatPlan:
    """What turns records into tokens, besides the tokenizer."""

    config: ChatConfig
    template: ChatTemplate | None
    """None: records have `prompt` and `completion` as plain text only."""
    processor: Mapping[str, str] | None = None
    """The settings of the model's processor, by file; None: conversations have no images."""

    def to_json(self) -> str:
        """Return it for the cache's key and the processes that prepare data."""
        left_out = {"too_long", "images"}  # used later, when documents are packed; and said by the processor
        if self.config.classes is None:
            left_out |= {"classes"}  # as the keys of conversations have always been
        template = None if self.template is None else asdict(self.template)
        values = {"config": self.config.model_dump(mode="json", exclude=left_out), "template": template}
        values |= {} if self.processor is None else {"processor": dict(self.processor)}
        return json.dumps(values, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "ChatPlan":
        """Return what `to_json` wrote."""
        values = json.loads(text)
        template = None if values["template"] is None else ChatTemplate(**values["template"])
        return cls(ChatConfig.model_validate(values["config"]), template, values.get("processor"))


@dataclass(frozen=True)
class Conversation:
    """Messages to render, or plain texts to join, with what a record passes to the template."""

    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    completion: str = ""
    tools: Sequence[Any] | None = None
    variables: Mapping[str, Any] | None = None
    images: Sequence[str] = ()
    """What stands for each image in the text."""


def read_conversations(record: Any, records: str) -> list[tuple[Conversation, bool]]:
    """Return the conversations of a record, each with whether it is rejected: one, or a chosen and a rejected one.
    Raises BadRowError for a record that has none."""
    if not isinstance(record, dict):
        raise BadRowError("without a JSON object", f"expected a JSON object, found {type(record).__name__}")
    if records == "chat":
        return [(_read_conversation(record), False)]
    is_pair = "chosen" in record or "rejected" in record
    if records == "labels" and not is_pair:
        if not isinstance(record.get("label"), bool):
            raise _missing(record, "`label` true or false, or `chosen` and `rejected`")
        return [(_read_conversation(record), not record["label"])]
    for key in ("chosen", "rejected"):
        if not isinstance(record.get(key), (str, list)) or not record[key]:
            raise _missing(record, "`chosen` and `rejected`, each a text or messages")
    return [(_read_answer(record, key), key == "rejected") for key in ("chosen", "rejected")]


def _missing(record: Mapping[str, Any], expected: str) -> BadRowError:
    names = ", ".join(map(repr, record)) or "none"
    return BadRowError("without a conversation", f"expected {expected}; the record has {names}", RecipeError)


def _read_answer(record: Mapping[str, Any], key: str) -> Conversation:
    """One answer of a preference: whole messages, or what follows `prompt`."""
    answer, prompt = record[key], record.get("prompt")
    if isinstance(answer, str):
        if isinstance(prompt, list):
            answer = [{"role": "assistant", "content": answer}]
        else:
            return _read_conversation({"prompt": prompt, "completion": answer})
    before = prompt if isinstance(prompt, list) else []
    roles = [message.get("role") for message in answer if isinstance(message, dict)]
    if isinstance(prompt, str) and "user" not in roles:
        before = [{"role": "user", "content": prompt}]
    return _read_conversation({**record, "messages": [*before, *answer], "prompt": None})


def _read_conversation(record: Mapping[str, Any]) -> Conversation:
    tools, variables = record.get("tools"), record.get("chat_template_kwargs")
    tools = _parse_json_text(tools, "tools") if isinstance(tools, str) else tools
    raw = record.get("messages")
    if raw is None and "conversations" in record:
        raw = _from_sharegpt(record)
    prompt, completion = record.get("prompt"), record.get("completion")
    if raw is None and isinstance(prompt, list):
        answer = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
        raw = [*prompt, *answer]
    if raw is None:
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise _missing(record, "`messages`, `conversations`, or `prompt` and `completion`")
        if not completion.strip():
            raise BadRowError("with an empty answer", "`completion` is empty")
        return Conversation(prompt=prompt, completion=completion)
    if not isinstance(raw, list) or not raw:
        raise BadRowError("without a conversation", f"messages: expected a list, found {type(raw).__name__}")
    messages = tuple(_read_message(number, message) for number, message in enumerate(raw))
    roles = [message["role"] for message in messages]
    if "user" not in roles or "assistant" not in roles[roles.index("user") :]:
        raise BadRowError("without a question and an answer", f"messages: a user and then an assistant; found {roles}")
    return Conversation(messages, tools=tools or None, variables=variables)


def _from_sharegpt(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    turns = record["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadRowError("without a conversation", "conversations: expected a list of objects")
    if any("role" in turn for turn in turns):
        return [*system, *turns]
    return system + [
        {"role": _SHAREGPT_ROLES.get(str(turn.get("from")), str(turn.get("from"))), "content": turn.get("value")}
        for turn in turns
    ]


def _read_message(number: int, message: Any) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message, dict):
        raise BadRowError("with a message that is none", f"{where}: expected an object, found {type(message).__name__}")
    # Tables have a column for each key of any record: null stands for a missing one.
    values = {key: value for key, value in message.items() if value is not None}
    role, content = values.get("role"), values.get("content", "")
    if role not in MESSAGE_ROLES:
        expected = f"expected one of {', '.join(MESSAGE_ROLES)}"
        raise BadRowError("with an unknown role", f"{where}.role: found {role!r}, {expected}")
    text = content
    if isinstance(content, list):
        text = "".join("" if is_image(part) else _part_text(where, part) for part in content)
        content = content if any(map(is_image, content)) else text
    if not isinstance(text, str):
        raise BadRowError("without text", f"{where}.content: expected text, found {type(content).__name__}")
    if calls := values.get("tool_calls"):
        values["tool_calls"] = [_read_tool_call(where, call) for call in calls]
    elif role == "assistant" and not text.strip():
        raise BadRowError("with an empty answer", f"{where}: the assistant's message is empty")
    return {**values, "content": content}


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise BadRowError("with a part that is no text", f"{where}.content: found a part of type {kind}, expected text")


def _read_tool_call(where: str, call: Any) -> Any:
    """A call with its arguments as an object: OpenAI's form has them as JSON in a text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRowError("with a tool call that is none", f"{where}.tool_calls: expected function.name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parse_json_text(arguments, f"{where}.tool_calls.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _parse_json_text(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadRowError("not JSON", f"{where}: not JSON ({error})") from None


@dataclass(frozen=True)
class Prompt:
    """What a model continues: a text, and its tokens with what begins a document."""

    text: str
    tokens: Sequence[int]


@dataclass(frozen=True)
class _TrainedText:
    """A rendered text, and the spans of it that the model is to write."""

    text: str
    spans: tuple[Span, ...]
    num_images: int = 0


class ChatEncoder:
    """Turns the records of one source into documents of marked tokens; with a processor of images each is followed by
    a document of image files."""

    def __init__(self, plan: ChatPlan, tokenizer: Tokenizer, images: ImageProcessor | None = None):
        self._config, self._tokenizer, self._images = plan.config, tokenizer, images
        self._renderer = None if plan.template is None else TemplateRenderer(plan.template, plan.config.date)
        names = [] if plan.config.allow_special_tokens else list(filter(None, tokenizer.control_tokens.values()))
        names = sorted([*names, *([] if images is None else [images.token])], key=len, reverse=True)
        self._hidden_names = re.compile("|".join(map(re.escape, names))) if names else None

    def encode(self, record: Any, data_file: str = "") -> list[MarkedTokens]:
        """Return the documents [n] of a record of `data_file`; a pair is one document of two sequences. Raises
        BadRowError for a record that cannot be trained on."""
        if self._images is not None:
            return list(self._encode_with_images(self._images, record, data_file))
        if self._config.records in ("classes", "texts"):
            return [encode_texts(record, self._config.classes, self._tokenizer)]
        sequences = [
            [self._mark(text, names, is_rejected) for text in texts]
            for conversation, is_rejected in read_conversations(record, self._config.records)
            for texts, names in [self._render(conversation)]
        ]
        if self._config.records == "rewards":
            return [np.concatenate([margin_to_number(record), *(texts[-1] for texts in sequences)])]
        if self._config.records == "pairs":
            return [np.concatenate([texts[-1] for texts in sequences])]
        return [tokens for texts in sequences for tokens in texts]

    def _encode_with_images(self, images: ImageProcessor, record: Any, data_file: str) -> Iterator[MarkedTokens]:
        [(conversation, _)] = read_conversations(record, self._config.records)
        files = [read_image_file(source, data_file) for source in find_images(conversation.messages, record)]
        texts, names = self._render(replace(conversation, images=images.expand(files)))
        for trained in texts:
            yield self._mark(trained, names, False)
            yield pack_files(files[: trained.num_images])

    def encode_prompt(self, messages: Sequence[Message]) -> Prompt:
        """Return messages as the template renders them up to where the assistant writes. Names of control tokens in
        them are text. Raises BadRowError if the template refuses them."""
        assert self._renderer is not None
        names: list[str] = []
        hidden = [self._hide_in_message(message, names) for message in messages]
        text = self._renderer.render(hidden, add_generation_prompt=True).text
        tokens = self._begin_document(self._encode(text, names)[0])
        return Prompt(_HIDDEN_NAME.sub(lambda match: names[int(match[1])], text), tokens.tolist())

    def find_end_of_turn(self) -> int:
        """Return the control token that ends an assistant's message. Raises BadRowError if the template puts none."""
        question, answer = ({"role": role, "content": "a"} for role in ("user", "assistant"))
        (document,) = self.encode({"messages": [question, answer]})
        return int(document[document & LOSS_BIT > 0][-1] & TOKEN_MASK)

    def _render(self, conversation: Conversation) -> tuple[list[_TrainedText], list[str]]:
        """The texts of a conversation, and the names that stand for text in them."""
        names: list[str] = []
        if conversation.prompt is not None:
            prompt = self._hide_control_names(conversation.prompt, names)
            completion = self._hide_control_names(conversation.completion, names)
            end = self._tokenizer.separator_token
            ending = "" if end is None else self._tokenizer.control_tokens[end]
            ending = "\0" if self._tokenizer.name == "bytes" else ending
            text = prompt + completion + ending
            return [_TrainedText(text, ((len(prompt), len(text)),))], names
        if self._renderer is None:
            why = "messages need a chat template: data.chat.template"
            raise BadRowError("without a chat template", why, RecipeError)
        messages = [self._hide_in_message(message, names) for message in conversation.messages]
        hidden = replace(conversation, tools=self._hide_in_texts(conversation.tools, names))
        return list(self._render_messages(messages, hidden)), names

    def _render_messages(self, messages: list[dict[str, Any]], conversation: Conversation) -> Iterator[_TrainedText]:
        assert self._renderer is not None
        whole, num_images = self._render_text(messages, conversation), count_images(messages)
        if self._config.train_on == "all":
            yield _TrainedText(whole.text, ((0, len(whole.text)),), num_images)
            return
        first_user = next(number for number, message in enumerate(messages) if message["role"] == "user")
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n > first_user]
        spans: list[Span] = []
        only_last = self._config.train_on == "last" or self._config.records in PAIRED_RECORDS
        for number in answers[-1:] if only_last else answers:
            through = self._render_text(messages[: number + 1], conversation).text
            before = self._find_prompt(messages[:number], conversation, through)
            if not through.startswith(before):
                why = (
                    f"messages[{number}]: its rendering does not begin with that of the messages before it, so what "
                    f"the model is to write is not known: {_shorten(before)} ... {_shorten(through)}"
                )
                raise BadRowError("refused by the chat template", why, RecipeError)
            for call in messages[number].get("tool_calls") or ():
                if call["function"]["name"] not in through[len(before) :]:
                    why = f"messages[{number}].tool_calls: the chat template leaves them out, so none would be learned"
                    raise BadRowError("with calls that the template leaves out", why, RecipeError)
            if whole.text.startswith(through):
                spans.append((len(before), len(through)))
            else:  # an earlier message is rendered otherwise once another follows
                yield _TrainedText(through, ((len(before), len(through)),), count_images(messages[: number + 1]))
        if spans:
            tagged = tuple(span for span in whole.generated if any(a <= span[0] < b for a, b in spans))
            yield _TrainedText(whole.text, tagged or tuple(spans), num_images)

    def _render_text(
        self, messages: Sequence[Message], conversation: Conversation, add_generation_prompt: bool = False
    ) -> RenderedChat:
        """The text of messages, with what stands for their images."""
        assert self._renderer is not None
        token, images = None if self._images is None else self._images.token, conversation.images
        expand = str if token is None else partial(put_images, token=token, images=images[: count_images(messages)])
        tools, variables = conversation.tools, conversation.variables
        return self._renderer.render(messages, tools, variables, add_generation_prompt, expand)

    def _find_prompt(self, messages: list[dict[str, Any]], conversation: Conversation, through: str) -> str:
        """Return the text before an assistant's message, which follows `messages` in the rendering `through`.

        A prompt may begin what the message does not have, such as `<think>`: then only what it shares with any message
        comes before.
        """
        prompt = self._render_text(messages, conversation, add_generation_prompt=True).text
        if through.startswith(prompt):
            return prompt
        before = self._render_text(messages, conversation).text
        answer = {**_OTHER_ANSWER, "content": self._hide_in_content(_OTHER_ANSWER["content"], [])}
        other = self._render_text([*messages, answer], conversation).text
        same = takewhile(lambda letters: len(set(letters)) == 1, zip(prompt, other, through, strict=False))
        header = _PARTIAL_TAG.sub("", "".join(letters[0] for letters in same))
        return header if header.startswith(before) else before

    def _hide_in_message(self, message: Message, names: list[str]) -> dict[str, Any]:
        dropped = "reasoning_content" if self._config.reasoning == "drop" else None
        return {
            key: value if key == "role" else self._hide_in_texts(value, names)
            for key, value in message.items()
            if key not in (dropped, "content")
        } | {"content": self._hide_in_content(message["content"], names)}

    def _hide_in_content(self, content: Any, names: list[str]) -> Any:
        """Content for the template: a text, or with a processor of images a list of parts."""
        if self._images is None and isinstance(content, str):
            return self._hide_control_names(content, names)
        if self._images is None:
            why = "found a part of type image; give data.chat.images: true for a vision-language model"
            raise BadRowError("with a part that is no text", why, RecipeError)
        parts = [{"text": content}] if isinstance(content, str) else content
        return [
            {"type": "image"}
            if is_image(part)
            else {"type": "text", "text": self._hide_control_names(part["text"], names)}
            for part in parts
        ]

    def _hide_in_texts(self, value: Any, names: list[str]) -> Any:
        if isinstance(value, str):
            return self._hide_control_names(value, names)
        if isinstance(value, list):
            return [self._hide_in_texts(each, names) for each in value]
        if isinstance(value, dict):
            return {key: self._hide_in_texts(each, names) for key, each in value.items()}
        return value

    def _hide_control_names(self, text: str, names: list[str]) -> str:
        """Replace names of control tokens by marks, which `_encode` takes for text."""
        text = text.translate(_RESERVED_CHARACTERS)
        if self._hidden_names is None:
            return text

        def hide(match: re.Match[str]) -> str:
            names.append(match[0])
            return f"\ufdd0{len(names) - 1}\ufdd1"

        return self._hidden_names.sub(hide, text)

    def _mark(self, trained: _TrainedText, names: list[str], is_rejected: bool) -> MarkedTokens:
        tokens, starts = self._encode(trained.text, names)
        if crossed := [start for start, _ in trained.spans if start not in starts]:
            # A token of the prompt's end and the answer's begin: the model never sees it when it answers.
            edges = [0, *crossed, len(trained.text)]
            parts = [self._encode(trained.text[a:b], names) for a, b in pairwise(edges)]
            tokens = np.concatenate([of_part for of_part, _ in parts])
            starts = np.concatenate([at + edge for (_, at), edge in zip(parts, edges, strict=False)])
        in_loss = np.zeros(len(tokens), np.bool_)
        is_control = np.isin(tokens, list(self._tokenizer.control_tokens))
        for start, stop in trained.spans:
            first, behind = np.searchsorted(starts, [start, stop])
            if self._config.train_on != "all":
                behind = self._end_of_turn(is_control, starts, int(first), int(behind), trained)
            in_loss[first:behind] = True
        if self._images is not None:  # also where the whole text is trained on
            in_loss &= [self._tokenizer.control_tokens.get(token) != self._images.token for token in tokens.tolist()]
        num_tokens, tokens = len(tokens), self._begin_document(tokens)
        in_loss = np.concatenate([np.zeros(len(tokens) - num_tokens, np.bool_), in_loss])
        if not in_loss.any():
            raise BadRowError("without a token in the loss", f"no token is in the loss: {_shorten(trained.text)}")
        if in_loss.all() and self._config.train_on != "all":
            raise BadRowError("without a prompt", f"every token is in the loss: {_shorten(trained.text)}", RecipeError)
        marked = tokens.astype(np.uint32) | np.where(in_loss, np.uint32(LOSS_BIT), np.uint32(0))
        marked |= np.uint32(REJECTED_BIT if is_rejected else 0)
        marked[0] |= np.uint32(SEQUENCE_BIT)
        return marked

    def _begin_document(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return tokens behind what begins a document, once."""
        begin = list(self._tokenizer.begin_tokens)
        return tokens if tokens[: len(begin)].tolist() == begin else np.concatenate([begin, tokens])

    def _end_of_turn(
        self,
        is_control: npt.NDArray[np.bool_],
        starts: npt.NDArray[np.int64],
        first: int,
        behind: int,
        trained: _TrainedText,
    ) -> int:
        """Return where an answer ends: behind its last control token, which the model must learn to write. White space
        that a template has behind it is never generated."""
        inside = np.flatnonzero(is_control[first:behind])
        edges = [*starts.tolist(), len(trained.text)]
        if len(inside):
            end = first + int(inside[-1]) + 1
            if not trained.text[edges[end] : edges[behind]].strip():
                return end
        if behind < len(is_control) and is_control[behind]:
            return behind + 1
        why = (
            "the chat template puts no control token behind an assistant's message, so the model would never learn to "
            f"stop: {_shorten(trained.text)}; end it with {{{{ eos_token }}}} in a template of your own "
            "(data.chat.template)"
        )
        raise BadRowError("without an end of turn", why, RecipeError)

    def _encode(self, text: str, names: list[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens of a rendered text, and the character where each begins."""
        tokens: list[int] = []
        starts: list[int] = []
        at = 0
        for number, piece in enumerate(_HIDDEN_NAME.split(text)):
            if number % 2:  # a name that is text
                of_name = self._tokenizer.encode(names[int(piece)]).tolist()
                tokens += of_name
                starts += [at] * len(of_name)
                at += len(piece) + 2
                continue
            of_piece, offsets = self._tokenizer.encode_marked(piece)
            tokens += of_piece
            starts += [at + offset for offset in offsets]
            at += len(piece)
        return np.array(tokens, np.int64), np.array(starts, np.int64)


def _shorten(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[-_SHOWN_CHARACTERS:])
