"""The page in headless Chromium: no errors, no requests, keyboard, phone, dark mode, labels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browsing
import pytest
from browsing import DESK, MARKS, PHONE
from synthetic_run import FULL, write_run

from shardproof import report
from shardproof.runs.run_folder import read

pytestmark = MARKS


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(
        tmp_path_factory.mktemp("browser") / "run",
        scalings=True,
        **FULL,
    )
    target = path / "report.html"
    target.write_text(report.html(read(path)), encoding="utf-8")
    return target


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing.started_browser() as started:
        yield started


class Visit(browsing.Visit):
    """A report, which is one file."""

    def __init__(self, browser: Any, file: Path, **context: Any) -> None:
        super().__init__(browser, file.as_uri(), **context)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        assert len({url.split("#")[0] for url in self.requests if url.startswith("file:")}) == 1


def test_every_link_leads_somewhere(browser: Any, file: Path) -> None:
    with Visit(browser, file) as page:
        assert page.title().startswith("Shardproof: broke")
        dead = page.evaluate(
            """() => [...document.querySelectorAll('a, use')].map((e) => e.getAttribute('href'))
            .filter((h) => !h.startsWith('#') || !document.getElementById(h.slice(1)))"""
        )
        assert dead == []
        twice = page.evaluate(
            """() => { const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);
            return ids.filter((id, at) => ids.indexOf(id) !== at); }"""
        )
        assert twice == []


def unfold(page: Any, which: str = "details") -> None:
    """Open all that is folded, or only some of it."""
    page.eval_on_selector_all(which, "(all) => all.forEach((d) => { d.open = true; })")


def test_the_summary_fits_a_phone_and_search_is_part_of_it(browser: Any, file: Path) -> None:
    with Visit(browser, file, viewport=PHONE) as page:
        assert page.locator(".banner").bounding_box()["y"] < 150
        search = page.get_by_label("Search").bounding_box()
        assert search["y"] + search["height"] < PHONE["height"]
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.parametrize("size", [PHONE, {"width": 1280, "height": 900}])
def test_no_table_scrolls_both_ways(browser: Any, file: Path, size: dict[str, int]) -> None:
    with Visit(browser, file, viewport=size) as page:
        unfold(page)
        both = page.eval_on_selector_all(
            ".box", "(boxes) => boxes.filter((b) => b.scrollHeight > b.clientHeight + 1).length"
        )
        assert both == 0


def test_cases_are_folded_until_they_are_sought(browser: Any, file: Path) -> None:
    """What broke stands above in full; open groups made the page 58,000 pixels long."""
    with Visit(browser, file, viewport=DESK) as page:
        assert page.locator("details.group[open]").count() == 0
        page.get_by_label("Search").fill("zero1 gloo")
        assert page.locator("details.group[open]").count() == 1


def test_a_link_opens_what_is_folded(browser: Any, file: Path) -> None:
    with Visit(browser, file) as page:
        folded = page.locator("details.part", has=page.locator("#traffic"))
        assert folded.get_attribute("open") is None
        page.locator("nav a[href='#traffic']").click()
        assert folded.get_attribute("open") is not None
        page.locator(".broken a[href^='#s-']").first.click()
        assert page.locator("[id^='s-']").first.is_visible()


def test_the_command_of_a_failure_can_be_copied(browser: Any, file: Path) -> None:
    with Visit(browser, file, permissions=["clipboard-read", "clipboard-write"]) as page:
        button = page.locator(".broken button.copy").first
        button.click()
        page.wait_for_function("document.querySelector('button.copy').textContent !== 'Copy'")
        command = page.locator(".broken pre.rerun").first.inner_text()
        assert page.evaluate("navigator.clipboard.readText()") == command.strip()


def column(page: Any, label: str, number: int) -> list[str]:
    found: list[str] = page.eval_on_selector_all(
        f'[aria-label="{label}"] tbody tr',
        f"(rows) => rows.map((row) => row.cells[{number}].textContent.trim())",
    )
    return found


def test_tables_are_sorted_by_click_and_by_keyboard(browser: Any, file: Path) -> None:
    with Visit(browser, file) as page:
        unfold(page)
        head = page.locator('[aria-label="Results"] thead th').nth(6)
        assert head.get_attribute("aria-sort") is None
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == "ascending"
        seconds = [float(text) for text in column(page, "Results", 6)]
        assert seconds == sorted(seconds) and len(seconds) > 20
        head.locator("button").focus()
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == "descending"
        assert [float(text) for text in column(page, "Results", 6)] == sorted(seconds)[::-1]
        first = page.locator('[aria-label="Results"] thead th').nth(0)
        first.locator("button").focus()
        page.keyboard.press("Space")
        assert first.get_attribute("aria-sort") == "ascending"
        assert head.get_attribute("aria-sort") is None
        names = column(page, "Results", 0)
        assert names == sorted(names)


def test_blanks_come_last_whatever_the_order(browser: Any, file: Path) -> None:
    with Visit(browser, file) as page:
        unfold(page)
        head = page.locator('[aria-label="Scaling"] thead th').nth(5)
        for order in ("ascending", "descending"):
            head.locator("button").click()
            assert head.get_attribute("aria-sort") == order
            told = column(page, "Scaling", 5)
            assert told[-1] == "-" and told[0] != "-"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, {"width": 1280, "height": 900}])
def test_nothing_is_wider_than_the_window(
    browser: Any, file: Path, scheme: str, size: dict[str, int]
) -> None:
    with Visit(browser, file, viewport=size, color_scheme=scheme) as page:
        unfold(page)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= size["width"]
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(map(int, ground[4:-1].split(","))) > 3 * 128
        assert light == (scheme == "light")
        small = page.evaluate(
            """() => [...document.querySelectorAll('thead button, .cell a')]
            .map((e) => e.getBoundingClientRect())
            .filter((r) => r.height < 20 || r.width < 20).length"""
        )
        assert small == 0


def test_a_place_in_the_matrix_shows_its_cases(browser: Any, file: Path) -> None:
    with Visit(browser, file) as page:
        label = "reference/zero2 on gloo, clipping"
        link = page.locator(f'a[aria-label^="{label}"]')
        count = int(link.inner_text().split("/")[-1])
        link.click()
        group = page.locator(
            "details.group", has=page.locator(f"table[id='{link.get_attribute('href')[1:]}']")
        )
        assert group.get_attribute("open") is not None
        assert f"{count} of " in group.locator(".filter").inner_text()
        shown = group.locator("tbody tr:visible")
        assert shown.count() == count
        assert all("::clip::" in text for text in shown.all_inner_texts())
        group.locator(".filter button").click()
        assert group.locator("tbody tr:visible").count() > count
        assert page.evaluate("location.hash") == link.get_attribute("href")


def test_cases_are_sought_by_words_and_by_failure(browser: Any, file: Path) -> None:
    with Visit(browser, file) as page:
        rows, status = page.locator("details.group tbody tr:visible"), page.locator("[role=status]")
        every = page.locator("details.group tbody tr").count()
        page.get_by_label("failures only").check()
        assert status.inner_text() == f"30 of {every} cases" and rows.count() == 30
        page.get_by_label("Search").fill("ZERO1 gloo")
        found = rows.all_inner_texts()
        assert 0 < len(found) < 30
        assert all("zero1" in text and "gloo" in text and "fail" in text for text in found)
        assert page.locator("details.group:visible").count() == 1
        page.get_by_label("failures only").uncheck()
        assert rows.count() > len(found)
        page.get_by_label("Search").fill("")
        assert status.inner_text() == "" and rows.count() > 30


def test_the_results_are_not_clipped_in_a_laptop_s_window(browser: Any, file: Path) -> None:
    with Visit(browser, file, viewport=DESK) as page:
        unfold(page)
        box = page.locator('[aria-label="Results"]')
        texts = {
            0: "somebodys_package.strategies:ShardedDataParallel+small_buckets (depth family)",
            3: "12 fail, 3 crash, 120 pass, 40 pass (working precision only), 12 skip",
            5: "12,345,678,901 / 12,345,678,000 (x1.23) (1.5 x zero3 of the textbook)",
        }
        for number, text in texts.items():
            cell = page.locator('[aria-label="Results"] tbody tr').first.locator("td, th")
            cell.nth(number).evaluate("(cell, text) => { cell.textContent = text; }", text)
        wide, seen = box.evaluate("(box) => [box.scrollWidth, box.clientWidth]")
        assert wide <= seen


def test_it_reads_without_scripts(browser: Any, file: Path) -> None:
    with Visit(browser, file, java_script_enabled=False) as page:
        assert page.get_by_text("Failed: 30 of").is_visible()
        assert page.locator("thead button").count() == 0
        assert page.locator(".broken pre.rerun").first.is_visible()
        link = page.locator("a[aria-label^='reference/zero2 on gloo, traffic']")
        link.click()
        assert page.locator(link.get_attribute("href")).is_visible()


def test_names_for_those_who_do_not_see(browser: Any, file: Path) -> None:
    with Visit(browser, file) as page:
        unfold(page, ".part")
        told = page.locator("main").aria_snapshot()
        assert 'img "Strong scaling of reference/ddp on gloo"' in told
        assert 'img "Timeline of reference/pipeline+1f1b on gloo' in told
        assert 'table "Verdicts by implementation, backend and capability"' in told
        assert 'columnheader "verdicts"' in told
        unnamed = page.evaluate(
            """() => [...document.querySelectorAll('svg')].filter((s) =>
            s.getAttribute('aria-hidden') !== 'true' && !(s.getAttribute('role') === 'img'
            && s.getAttribute('aria-label') && s.querySelector(':scope > desc').textContent))
            .length"""
        )
        assert unnamed == 0
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip-link"
        ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert ring == "solid"


def test_the_kill_matrix_fits_a_phone(browser: Any, file: Path) -> None:
    """Headings of checks stand upright: a column is as wide as its mark, a name may fold."""
    with Visit(browser, file, viewport=PHONE) as page:
        unfold(page)
        widths = page.eval_on_selector_all(
            ".faults thead th.cap", "(heads) => heads.map((h) => h.getBoundingClientRect().width)"
        )
        assert len(widths) > 4
        assert max(widths) < 48
        name = page.locator(".faults tbody th").first
        assert name.bounding_box()["width"] < PHONE["width"] / 2
        head = page.locator(".faults thead th.cap").first
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == "ascending"
