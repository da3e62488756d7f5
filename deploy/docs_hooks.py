"""Hooks of the documentation's site: what lies outside docs/ is named, not linked."""

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write the file's path instead of a link to it, where the site does not have it."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        path = posixpath.normpath(posixpath.join(folder, target.partition("#")[0]))
        if not path.startswith("../"):
            return match[0]
        name = path.removeprefix("../")
        return text if name in text else f"{text} (`{name}`)"

    return LINK.sub(replaced, markdown)
