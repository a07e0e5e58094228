"""The order of the site's pages: sections of the sidebar, and the pages below other pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import dirname, relpath

START = "docs/README.md"
# Pages that the build writes, by their places in the site without a suffix.
ENVIRONMENT, INTERFACE = "reference/environment", "api/index"
# Sections of the sidebar. A folder's README.md has those pages of its folder below it that are in no section, in the order of its
# links.
SECTIONS: dict[str, Sequence[str]] = {
    "Which algorithm?": ["choosing.md", "advise.md"],
    "Tutorials": [
        *("tutorials/README.md", "tutorials/first-slow-link.md", "tutorials/unequal-machines.md"),
        *("tutorials/losing-a-machine.md", "tutorials/own-codec.md", "tutorials/own-algorithm.md"),
    ],
    "Guides": [
        *("installing.md", "overview.md", "examples.md", "from-ddp.md", "frameworks.md", "finetune-lora.md"),
        *("ddp-hook.md", "fuse-optimizer.md", "loading.md", "elastic.md", "hierarchical.md", "doctor.md"),
        *("tuning.md", "command.md", "kernel-cache.md", "gpu.md", "security.md"),
    ],
    "Algorithms": ["algorithms/README.md"],
    "From other libraries": ["moving/README.md"],
    "Reference": [
        *("codecs.md", "optimizers.md", "wire-format.md", "wire-format-sparse.md", "communication.md"),
        *("compressed-collectives.md", "topologies.md", "powersgd.md", ENVIRONMENT, INTERFACE),
    ],
    "Evidence": ["results.md", "track.md", "trade-off.md", "models.md", "outer-steps.md", "faults.md"],
    "Development": [
        *("development.md", "architecture.md", "design-notes.md", "../CONTRIBUTING.md", "../CHANGELOG.md"),
        *("../SECURITY.md", "../README.md", "summary.md"),
    ],
}


@dataclass(frozen=True)
class Navigation:
    """The order of one repository's pages.

    Attributes:
        root: the repository.
        start: name of the first page.
        sections: names of pages from `docs/`, by the head of their section.
    """

    root: Path
    start: str = START
    sections: dict[str, Sequence[str]] = field(default_factory=lambda: SECTIONS)

    def pages(self) -> list[str]:
        """Returns the names of all pages below the root of the repository, in their order; not those that the build writes."""
        top = [self.name(entry) for entries in self.sections.values() for entry in entries if entry.endswith(".md")]
        return [self.start, *(page for name in top for page in (name, *self.below(name)))]

    def name(self, entry: str) -> str:
        """Returns the name of a section's entry below the root of the repository."""
        return entry.removeprefix("../") if entry.startswith("../") else f"docs/{entry}"

    def below(self, name: str) -> list[str]:
        """Returns the pages below a page: for a folder's README.md, those of the folder that are in no section."""
        if not name.endswith("/README.md") or name == self.start:
            return []
        folder = (self.root / name).parent
        own = {self.root / self.name(entry) for entries in self.sections.values() for entry in entries}
        others = [page for page in sorted(folder.glob("*.md")) if page not in own]
        linked = re.findall(r"\]\(([\w-]+\.md)", (self.root / name).read_text())
        order = {page: number for number, page in reversed(list(enumerate(linked)))}
        others.sort(key=lambda page: order.get(page.name, len(order)))
        return [page.relative_to(self.root).as_posix() for page in others]

    def contents(self, name: str, place: Callable[[str], str]) -> str:
        """Returns the hidden tables of contents of a page, in MyST.

        Args:
            name: the page.
            place: where a page is in the site.
        """
        if name == self.start:
            return "".join(
                self.table(name, list(entries), place, caption) for caption, entries in self.sections.items()
            )
        below = self.below(name)
        return self.table(name, below, place) if below else ""

    def table(self, name: str, entries: Sequence[str], place: Callable[[str], str], caption: str = "") -> str:
        """Returns one hidden table of contents."""
        here = dirname(place(name)) or "."
        places = [
            entry if not entry.endswith(".md") else place(self.name(entry) if name == self.start else entry)
            for entry in entries
        ]
        head = ["", "```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else [])]
        return "\n".join([*head, "", *(relpath(each, here).removesuffix(".md") for each in places), "```", ""])
