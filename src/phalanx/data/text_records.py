"""Turn records of whole texts into documents: a text with its class, or an anchor, its positive and perhaps negatives.

A document is a number, then the tokens of each text, the first of them with SEQUENCE_BIT. The tokenizer puts around a
text what it does in transformers (`[CLS]`, `[SEP]`, a begin of text), so an export is given the same tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.manifest import SEQUENCE_BIT
from phalanx.data.rows import BadRowError
from phalanx.data.tokenizers import Tokenizer
from phalanx.errors import RecipeError

MAX_MARGIN = 1e30
_NUM_DROPPED_BITS = 3
"""Bits of a margin's mantissa that have no place next to the marks."""


def encode_texts(record: Any, classes: Sequence[str] | None, tokenizer: Tokenizer) -> npt.NDArray[np.uint32]:
    """Return a record as a document [n]: with `classes` of `text` and `label`, else of `anchor`, `positive` and
    perhaps `negative`, a text or a list. Raises BadRowError for a record that has none."""
    if not isinstance(record, dict):
        raise BadRowError("without a JSON object", f"expected a JSON object, found {type(record).__name__}")
    if classes is not None:
        return np.array([_read_class(record, classes), *_encode_text("text", record.get("text"), tokenizer)], np.uint32)
    negatives = record.get("negative") or []
    texts = [(key, record.get(key)) for key in ("anchor", "positive")]
    texts += [("negative", text) for text in (negatives if isinstance(negatives, list) else [negatives])]
    return np.array([0, *(token for key, text in texts for token in _encode_text(key, text, tokenizer))], np.uint32)


def margin_to_number(record: Mapping[str, Any]) -> npt.NDArray[np.uint32]:
    """Return the `margin` of a pair, by default 0, as a number below 2^29 [1], cut to 6 digits. Raises BadRowError if
    it is none."""
    margin = record.get("margin") or 0.0
    if not isinstance(margin, int | float) or not abs(margin) <= MAX_MARGIN:
        raise BadRowError("without a margin", f"`margin` is {margin!r}, expected a finite number")
    return np.array([margin], np.float32).view(np.uint32) >> np.uint32(_NUM_DROPPED_BITS)


def numbers_to_margins(numbers: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Undo `margin_to_number` [n]."""
    return (numbers.astype(np.uint32) << _NUM_DROPPED_BITS).view(np.float32)


def _read_class(record: Mapping[str, Any], classes: Sequence[str]) -> int:
    label = record.get("label")
    if isinstance(label, str) and label in classes:
        return classes.index(label)
    if isinstance(label, int) and 0 <= label < len(classes):
        return int(label)
    known = ", ".join(map(repr, classes))
    found = "missing" if label is None else repr(label)
    reason = f"`label` is {found}, expected one of task.classes ({known}), or its number from 0 to {len(classes) - 1}"
    raise BadRowError("with an unknown label", reason)


def _encode_text(key: str, text: object, tokenizer: Tokenizer) -> list[int]:
    if not isinstance(text, str):
        reason = f"expected a text in `{key}`, found {'none' if text is None else type(text).__name__}"
        raise BadRowError(f"without `{key}`", reason, RecipeError)
    tokens = tokenizer.encode_document(text) if text.strip() else []
    if not tokens:
        raise BadRowError("with an empty text", f"`{key}` is empty")
    return [tokens[0] | SEQUENCE_BIT, *tokens[1:]]
