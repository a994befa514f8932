"""Limits of the source: lines of code, long functions, comments and docstrings.

``python -m tools.measures --all`` names what is over a limit.
"""

from __future__ import annotations

from pathlib import Path

from tools import measures

#: Lines of code: the core is the suite without its wings.
MOST_CORE, MOST_IN_ALL = 38_200, 72_000
MOST_LONG, MOST_WITH_MANY_PARAMETERS = 6, 8
LEAST_COMMENTED, LEAST_DOCUMENTED = 0.04, 0.95


def test_the_core_is_small_enough_to_read() -> None:
    assert measures.lines(measures.core()) <= MOST_CORE


def test_suite_and_tools_are_small_enough_to_keep() -> None:
    roots = (measures.SUITE, measures.TOOLS)
    assert sum(measures.lines(measures.sources(root)) for root in roots) <= MOST_IN_ALL


def test_few_functions_are_long() -> None:
    long = [name for one in measures.sources(measures.SUITE) for name in one.long]
    assert len(long) <= MOST_LONG, long


def test_few_functions_have_many_parameters() -> None:
    many = [name for one in measures.sources(measures.SUITE) for name in one.many]
    assert len(many) <= MOST_WITH_MANY_PARAMETERS, many


def test_rooms_that_need_reasons_have_comments() -> None:
    assert measures.commented() >= LEAST_COMMENTED


def test_what_is_public_says_what_it_is() -> None:
    assert measures.documented() >= LEAST_DOCUMENTED


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings() -> None:
    source = measures.of_file(Path(measures.__file__))
    text = Path(measures.__file__).read_text()
    assert source.comments == sum(line.strip().startswith("#") for line in text.splitlines())
    assert 0 < source.code < len(text.splitlines()) - source.comments
    assert all(source.public.values()), "this file has docstrings on all that is public"
