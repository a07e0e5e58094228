"""Pictures of finished pages in light and dark, narrow and wide; and what they may not do: be wider than the screen."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from docs.site.browser import Browser

WIDTHS = (400, 1400)
HEIGHT = 1200
# A page of each kind.
PAGES = (
    *("index", "choosing", "tutorials/own-algorithm", "algorithms/index", "algorithms/bytegrad", "results", "elastic"),
    *("reference/environment", "api/index", "api/bagua_kernels.algorithms", "source/comm/communicator.py"),
)
SEARCHED = "SparseLoCo"
TRIES, PAUSE = 100, 0.2  # looks at the results of a search, and seconds between two of them


def write(site: Path, folder: Path) -> None:
    """Writes the pictures of a finished site, and prints which pages scroll sideways."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with Browser() as browser:
        for name in PAGES:
            for width in WIDTHS:
                for is_dark in (False, True):
                    browser.open((site / f"{name}.html").as_uri(), width, HEIGHT, is_dark)
                    scheme = "dark" if is_dark else "light"
                    browser.picture(folder / f"{name.replace('/', '-')}-{width}-{scheme}.png")
        wide = list(too_wide(browser, site))
        found = results_of_search(browser, site)
        browser.picture(folder / "search.png")
    print(f"pictures are in {folder}; a search for {SEARCHED} finds {found} pages")
    if wide or not found:
        raise SystemExit("\n".join([*wide, "expected no page that scrolls sideways, and a search that finds pages"]))


def too_wide(browser: Browser, site: Path) -> Iterator[str]:
    """Yields a text for each page of a site that is wider than a narrow screen."""
    for file in sorted(site.rglob("*.html")):
        browser.open(file.as_uri(), WIDTHS[0], HEIGHT, is_dark=False)
        width = browser.value("document.documentElement.scrollWidth")
        if width > WIDTHS[0]:
            yield f"{file.relative_to(site)} is {width} px wide on a screen of {WIDTHS[0]} px"


def results_of_search(browser: Browser, site: Path) -> int:
    """Returns how many pages a search finds."""
    browser.open(f"{(site / 'search.html').as_uri()}?q={SEARCHED}", WIDTHS[1], HEIGHT, is_dark=False)
    # Results come one after the other.
    count = "document.body.innerText.includes('Search finished') && document.querySelectorAll('ul.search > li').length"
    for _ in range(TRIES):
        if found := browser.value(count):
            return int(found)
        time.sleep(PAUSE)
    return 0
