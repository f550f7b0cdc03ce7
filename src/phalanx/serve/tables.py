"""Tables and times as HTML."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import TypeVar

from phalanx import formatting

logger = logging.getLogger(__name__)
ItemT = TypeVar("ItemT")


def render_each(
    items: Iterable[ItemT], render: Callable[[ItemT], Sequence[str]], name: Callable[[ItemT], str], num_columns: int
) -> Iterator[Sequence[str]]:
    """Yield the row of each item. One that cannot be rendered has its name and `unreadable`, and the others are
    there."""
    for item in items:
        try:
            yield render(item)
        except Exception:  # what others send may be anything
            logger.exception("serve: %a cannot be rendered", name(item))
            yield escape(name(item)), '<span class="problem">unreadable</span>', *[""] * (num_columns - 2)


def render_time(moment: float) -> str:
    """A time (unix seconds), which the page shows as an age."""
    text = escape(formatting.format_timestamp(moment))
    return f'<time data-time="{moment:.1f}" title="{text}">{text}</time>'


def render_rows(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; the cells are HTML."""
    head = "".join(f"<th scope=col>{name}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="list"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
