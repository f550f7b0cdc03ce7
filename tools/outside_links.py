"""A hook of MkDocs: what a page links to outside docs/ is shown by its path, since the site does not have it."""

import os
import re
from pathlib import PurePosixPath
from typing import Any

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Return the page's text with `text (path)` in place of each link that leaves docs/."""
    folder = PurePosixPath("docs", page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        image, text, target, _ = match.groups()
        path = os.path.normpath(folder / target)
        if image or ":" in target or path.startswith("docs/"):
            return match[0]
        return f"{text}" if text.strip("`") == path else f"{text} (`{path}`)"

    return LINK.sub(replace, markdown)
