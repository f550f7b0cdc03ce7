"""Server-sent events that renew a page: sections that changed, and charts."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from phalanx.std_streams import escape_control_chars

STREAM_INTERVAL_S = 1.0
"""Between two messages of a stream, which also say that the connection lives."""

Message = dict[str, Any]
"""A message, as `live.js` reads it: `sections` are HTML by the id of the element; some pages have `charts` or a
`heatMap`."""


async def stream_messages(
    read: Callable[[], Awaitable[Message]], is_over: Callable[[], bool], wall_clock: Callable[[], float]
) -> AsyncIterator[str]:
    """Yield the text of a stream: a message a second, with the sections that changed since the last one."""
    shown: dict[str, int] = {}
    while not is_over():
        message = await read()
        sections = message.get("sections", {})
        changed = {id: html for id, html in sections.items() if shown.get(id) != hash(html)}
        message["sections"] = {id: escape_control_chars(html) for id, html in changed.items()}
        shown.update((id, hash(html)) for id, html in sections.items())
        message["now"] = wall_clock()
        yield f"data: {json.dumps(message, separators=(',', ':'))}\n\n"
        await asyncio.sleep(STREAM_INTERVAL_S)
