"""The page as one file that needs no server: with its scripts, its styles and, maybe, a report."""

from collections.abc import Iterable, Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Final

import msgspec

FOLDER: Final = Path(__file__).parent
STYLES: Final = ("vendor/uplot/uPlot.min.css", "static/style.css")
SCRIPTS: Final = (
    "vendor/uplot/uPlot.iife.min.js",
    "static/lib.js",
    "static/data.js",
    "static/charts.js",
    "static/table.js",
    "static/overview.js",
    "static/lists.js",
    "static/job.js",
    "static/report.js",
    "static/main.js",
)
"""In the order in which the page loads them."""
_HEAD: Final = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    '<link rel="icon" href="data:,">\n'
)
_BODY: Final = (
    '</head>\n<body>\n<div id="app"></div>\n<noscript>This page needs JavaScript.</noscript>\n'
)


def served(title: str) -> str:
    """Return the page for a server that has its files under /files/."""
    styles = "".join(f'<link rel="stylesheet" href="/files/{name}">\n' for name in STYLES)
    scripts = "".join(f'<script src="/files/{name}"></script>\n' for name in SCRIPTS)
    return f"{_HEAD}<title>{escape(title)}</title>\n{styles}{_BODY}{scripts}</body>\n</html>\n"


def file(title: str, document: Mapping[str, Any]) -> str:
    """Return the page with everything in it. `document`: what it shows (web/report.py)."""
    data = msgspec.json.encode(document).decode().replace("<", "\\u003c")
    styles = "".join(f"<style>\n{text(name)}\n</style>\n" for name in STYLES)
    scripts = "".join(_inline(text(name)) for name in SCRIPTS)
    shown = f'<script type="application/json" id="report">{data}</script>\n'
    return (
        f"{_HEAD}<title>{escape(title)}</title>\n{styles}{_BODY}{shown}{scripts}</body>\n</html>\n"
    )


def write(path: Path, title: str, document: Mapping[str, Any]) -> None:
    """Write that file. Raises OSError."""
    path.write_text(file(title, document))


def files() -> Iterable[str]:
    """Name the files that a server of the page has."""
    return (*STYLES, *SCRIPTS)


def _inline(script: str) -> str:
    if "</script" in script:
        raise ValueError("a script of the page would end where it says </script")
    return f"<script>\n{script}\n</script>\n"


@cache
def text(name: str) -> str:
    """Return one of these files."""
    return (FOLDER / name).read_text()
