"""The text of a record by `text_field`: a field's name, or the way to a nested one, as in `choices[0].text`."""

import base64
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from phalanx.data.bad_rows import BadRowError
from phalanx.errors import RecipeError

WHOLE_RECORD = ""
"""The `text_field` of conversations: the record as JSON."""
_STEP = re.compile(r"\[(\d+)\]|\.?([^.\[]+)")


def split_field(field: str) -> list[str | int]:
    """The names and numbers that lead to a nested field."""
    return [name or int(number) for number, name in _STEP.findall(field)]


def find_column(field: str, columns: Sequence[str], path: str) -> str:
    """The column of a table that holds a field; one of the whole name goes before a nested field."""
    column = field if field in columns else str((split_field(field) or [field])[0])
    if column not in columns:
        raise RecipeError(
            f"{path}: no column {column!r}; it has {format_names(columns)}. Name it in data.source.text_field"
        )
    return column


def parse_json(data: bytes) -> Any:
    """What a text of JSON says. Raises BadRowError for what is none."""
    try:
        return json.loads(data)
    except UnicodeDecodeError as error:
        raise BadRowError("not UTF-8", f"text that is not UTF-8 ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        raise BadRowError("not JSON", f"not JSON ({error})") from None
    except RecursionError:
        raise BadRowError("not JSON", "not JSON that can be read: it is nested too deeply") from None


def encode_field(record: Any, field: str) -> bytes:
    """The text of a record in UTF-8. A list of texts is joined by newlines. Raises BadRowError where there is none."""
    if not isinstance(record, dict):
        cure = "; of one array, jq -c '.[]' makes lines" if isinstance(record, list) else ""
        raise BadRowError("without a JSON object", f"expected a JSON object, found {type(record).__name__}{cure}")
    if field == WHOLE_RECORD:
        return json.dumps(record, ensure_ascii=False, default=_to_text).encode(errors="surrogatepass")
    value: Any = record
    for step in [field] if field in record else split_field(field):
        try:
            if isinstance(value, str):
                raise TypeError
            value = value[step]
        except (KeyError, IndexError, TypeError):
            names = format_names(value) if isinstance(value, dict) else type(value).__name__
            why = f"no field {field!r}; it has {names}. Name it in data.source.text_field"
            raise BadRowError("without the field", why, RecipeError) from None
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        value = "\n".join(value)
    if not isinstance(value, str):
        what = "null" if value is None else type(value).__name__
        raise BadRowError("without text", f"{field!r} should be text, found {what}")
    return value.encode(errors="surrogatepass")  # halves of pairs are no UTF-8, which is counted


def _to_text(value: Any) -> str:
    """A value of a table that JSON does not have: bytes as a data URL, others as Python shows them."""
    return f"data:;base64,{base64.b64encode(value).decode()}" if isinstance(value, bytes) else str(value)


def format_names(names: Iterable[str]) -> str:
    """Names as a list for an error."""
    return ", ".join(map(repr, names)) or "none"
