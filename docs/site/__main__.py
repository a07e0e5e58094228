"""Builds the documentation site into build/docs/; each fault ends the build with an exit status of 1.

python -m docs.site                 checks figures, builds, and checks links
python -m docs.site --look          shows finished pages in a browser, and writes pictures to build/docs-look/
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from docs.site import interface, look
from docs.site.links import Site
from docs.site.navigation import ENVIRONMENT, Navigation
from docs.site.staging import Staging

ROOT = Path(__file__).parents[2]
STAGED, BUILT, PICTURES = ROOT / "build" / "docs-pages", ROOT / "build" / "docs", ROOT / "build" / "docs-look"
NAMES = ROOT / "tests" / "public_names.txt"


def check_figures() -> None:
    """Runs the tests that compare figures of pages with committed results."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "figures", "tests/docs"]
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit("a page has a figure that no committed file has; see above")


def stage() -> None:
    """Writes the pages for Sphinx."""
    shutil.rmtree(STAGED, ignore_errors=True)
    staging = Staging(ROOT, STAGED, Navigation(ROOT))
    staging.run()
    names = interface.public_names(NAMES)
    if lacking := interface.undocumented(names):
        sys.exit(f"these public names have no docstring: {', '.join(lacking)}; write one for each")
    for name, text in interface.Pages(names, interface.former_paths(NAMES)).all().items():
        staging.write(f"{name}.rst", text)
    staging.write(f"{ENVIRONMENT}.md", interface.environment())


def build() -> None:
    """Runs Sphinx, for which each warning is an error."""
    shutil.rmtree(BUILT, ignore_errors=True)
    conf = Path(__file__).parent
    options = [
        "-b",
        "html",
        "-c",
        str(conf),
        "-d",
        str(BUILT.with_name("docs-trees")),
        "-W",
        "--keep-going",
        "-q",
        "-E",
    ]
    if subprocess.run([sys.executable, "-m", "sphinx", *options, str(STAGED), str(BUILT)], cwd=ROOT).returncode:
        sys.exit("Sphinx has warnings or errors; see above")


def check_links() -> None:
    """Checks all links of the site, and lists those that lead out of it."""
    site = Site(BUILT)
    site.check()
    (BUILT / "external-links.txt").write_text("\n".join(site.external_lines()) + "\n")
    if site.broken:
        sys.exit("\n".join([*site.broken, f"{len(site.broken)} broken links; see above"]))
    print(f"{len(site.pages)} pages, {site.count} links inside the site, {len(site.external)} addresses outside")


def main() -> None:
    """Builds the site, or shows it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--look", action="store_true", help="write pictures of the finished pages")
    parser.add_argument("--no-figures", action="store_true", help="leave out the tests of figures")
    given = parser.parse_args()
    if given.look:
        look.write(BUILT, PICTURES)
        return
    begun = time.monotonic()
    if not given.no_figures:
        check_figures()
    stage()
    build()
    check_links()
    print(f"built {BUILT.relative_to(ROOT)} in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
