"""The report as one HTML file that opens without a server: tables, plots and the story inside."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #223; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: 1rem 0; width: 100%; font-size: .93rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #dde; text-align: left; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; height: auto; margin: .5rem 0; }
.facts { display: flex; flex-wrap: wrap; gap: 1rem; }
.facts div { background: #f2f6f8; border-radius: .5rem; padding: .7rem 1.1rem; }
.facts b { display: block; font-size: 1.5rem; }
.wrong { color: #a22; } ol.story { list-style: none; padding: 0; font-size: .9rem; }
ol.story span { display: inline-block; width: 5rem; color: #567; text-align: right;
                margin-right: 1rem; font-variant-numeric: tabular-nums; }
"""


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """The figures that a reader should see first, as (figure, what it is)."""
    tiles = "".join(f"<div><b>{escape(value)}</b>{escape(what)}</div>" for value, what in pairs)
    return f'<div class="facts">{tiles}</div>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int]) -> str:
    """`numbers`: the columns that are aligned to the right."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' if index in numbers else ''}>{escape(cell)}</{tag}>"
            for index, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f"<table><tr>{line('th', header)}</tr>{body}</table>"


def sentences(items: Iterable[str], *, wrong: bool = False) -> str:
    kind = ' class="wrong"' if wrong else ""
    return "".join(f"<p{kind}>{escape(item)}</p>" for item in items)


def story_html(lines: Iterable[tuple[float, str]]) -> str:
    """Return the story as a list: (second, sentence)."""
    items = "".join(f"<li><span>{at_s:.1f} s</span>{escape(text)}</li>" for at_s, text in lines)
    return f'<ol class="story">{items}</ol>'


def plot(path: Path, caption: str) -> str:
    image = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<img alt="{escape(caption)}" src="data:image/png;base64,{image}"><p>{escape(caption)}</p>'
    )


def write(path: Path, title: str, sections: Iterable[tuple[str, str]]) -> None:
    """`sections`: (heading, HTML). Raises OSError."""
    body = "".join(
        (f"<h2>{escape(heading)}</h2>" if heading else "") + html for heading, html in sections
    )
    path.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )
