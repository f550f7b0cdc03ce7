"""A hook of MkDocs: what a page links to outside its docs is shown by its path, since the site does not have it."""

import os
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, page: Any, config: Any, **kwargs: Any) -> str:
    """Return the page's text with `text (path)` in place of each link that leaves the directory of the docs."""
    docs = Path(config["docs_dir"]).relative_to(ROOT)
    folder = (docs / page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        image, text, target, _ = match.groups()
        path = os.path.normpath(folder / target)
        if image or ":" in target or Path(path).is_relative_to(docs):
            return match[0]
        return f"{text}" if text.strip("`") == path else f"{text} (`{path}`)"

    return LINK.sub(replace, markdown)
