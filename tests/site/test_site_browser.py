"""A site in headless Chromium, opened as files: search, links, keyboard, phone, dark, labels."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import synthetic as made
from browsing import DESK, MARKS, PATIENCE_MS, PHONE, Visit, started_browser
from synthetic_run import FULL, write_run

from shardproof.site.command import FIRST_VIEW
from shardproof.site.pages import MENU, build

pytestmark = MARKS
ROOT = Path(__file__).parents[2]
HOSTILE = "<img src=x onerror=\"document.title='broken'\">"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("browser")
    run = write_run(place / "run", benches=4, scalings=True, **FULL)
    lines = [made.result(made.case(number), number) for number in range(2)]
    for line in lines:  # reports draw more of memory than these lines hold
        line["checks"] = [one for one in line["checks"] if one["check"] != "memory"]
    lines[0] |= {"verdict": "fail", "reason": HOSTILE}
    odd = made.write(place / "odd", lines)
    baselines = sorted((ROOT / "results/baselines").glob("*-2-cores.json"))
    build([*map(str, (run, odd, *baselines))], place / "site", "Results", None)
    return place / "site"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started_browser() as started:
        yield started


def address(folder: Path, page: str) -> str:
    path, *rest = page.split("#", 1)
    return "#".join([(folder / path).as_uri(), *rest])


def told(page: Any) -> str:
    """What the page says of its list, once that is there."""
    from playwright.sync_api import expect

    # Not `wait_for_function`: it evaluates text, which the policy of the pages forbids.
    place = page.locator("#told")
    expect(place).not_to_have_text(re.compile("^Loading"), timeout=PATIENCE_MS)
    text: str = place.inner_text()
    return text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK])
def test_every_page_fits_its_window(
    browser: Any, folder: Path, scheme: str, size: dict[str, int]
) -> None:
    pages = [file for file, _ in MENU]
    pages += [f"{kind}/{p.name}" for kind in ("runs", "by") for p in (folder / kind).iterdir()][:6]
    pages += [f"compare/{path.name}" for path in (folder / "compare").iterdir()][:1]
    with Visit(browser, address(folder, pages[0]), viewport=size, color_scheme=scheme) as page:
        for name in pages:
            page.goto(address(folder, name))
            page.wait_for_load_state()
            page.eval_on_selector_all("details", "(all) => all.forEach((d) => { d.open = true; })")
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], name
            ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
            light = sum(map(int, ground[4:-1].split(","))) > 3 * 128
            assert light == (scheme == "light")
            both = page.eval_on_selector_all(
                ".box", "(all) => all.filter((b) => b.scrollHeight > b.clientHeight + 1).length"
            )
            assert both == 0, f"{name}: a table scrolls both ways"


def test_the_first_page_loads_few_files(browser: Any, folder: Path) -> None:
    visit = Visit(browser, address(folder, "index.html"))
    with visit as page:
        page.wait_for_load_state()
        names = {url.rpartition("/")[2] for url in visit.requests if url.startswith("file:")}
        assert names == {*FIRST_VIEW}


def test_a_place_of_the_matrix_leads_to_its_cases(browser: Any, folder: Path) -> None:
    with Visit(browser, address(folder, "index.html")) as page:
        link = page.locator('a[href*="system=reference/zero2&backend=gloo&capability=clipping"]')
        count = int(link.inner_text())
        link.click()
        found = told(page)
        rows = page.locator("#list tbody tr")
        # A place counts a case once for each run; the list has a row for it.
        assert 0 < rows.count() <= count and found.startswith(f"{rows.count()} of ")
        assert all("reference/zero2" in text for text in rows.all_inner_texts())
        assert page.get_by_label("Capability").input_value() == "clipping"
        page.locator("#list tbody a").first.click()
        told(page)
        assert page.locator(".evidence").count() >= 1
        assert page.locator("h1").inner_text().endswith(("quick", "full"))


def test_search_finds_cases_and_its_address_is_a_link(browser: Any, folder: Path) -> None:
    from playwright.sync_api import expect

    with Visit(browser, address(folder, "runs/run.html")) as page:
        box = page.get_by_label("Search cases")
        box.fill("ZERO1 gloo fp64")
        box.press("Enter")
        found = told(page)
        rows = page.locator("#list tbody tr").all_inner_texts()
        assert rows and all("zero1" in r and "gloo" in r and "fp64" in r for r in rows)
        link = page.evaluate("location.href")
        page.locator("#filter [name=verdict]").select_option("fail")
        page.wait_for_url("**verdict=fail")
        expect(page.locator("#told")).not_to_have_text(found, timeout=PATIENCE_MS)
        assert page.locator("#told").get_attribute("aria-live") == "polite"
        assert page.locator("#list tbody tr").count() < len(rows)
        page.goto(link)
        page.reload()
        assert told(page) == found
        assert page.get_by_label("Words").input_value() == "ZERO1 gloo fp64"


def test_a_form_without_scripts_finds_the_same(browser: Any, folder: Path) -> None:
    """Its address has a question mark: who types it, or has no scripts on the first page."""
    with Visit(browser, f"{address(folder, 'cases.html')}?q=zero1+gloo+fp64") as page:
        first = told(page)
        page.goto(address(folder, "cases.html#q=zero1%20gloo%20fp64"))
        assert told(page) == first and not first.startswith("0 of")


def test_a_long_list_is_shown_in_parts_by_keyboard(browser: Any, folder: Path) -> None:
    with Visit(browser, address(folder, "cases.html")) as page:
        assert "the first 200 are shown" in told(page)
        rows = page.locator("#list tbody tr")
        assert rows.count() == 200
        page.get_by_role("button", name="Show more").focus()
        page.keyboard.press("Enter")
        assert rows.count() == 400
        focused = page.evaluate("document.activeElement.textContent")
        assert focused == rows.nth(200).locator("a").inner_text()


def test_a_case_has_evidence_of_every_machine(browser: Any, folder: Path) -> None:
    name = "ddp-dyadic::reference/ddp+small_buckets::gloo::replicate2::sgd::noclip::dyadic::quick"
    with Visit(browser, address(folder, "cases.html#q=dyadic ddp+small_buckets gloo")) as page:
        told(page)
        name = page.locator("#list tbody a").first.inner_text()
        page.goto(address(folder, f"case.html#id={quote(name, safe='')}"))
        page.wait_for_selector(".evidence")
        assert page.locator("h1").inner_text() == name
        assert (
            page.locator("[aria-label='Verdict on each machine and version'] tbody tr").count() == 4
        )
        assert page.locator("[aria-label='Figures of checks'] tbody tr").count() > 3
        assert page.locator("pre.rerun").first.inner_text().startswith("shardproof run")


def test_a_failure_tells_its_reason_and_command(browser: Any, folder: Path) -> None:
    with Visit(browser, address(folder, "findings.html")) as page:
        page.locator(".broken h4 a").first.click()
        page.wait_for_selector(".evidence pre")
        assert "differs from the oracle" in page.locator(".evidence pre").first.inner_text()
        page.go_back()
        assert page.locator("h1").inner_text() == "Findings"


def test_what_a_run_holds_runs_nothing(browser: Any, folder: Path) -> None:
    name = made.case(0).id
    with Visit(browser, address(folder, f"case.html#id={quote(name, safe='')}")) as page:
        page.wait_for_selector(".evidence")
        assert HOSTILE in page.locator(".evidence pre").first.inner_text()
        assert page.locator("img").count() == 0 and page.title() != "broken"


def test_an_address_of_nothing_says_so(browser: Any, folder: Path) -> None:
    with Visit(browser, address(folder, "case.html#id=no-such-case")) as page:
        assert told(page) == "This site has no case no-such-case."
        page.goto(address(folder, "cases.html#system=nobody"))
        page.reload()
        assert told(page).startswith("0 of ")


def test_two_runs_are_compared_by_link(browser: Any, folder: Path) -> None:
    with Visit(browser, address(folder, "compare.html")) as page:
        page.locator("#pair [name=a]").select_option("xeon-2-cores")
        page.locator("#pair [name=b]").select_option("cpu-2-cores")
        page.get_by_role("button", name="Compare").click()
        page.wait_for_url("**/compare/cpu-2-cores..xeon-2-cores.html")
        assert "exact figures" in page.locator("main").inner_text()
        page.goto(address(folder, "compare.html#a=xeon-2-cores&b=cpu-2-cores"))
        page.wait_for_url("**/compare/cpu-2-cores..xeon-2-cores.html")


def test_faults_are_filtered(browser: Any, folder: Path) -> None:
    with Visit(browser, address(folder, "faults.html")) as page:
        every = page.locator("#faults tbody tr:visible").count()
        page.get_by_label("Filter").fill("zero1_fault survives")
        shown = page.locator("#faults tbody tr:visible").count()
        status = page.locator("form[data-filters] [role=status]")
        assert status.inner_text() == f"{shown} of {every}" and 0 < shown < every


def test_pages_read_without_scripts(browser: Any, folder: Path) -> None:
    with Visit(browser, address(folder, "index.html"), java_script_enabled=False) as page:
        link = page.locator("thead a", has_text="clipping")
        assert link.is_visible()
        link.click()
        assert page.locator("h1").inner_text() == "clipping by machine"
        page.goto(address(folder, "cases.html"))
        assert page.get_by_text("needs scripts").is_visible()


def test_names_for_those_who_do_not_see(browser: Any, folder: Path) -> None:
    with Visit(browser, address(folder, "index.html")) as page:
        heard = page.locator("main").aria_snapshot()
        assert 'table "Verdicts by system, backend and capability"' in heard
        assert 'columnheader "clipping"' in heard and 'rowheader "reference/zero2"' in heard
        assert 'link "passed ' in heard and 'link "broken ' in heard
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip-link"
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        page.goto(address(folder, "scaling.html"))
        unnamed = page.evaluate(
            """() => [...document.querySelectorAll('svg')].filter((s) =>
            s.getAttribute('aria-hidden') !== 'true' && !(s.getAttribute('role') === 'img'
            && s.getAttribute('aria-label') && s.querySelector(':scope > desc').textContent))
            .length"""
        )
        assert unnamed == 0 and page.locator("svg.chart").count() > 4
        page.goto(address(folder, "cases.html"))
        told(page)
        unlabelled = page.evaluate(
            """() => [...document.querySelectorAll('input, select, button')].filter((e) =>
            !(e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label'))).length"""
        )
        assert unlabelled == 0


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a page host of this machine that has ``folder``."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


def test_it_works_on_a_page_host_too(browser: Any, folder: Path) -> None:
    with served(folder.parent) as host:
        context = browser.new_context(viewport=DESK)
        page, complaints = context.new_page(), list[str]()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda told: complaints.append(told.text))
        page.goto(f"{host}site/index.html")
        page.locator('a[href*="capability=clipping"]').first.click()
        assert " of " in told(page)
        page.locator("#list tbody a").first.click()
        page.wait_for_selector(".evidence")
        context.close()
        assert complaints == []
