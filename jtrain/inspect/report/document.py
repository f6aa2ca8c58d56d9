"""The frame of an HTML page in one file: no other file and no network."""

from html import escape
from importlib.resources import files

STYLES = "default-src 'none'; style-src 'unsafe-inline'"
"""Policy of a page without scripts."""


def render_document(title: str, body: str, *, style: str = "", policy: str = STYLES) -> str:
    """Return a page with a title, in the style of all pages.

    Args:
        body: HTML that follows the heading, ending with a line break.
        style: CSS after that of all pages, ending with a line break.
        policy: the page's Content-Security-Policy.
    """
    style = (files("jtrain.inspect.report") / "page.css").read_text("utf-8") + style
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}</body>
</html>
"""
