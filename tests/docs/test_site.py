"""The documentation site builds without a warning, is two clicks deep and fits a phone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
#: Pages that are laid out in a browser: long tables, long lines of code, signatures.
SHOWN = tuple(
    f"docs/{name}"
    for name in (
        *("index", "options", "findings", "what-you-have", "api", "command-line"),
        *("scenario-keys", "checks", "verdicts", "strategies/fsdp"),
    )
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = ["-q", "-W", "--keep-going", "-b", "html", "-c", "docs", ".", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *words],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def links(page: Path) -> set[Path]:
    """The pages of the site that ``page`` links to."""
    found = re.findall(r'<a [^>]*href="([^"#:]+\.html)', page.read_text())
    return {(page.parent / link).resolve() for link in found}


def test_every_page_is_two_clicks_from_the_start(site: Path) -> None:
    first = links(site / "docs/index.html")
    second = set().union(*(links(page) for page in first if page.exists()))
    generated = {
        site / name for name in ("genindex.html", "search.html", "py-modindex.html", "index.html")
    }
    pages = {page for page in site.rglob("*.html") if "_static" not in page.parts} - generated
    assert len(pages) > 70
    assert pages <= first | second | {site / "docs/index.html"}


def test_every_link_leads_to_a_file(site: Path) -> None:
    missing = {
        (page.relative_to(site), link.relative_to(site))
        for page in site.rglob("*.html")
        if "source" not in page.relative_to(site).parts
        for link in links(page)
        if not link.exists()
    }
    assert missing == set()


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("api", ["prove(", "OwnWorkload(", "shardproof.watch", "Batch(", "Capabilities("]),
        (
            "command-line",
            [
                "--maxfail",
                "random cases (by --seed)",
                "shardproof bench pair",
                "shardproof checkpoint diff",
            ],
        ),
        ("scenario-keys", ["memory_gib", "FaultPlan", "save_at"]),
        ("checks", ["equivalence", "stopping"]),
        ("verdicts", ["judge error", "130"]),
    ],
)
def test_a_reference_page_has_what_its_source_has(site: Path, page: str, words: list[str]) -> None:
    text = re.sub(r"<[^>]+>", "", (site / f"docs/{page}.html").read_text())
    assert "generated:" not in text
    assert [word for word in words if word not in text] == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "CI must have chromium: see .ci/run"
    words = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(words))
        yield started
        started.close()


@pytest.mark.skipif(
    CHROMIUM is None and os.environ.get("CI") != "true",
    reason="no chromium here: apt-get install chromium",
)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_pages_fit_and_ask_nothing_of_a_network(
    site: Path, browser: Any, width: int, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    backgrounds = set()
    for name in SHOWN:
        page.goto((site / f"{name}.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    context.close()
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    red = int(re.findall(r"\d+", backgrounds.pop())[0])
    assert not backgrounds and (red > 200) == (scheme == "light")
