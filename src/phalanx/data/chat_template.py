"""Find, compile and render chat templates: Jinja as transformers runs it, without importing transformers.

`strftime_now` is defined only with a date that is given, so that the same conversations give the same tokens on any
day: without it templates use the date in their own text, or fail. A record may give one in `chat_template_kwargs`.
"""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from phalanx.data.rows import BadRowError
from phalanx.data.tokenizers import read_token_name
from phalanx.errors import DataError, RecipeError
from phalanx.run.companions import CHAT_TEMPLATE_FILE
from phalanx.safe_files import read_json, read_text

_OLD_TEMPLATE_FILE = "chat_template.json"
_CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
MAX_TEMPLATE_BYTES = 1 << 22
Message = Mapping[str, Any]
"""A message in OpenAI's form, as templates take it: `role`, `content`, and perhaps `tool_calls` and others."""
Span = tuple[int, int]
"""Characters start .. stop - 1 of a rendered text."""


class NoChatTemplateError(RecipeError):
    """Neither the recipe nor the tokenizer's directory has a chat template."""


@dataclass(frozen=True)
class ChatTemplate:
    """The text of a chat template, that for conversations with tools if it is another one, and the names of control
    tokens that templates use, such as `eos_token`."""

    text: str
    tool_text: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RenderedChat:
    """The text of a conversation, and the spans between `{% generation %}` tags if the template has them."""

    text: str
    generated: tuple[Span, ...] = ()


def load_chat_template(own: Path | None, tokenizer_directory: Path | None) -> ChatTemplate:
    """Load the template of the file `own`, or else that of a tokenizer's directory. Raises RecipeError if there is none
    or it is not Jinja."""
    files = [] if tokenizer_directory is None else [tokenizer_directory / name for name in _CONFIG_FILES]
    configs = list(map(_read_config, files))
    tokens = {
        key: token
        for config in reversed(configs)
        for key, value in config.items()
        if key.endswith("_token") and (token := read_token_name(value)) is not None
    }
    if own is not None:
        try:
            texts = {"default": read_text(own, MAX_TEMPLATE_BYTES)}
        except OSError as error:
            raise RecipeError(f"data.chat.template: {own}: {error.strerror}") from None
    else:
        texts = {} if tokenizer_directory is None else _find_templates(tokenizer_directory, configs[0])
    if not texts:
        where = "the built-in tokenizer" if tokenizer_directory is None else str(tokenizer_directory)
        raise NoChatTemplateError(
            f"data.chat.template: {where} has no chat template ({CHAT_TEMPLATE_FILE}, or chat_template in "
            "tokenizer_config.json); name the file of one, such as that of the model's instruct variant"
        )
    text = texts.get("default") or next(iter(texts.values()))
    for each in {text, *texts.values()}:
        try:
            _environment().parse(each)
        except jinja2.TemplateSyntaxError as error:
            raise RecipeError(
                f"data.chat.template: not a Jinja template, line {error.lineno}: {error.message}"
            ) from None
    return ChatTemplate(text, texts.get("tool_use"), tokens)


def find_chat_template(directory: Path) -> ChatTemplate | None:
    """Load the template of a tokenizer's directory, if it has one. Raises RecipeError if it is not Jinja."""
    try:
        return load_chat_template(None, directory)
    except NoChatTemplateError:
        return None


def _find_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    if (directory / CHAT_TEMPLATE_FILE).is_file():
        return {"default": read_text(directory / CHAT_TEMPLATE_FILE, MAX_TEMPLATE_BYTES)}
    named = config.get("chat_template") or _read_config(directory / _OLD_TEMPLATE_FILE).get("chat_template")
    if isinstance(named, list):  # several, each with a name
        return {each["name"]: each["template"] for each in named if isinstance(each, dict)}
    return {"default": named} if isinstance(named, str) else {}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
    except DataError as error:
        raise RecipeError(f"data.tokenizer: {error}") from None


class TemplateRenderer:
    """Renders conversations by a template. `date`: what its `strftime_now` writes."""

    def __init__(self, template: ChatTemplate, date: datetime.date | None = None):
        self._special_tokens = dict(template.special_tokens)
        environment = _environment()
        if date is not None:
            environment.globals["strftime_now"] = date.strftime
        self._template = environment.from_string(template.text)
        self._tool_template = environment.from_string(template.tool_text) if template.tool_text else self._template

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
        expand: Callable[[str], str] = str,
    ) -> RenderedChat:
        """Render messages, and `expand` the text. Raises BadRowError if the template refuses them."""
        template = self._template if tools is None else self._tool_template
        values = {**self._special_tokens, **(variables or {})}
        try:
            text = template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **values
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            if isinstance(error, jinja2.UndefinedError) and "strftime_now" in str(error):
                raise BadRowError("without a date", _MISSING_DATE_MESSAGE, RecipeError) from None
            raise BadRowError("refused by the chat template", f"the chat template fails: {error}") from None
        text = _ESCAPED_MARK.sub(lambda match: chr(int(match[1], 16)), text)
        return RenderedChat(*_cut_generation_marks(expand(text)))


_MISSING_DATE_MESSAGE = (
    "the chat template writes the day's date; give one, such as data.chat.date: 2026-01-31, so that the same data give "
    "the same tokens on any day"
)
_ESCAPED_MARK = re.compile(r"\\u(fdd[01])")
"""A mark of chat.py in a tool or a call that a template writes as Python or JSON."""
_GENERATION_BEGIN, _GENERATION_END = "\ufdd2", "\ufdd3"
"""Characters that are in no text: what a template puts around a generated part."""


def _cut_generation_marks(text: str) -> tuple[str, tuple[Span, ...]]:
    if _GENERATION_BEGIN not in text:
        return text, ()
    pieces: list[str] = []
    spans: list[Span] = []
    length = 0
    for piece in text.split(_GENERATION_BEGIN):
        inside, is_marked, behind = piece.partition(_GENERATION_END)
        if is_marked:
            spans.append((length, length + len(inside)))
        pieces += [inside, behind]
        length += len(inside) + len(behind)
    return "".join(pieces), tuple(spans)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, by which templates name what the model writes."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # jinja2 declares a set of each instance

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = map(jinja2.nodes.TemplateData, (_GENERATION_BEGIN, _GENERATION_END))
        begin, end = (jinja2.nodes.Output([mark]) for mark in marks)
        return [begin.set_lineno(line), *body, end.set_lineno(line)]


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """The filter as transformers has it: no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def join_contents(record: object) -> str:
    """Join all texts of a record by newlines, whatever it holds."""
    if isinstance(record, str):
        return record
    if isinstance(record, dict):
        record = list(record.values())
    return "\n".join(filter(None, map(join_contents, record))) if isinstance(record, list) else ""
