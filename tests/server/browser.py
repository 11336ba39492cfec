"""A real browser for the dashboard's tests, and what it must never do: complain, or ask anybody but its own server.

Run as a script it says in one line how to get a browser, or nothing where there is one.
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    pass

VARIABLE = "PACLM_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW_TO_GET_ONE = (
    "No Chromium found, so the dashboard's browser tests are skipped: apt-get install chromium, "
    f"or set {VARIABLE}=/path/to/chromium."
)
# Told by the page itself: a violation that breaks nothing would otherwise pass unseen.
_REPORT_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) =>
  console.error(`content security policy: ${event.violatedDirective} ${event.blockedURI}`));
"""


def find_chromium():
    """The browser that PACLM_CHROMIUM names, or the first on the search path."""
    if named := os.environ.get(VARIABLE):
        return Path(named) if Path(named).is_file() else None
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return Path(found) if found else None


@contextmanager
def open_browser():
    from playwright.sync_api import sync_playwright

    executable = find_chromium()
    assert executable is not None, HOW_TO_GET_ONE
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, timeout=120_000)
        yield browser
        browser.close()


class Visit:
    """One page in a fresh profile, and everything it said and asked for."""

    def __init__(self, browser, address, **context):
        self.address = address
        self.complaints = []
        self.foreign = []
        self.refused = []
        """Status codes of 400 and more."""
        self._context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **context}
        )
        self._context.set_default_timeout(60_000)
        self._context.add_init_script(_REPORT_VIOLATIONS)
        self.page = self._context.new_page()
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._saw_request)
        self.page.on("response", lambda response: self.refused.append(response.status) if not response.ok else None)

    def _heard(self, message):
        # Chromium itself writes a line for every status of 400 and more; `refused` has those.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.complaints.append(message.text)

    def _saw_request(self, request):
        if urlsplit(request.url).netloc != urlsplit(self.address).netloc and not request.url.startswith("data:"):
            self.foreign.append(request.url)

    def log_in(self, key):
        """Open the page and hand the key over, as somebody with a keyboard does."""
        self.page.goto(self.address)
        self.page.locator("#key").fill(key)
        self.page.keyboard.press("Enter")
        return self.page

    def open_panel(self, key):
        page = self.log_in(key)
        page.locator("#panel").wait_for(state="visible")
        return page

    def close(self):
        self._context.close()


if __name__ == "__main__" and find_chromium() is None:
    print(HOW_TO_GET_ONE)
