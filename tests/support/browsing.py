"""Headless Chromium for tests of pages, and a visit that fails on errors and on requests.

Needs Debian's ``chromium`` (``apt-get install chromium``) and the package ``playwright`` without
its own browsers.  Tests are skipped only where there is no Chromium and this is not CI.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None and os.environ.get("CI") != "true",
        reason="no chromium here: apt-get install chromium",
    ),
]
_ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
#: The longest wait for an action of the browser, in milliseconds, while other tests run.
PATIENCE_MS = 240_000
PHONE, DESK = {"width": 380, "height": 780}, {"width": 1280, "height": 900}


@contextmanager
def started_browser() -> Iterator[Any]:
    """Chromium, which ends with the block."""
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "CI must have chromium: see .ci/run"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(_ARGUMENTS))
        yield started
        started.close()


class Visit:
    """Pages that were opened, what they asked for and what they complained of."""

    def __init__(self, browser: Any, address: str, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda told: self.complaints.append(told.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(address)

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *_: object) -> None:
        self.context.close()
        assert self.complaints == []
        assert [u for u in self.requests if not u.startswith(("file:", "data:"))] == []
