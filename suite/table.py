"""One table, written for a terminal, as Markdown, as CSV and as HTML.

A vocabulary module: every room may make tables.

    table = Table("Bytes sent", ("system", "bytes"), [("zero1", "1,024")], align="lr")
    console.print(table)        # a terminal, through rich
    table.markdown()            # GitHub's tables
    table.csv()                 # headings and rows only
    table.html()                # a <table> in a box that scrolls sideways

Texts are data: each writer escapes them.  Only :attr:`TableCell.html` is markup.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from shardproof.errors import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

K = TypeVar("K")
V = TypeVar("V")

#: Says of a row, for those who see colour, what its words say as well.
Mark = Literal["", "bad", "good", "changed"]
_STYLES: dict[str, str] = {"bad": "red", "good": "green", "changed": "yellow"}
#: A column of a terminal may be this narrow and break longer words; below it rows become blocks.
_NARROWEST = 26
#: That of the names of rows: a name that is broken cannot be copied.
_LONGEST_NAME = 40
#: Spaces between two columns of a terminal.
_GAP = 2
#: Characters of a sentence on a terminal.
LONGEST = 600
#: Texts of more characters may break over several lines of a page.
_WIDE = 60


@dataclass(frozen=True)
class TableCell:
    """A text that is more than a text: a link, or markup that stands for it in HTML."""

    text: str
    #: Where the text leads, in Markdown and HTML.
    link: str = ""
    #: A drawing or an icon with words, in place of the text; trusted, not escaped.
    html: str = ""
    #: What the page's script sorts by, where that is not the text.
    sort_key: str = ""
    style_class: str = ""

    def __str__(self) -> str:
        return self.text


Row = Sequence[str | TableCell]


@dataclass(frozen=True)
class Table:
    """Headings, and rows of texts or of :class:`TableCell`, each row as long as the headings."""

    title: str
    headings: Row
    rows: Sequence[Row]
    #: One mark for each row, or none at all.
    marks: Sequence[Mark] = ()
    #: Sentences below the table.
    notes: Sequence[str] = ()
    #: A letter for each column: ``l``, ``r`` or ``c``; columns beyond the last letter are ``l``.
    align: str = ""
    #: The column that names the row.
    row_header: int = 0

    @property
    def texts(self) -> list[list[str]]:
        """Rows of plain texts."""
        return [[printable(str(cell)) for cell in row] for row in self.rows]

    def titled(self, title: str) -> Table:
        """The same table under another title."""
        return replace(self, title=title)

    def first(self, count: int, where_all: str) -> Table:
        """The first ``count`` rows, and a note that says where the others are."""
        hidden = len(self.rows) - count
        if hidden <= 0:
            return self
        note = f"and {hidden:,} more rows: {where_all}"
        marks = self.marks[:count]
        return replace(self, rows=self.rows[:count], marks=marks, notes=(note, *self.notes))

    def _alignment(self, column: int) -> Literal["left", "right", "center"]:
        letter = self.align[column : column + 1]
        return "right" if letter == "r" else "center" if letter == "c" else "left"

    def _mark(self, row: int) -> Mark:
        return self.marks[row] if self.marks else ""

    # ---------------------------------------------------------------------------------- terminal

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """The table as wide as the terminal; where it cannot fit, a block of lines for each row.

        No text is cut: words are broken only where a word is longer than its column may be.
        """
        from rich.text import Text

        if self.title:
            yield Text(printable(self.title), style="bold")
        widths = self._widths(options.max_width)
        if widths is None:
            yield from self._blocks()
        else:
            yield self._grid(widths)
        for note in self.notes:
            yield Text(printable(note), style="dim")

    def _widths(self, terminal: int) -> list[int] | None:
        """Characters of each column, or ``None`` where words of ordinary length would break."""
        from rich.cells import cell_len

        columns = list(zip(*[map(str, self.headings), *self.texts], strict=True))
        words = ((cell_len(word) for text in texts for word in text.split()) for texts in columns)
        limits = [_NARROWEST] * len(columns)
        limits[self.row_header] = _LONGEST_NAME
        widths = [
            min(max(found, default=1), most) for found, most in zip(words, limits, strict=True)
        ]
        wanted = [max(map(cell_len, texts), default=1) for texts in columns]
        spare = terminal - sum(widths) - _GAP * (len(widths) - 1)
        if spare < 0:
            return None
        # Columns that need little more get it first, so that few rows take a second line.
        order = sorted(range(len(widths)), key=lambda n: wanted[n] - widths[n])
        for place, column in enumerate(order):
            more = min(wanted[column] - widths[column], spare // (len(order) - place))
            widths[column] += more
            spare -= more
        return widths

    def _grid(self, widths: Sequence[int]) -> RenderableType:
        from rich import table
        from rich.text import Text

        # Rich's own widths are not used: with least widths it cuts the last columns off.
        grid = table.Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
        for number, (heading, width) in enumerate(zip(self.headings, widths, strict=True)):
            text, side = Text(printable(str(heading))), self._alignment(number)
            grid.add_column(text, justify=side, width=width, overflow="fold")
        for number, row in enumerate(self.texts):
            style = _STYLES.get(self._mark(number), "")
            grid.add_row(*(Text(text, style=style) for text in row))
        return grid

    def _blocks(self) -> Iterator[RenderableType]:
        """The row's name, and below it each heading with its text, where there is one."""
        from rich.padding import Padding
        from rich.text import Text

        for number, row in enumerate(self.texts):
            style = _STYLES.get(self._mark(number), "")
            yield Text(row[self.row_header], style=style or "bold", overflow="fold")
            named = [*zip(self.headings, row, strict=True)]
            del named[self.row_header]
            pairs = [f"{heading}: {text}" for heading, text in named if text]
            yield Padding(Text("; ".join(pairs), style=style, overflow="fold"), (0, 0, 0, 2))

    # ---------------------------------------------------------------------------------- Markdown

    def markdown(self) -> str:
        """The rows as a table of GitHub's Markdown, without title and notes."""
        rules = {"left": "---", "right": "---:", "center": ":---:"}
        lines = [
            [markdown_text(str(heading)) for heading in self.headings],
            [rules[self._alignment(column)] for column in range(len(self.headings))],
            *([_markdown_cell(cell) for cell in row] for row in self.rows),
        ]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def section(self, level: int) -> str:
        """A section of a page of Markdown: the title, the rows, the notes."""
        notes = "".join(f"\n{note}\n" for note in self.notes)
        return f"{'#' * level} {markdown_text(self.title)}\n\n{self.markdown()}{notes}"

    # -------------------------------------------------------------------------------------- JSON

    def records(self) -> list[dict[str, Any]]:
        """A dictionary for each row, by heading; texts that are numbers as numbers."""
        heads = list(map(str, self.headings))
        return [dict(zip(heads, map(_plain_value, row), strict=True)) for row in self.texts]

    # --------------------------------------------------------------------------------------- CSV

    def csv(self) -> str:
        """Headings and rows as CSV."""
        stream, headings = io.StringIO(), list(map(str, self.headings))
        csv.writer(stream, lineterminator="\n").writerows([headings, *self.texts])
        return stream.getvalue()

    # -------------------------------------------------------------------------------------- HTML

    def html(self, classes: str = "sortable", caption: str | None = None) -> str:
        """The table in a box that scrolls sideways and that a keyboard can reach.

        ``caption`` stands for the title above the rows; a screen reader says the title.
        """
        head = "".join(map(_html_heading, self.headings))
        body = "\n".join(self._html_row(number) for number in range(len(self.rows)))
        shown = self.title if caption is None else caption
        above = f"<caption>{escape(shown)}</caption>" if shown else ""
        return (
            f'<div class="box" tabindex="0" role="region" aria-label="{escape(self.title)}">'
            f'<table class="{escape(classes)}">{above}\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
        )

    def _html_row(self, number: int) -> str:
        columns = enumerate(self.rows[number])
        cells = "".join(_html_cell(cell, column == self.row_header) for column, cell in columns)
        return f"<tr{_class(self._mark(number))}>{cells}</tr>"


def markdown_text(text: str) -> str:
    """One line that no reader of Markdown takes for HTML, a link, an image or emphasis."""
    line = " ".join(text.split())
    line = re.sub(r"([\\|*`])", r"\\\1", line)
    line = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", line)  # within a word it is no emphasis
    line = re.sub(r"&(?=#?\w+;)", "&amp;", line)
    return line.replace("<", "&lt;").replace("](", "]\\(")


def fenced(lines: Iterable[str]) -> list[str]:
    """Lines of Markdown that show ``lines`` as they are; the fence is longer than any within."""
    shown = list(lines)
    fence = "~" * max([4, *(len(run) + 1 for line in shown for run in re.findall("~{4,}", line))])
    return [f"{fence}text", *shown, fence]


def number(count: int, noun: str) -> str:
    """``1 case``, ``2 cases``; of ``fault caught`` the first word, of ``more case`` the second."""
    more, word = ("more ", noun[5:]) if noun.startswith("more ") else ("", noun)
    first, *rest = word.split(" ", 1)
    return " ".join([f"{count} {more}{first}{'' if count == 1 else 's'}", *rest])


def shortened(text: str) -> str:
    """``text`` as a terminal shows a sentence: reports have all of it."""
    more = " ... (the report has the rest)"
    return text if len(text) <= LONGEST else text[: LONGEST - len(more)].rstrip() + more


def some(names: Sequence[str], most: int) -> str:
    """The first names, and how many more."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, in their order; keys in that of their first value."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _plain_value(text: str) -> Any:
    """The number that ``text`` spells, ``None`` for nothing, or the text."""
    if text in ("", "-"):
        return None
    if not re.fullmatch(r"-?\d{1,3}(,\d{3})*(\.\d+)?|-?\d+(\.\d+)?(e[-+]\d+)?", text):
        return text
    digits = text.replace(",", "")
    return int(digits) if digits.lstrip("-").isdigit() else float(digits)


def _markdown_cell(cell: str | TableCell) -> str:
    text = markdown_text(str(cell)) or " "
    return f"[{text}]({cell.link})" if isinstance(cell, TableCell) and cell.link else text


def _html_heading(heading: str | TableCell) -> str:
    cell = heading if isinstance(heading, TableCell) else TableCell(heading)
    return f'<th scope="col"{_class(cell.style_class)}>{cell.html or escape(cell.text)}</th>'


def _html_cell(cell: str | TableCell, header: bool) -> str:
    text = str(cell)
    # An id may be broken between its parts, and not inside of a word.
    inner, classes, key = escape(text).replace("::", "::<wbr>"), "", ""
    if isinstance(cell, TableCell):
        inner = cell.html or (f'<a href="{escape(cell.link)}">{inner}</a>' if cell.link else inner)
        classes, key = cell.style_class, cell.sort_key
    if header and "::" in text:
        classes = f"{classes} id".strip()
    elif not header and len(text) > _WIDE:
        classes = f"{classes} wide".strip()
    tag, scope = ("th", ' scope="row"') if header else ("td", "")
    sort = f' data-v="{escape(key)}"' if key else ""
    return f"<{tag}{scope}{_class(classes)}{sort}>{inner}</{tag}>"


def _class(names: str) -> str:
    return f' class="{escape(names)}"' if names else ""
