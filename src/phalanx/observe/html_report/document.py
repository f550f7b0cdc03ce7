"""A page as one HTML file that opens anywhere, also without a network: no external style, script, font or image.

The page forbids all requests, and every script and style but its own (Content-Security-Policy with hashes). `charts.js`
draws the charts with uPlot (`vendor/`) from JSON; both, and `page.css`, are included in the page.
"""

import base64
import hashlib
from html import escape
from pathlib import Path


def read_page_css() -> str:
    """The style sheet of all pages."""
    folder = Path(__file__).parent
    return "\n" + (folder / "vendor/uPlot.min.css").read_text() + (folder / "page.css").read_text()


def read_page_script() -> str:
    """The script that draws the charts of all pages."""
    folder = Path(__file__).parent
    licence = f"\n/* uPlot\n{(folder / 'vendor/LICENSE').read_text()}*/\n"
    return licence + (folder / "vendor/uPlot.iife.min.js").read_text() + (folder / "charts.js").read_text()


def render_document(title: str, body: str, footer: str) -> str:
    """Render a page around `body` that makes no request, and may make none."""
    css, script = read_page_css(), read_page_script()
    policy = f"default-src 'none'; style-src {_hash_source(css)}; script-src {_hash_source(script)}; img-src data:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="generator" content="phalanx">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{css}</style>
</head>
<body>
<main>{body}
<footer>{escape(footer)}</footer>
</main>
<script>{script}</script>
</body>
</html>
"""


def _hash_source(text: str) -> str:
    """What a Content-Security-Policy calls an element with this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
