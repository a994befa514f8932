"""One table says the same on a terminal of any width, as Markdown, CSV and HTML."""

from __future__ import annotations

import csv
import html
import io
import re

import pytest
from rich.console import Console

from shardproof import verdicts
from shardproof.report import tables
from shardproof.table import Mark, Table, TableCell, markdown_text, shortened

LONG = "reference/fully_sharded_data_parallel+every::option::of::all"
MARKS: tuple[Mark, ...] = ("", "bad")
TABLE = Table(
    "What was sent",
    ("system", "bytes sent", "verdict"),
    [("zero1", "1,024 = formula", "pass"), (LONG, "12 / 13", "<fail> | _twice_")],
    MARKS,
    ("Bytes of a step.",),
    align="lr",
)


def printed(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(table)
    return console.export_text()


@pytest.mark.parametrize("width", [30, 60, 80, 240])
def test_a_terminal_of_any_width_shows_every_word(width: int) -> None:
    text = printed(TABLE, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    lines = text.splitlines()
    for word in (word for row in TABLE.texts for cell in row for word in cell.split()):
        if len(word) < 26:  # a longer one may be folded
            assert any(word in line for line in lines)
    assert "of::all" in text
    assert "What was sent" in text and "Bytes of a step." in text


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_no_terminal_hides_the_verdicts(width: int) -> None:
    name = "package.of_mine.submodule:AClassWithALongName+label"
    rest = ("1.2e-16 / 1e-12", "1,234,567 = formula (1.5 x zero2)", "0.51")
    counts = [f"{n} {verdict}" for n, verdict in enumerate(verdicts.VERDICTS)]
    rows = [(name, "in_memory", "16", text, *rest) for text in counts]
    made = Table("", tables.HEADINGS, rows, align="llrlllr")
    for row, text in zip(rows, counts, strict=True):
        shown = printed(Table("", made.headings, [row], align=made.align), width)
        assert all(word in shown for word in text.split()), shown


def test_a_table_that_fits_is_aligned_in_columns() -> None:
    heading, first, second = printed(TABLE, 120).splitlines()[1:4]
    end = heading.index("bytes sent") + len("bytes sent")
    assert first[:end].endswith("1,024 = formula") and second[:end].endswith("12 / 13")


def test_a_terminal_shows_the_beginning_of_a_long_sentence() -> None:
    assert shortened("short") == "short"
    told = shortened("word " * 1000)
    assert len(told) <= 600 and told.endswith("word ... (the report has the rest)")


def test_a_table_that_does_not_fit_becomes_a_block_for_each_row() -> None:
    wide = Table("", [f"column{n}" for n in range(12)], [[f"value{n}" for n in range(12)]])
    first, *rest = printed(wide, 60).splitlines()
    assert first.rstrip() == "value0"
    assert "column11: value11" in " ".join(" ".join(rest).split())


def test_markup_in_a_text_stays_text() -> None:
    text = TABLE.markdown()
    assert text.splitlines()[1] == "| --- | ---: | --- |"
    assert text.splitlines()[3].endswith(r"| &lt;fail> \| \_twice\_ |")
    assert "in_memory" in markdown_text("in_memory") and "&amp;lt;" in markdown_text("&lt;")
    assert "](http" not in markdown_text("![x](http://example.org/x.png)")
    assert "&lt;fail&gt;" in TABLE.html() and "<fail>" not in TABLE.html()
    assert "[red]" in printed(Table("", ("a",), [("[red]x[/red]",)]), 40)


def test_csv_holds_the_texts() -> None:
    assert list(csv.reader(io.StringIO(TABLE.csv()))) == [list(TABLE.headings), *TABLE.texts]


def test_html_names_rows_and_columns_and_marks_what_is_bad() -> None:
    page = TABLE.html()
    assert page.count('<th scope="col">') == 3 and page.count('<th scope="row"') == 2
    assert page.count('<tr class="bad">') == 1
    shown = html.unescape(re.sub(r"<wbr>", "", page))
    assert LONG in shown and "<caption>What was sent</caption>" in page


def test_cells_may_lead_somewhere_or_be_drawn() -> None:
    cells = (TableCell("a page", link="a.html"), TableCell("12", html="<svg></svg>", sort_key="12"))
    table = Table("t", ("what", "drawing"), [cells])
    assert "[a page](a.html)" in table.markdown() and "| 12 |" in table.markdown()
    assert '<a href="a.html">a page</a>' in table.html()
    assert '<td data-v="12"><svg></svg></td>' in table.html()


def test_rows_beyond_the_first_are_counted_and_found_elsewhere() -> None:
    short = TABLE.first(1, "--format markdown has all")
    assert len(short.rows) == 1 and len(short.marks) == 1
    assert short.notes[0] == "and 1 more rows: --format markdown has all"
    assert TABLE.first(2, "") is TABLE
