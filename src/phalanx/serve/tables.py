"""Tables and times as HTML."""

from collections.abc import Iterable
from html import escape

from phalanx import formatting


def render_time(moment: float) -> str:
    """A time (unix seconds), which the page shows as an age."""
    text = escape(formatting.format_timestamp(moment))
    return f'<time data-time="{moment:.1f}" title="{text}">{text}</time>'


def render_rows(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; the cells are HTML."""
    head = "".join(f"<th scope=col>{name}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="list"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
