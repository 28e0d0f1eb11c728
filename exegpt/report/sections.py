"""Sections: a command's output as tables on a terminal or as one HTML page."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from exegpt.report.html import document


@dataclass(frozen=True)
class Section:
    """A table with notes, and optionally a plot."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    drawing: str = ""
    """The plot as SVG."""
    text: str = ""
    """The plot as text, for a terminal."""


def page(title: str, facts: Sequence[str], sections: Sequence[Section]) -> str:
    """Return an HTML document of all sections, after the facts that they are based on."""
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(fact)}</p>" for fact in facts)]
    for section in sections:
        parts.append(f"<h2>{escape(section.title)}</h2>")
        if section.drawing:
            parts.append(f"<figure>{section.drawing}</figure>")
        head = "".join(f"<th>{escape(column)}</th>" for column in section.columns)
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in section.rows)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        parts.append(f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')
        parts += [f"<p>{escape(note)}</p>" for note in section.notes]
    return document(title, "\n".join(parts))
