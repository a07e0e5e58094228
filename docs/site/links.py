"""Checks a site in HTML: each link and each picture leads to a file of the site, and each page can be reached."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from posixpath import normpath
from urllib.parse import unquote, urlsplit

# What a browser fetches, by the names of attributes.
ATTRIBUTES = ("href", "src", "srcset", "poster", "data", "action")
# Schemes of links that are no pages.
SCHEMES = ("mailto", "data", "javascript")


class _Page(HTMLParser):
    """Collects the links and the anchors of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.followed: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (name == "name" and tag == "a"):
                self.anchors.add(value)
            elif name in ATTRIBUTES and not (name == "data" and tag != "object"):
                parts = [part.split()[0] for part in value.split(",")] if name == "srcset" else [value]
                self.targets += parts
                if tag in ("a", "form"):
                    self.followed.update(parts)


@dataclass
class Site:
    """The pages of a folder with HTML.

    Attributes:
        folder: the folder.
        broken: a text for each link that leads nowhere, after `check`.
        external: addresses outside the site, with the pages that link them.
        count: number of links inside the site.
    """

    folder: Path
    broken: list[str] = field(default_factory=list)
    external: dict[str, set[str]] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.pages: dict[str, _Page] = {}
        for file in sorted(self.folder.rglob("*.html")):
            page = self.pages[file.relative_to(self.folder).as_posix()] = _Page()
            page.feed(file.read_text())

    def check(self, start: str = "index.html") -> None:
        """Follows all links, and fills `broken`, `external` and `count`.

        Args:
            start: page from which all others have to be within reach.
        """
        edges: dict[str, set[str]] = {}
        for name, page in self.pages.items():
            edges[name] = set()
            for target in page.targets:
                if (reached := self.follow(name, target)) and target in page.followed:
                    edges[name].add(reached)
        reached_pages, waiting = {start}, [start]
        while waiting:
            for to in edges.get(waiting.pop(), set()) - reached_pages:
                reached_pages.add(to)
                waiting.append(to)
        lonely = sorted(set(self.pages) - reached_pages)
        self.broken += [f"{name}: no link leads here from {start}" for name in lonely]

    def follow(self, name: str, target: str) -> str:
        """Returns the file to which a link leads; nothing if it leads out of the site or is broken."""
        parts = urlsplit(target)
        if parts.scheme in SCHEMES:
            return ""
        if parts.scheme or parts.netloc:
            self.external.setdefault(target, set()).add(name)
            return ""
        self.count += 1
        path = unquote(parts.path)
        to = normpath(f"{Path(name).parent.as_posix()}/{path}") if path else name
        if to.startswith("..") or path.startswith("/") or not (self.folder / to).is_file():
            self.broken.append(f"{name}: {target} leads to no file")
            return ""
        anchor = unquote(parts.fragment)
        if anchor and to in self.pages and anchor not in self.pages[to].anchors:
            self.broken.append(f"{name}: {target} leads to no anchor of {to}")
        return to

    def external_lines(self) -> Iterator[str]:
        """Yields a line for each address outside the site."""
        for address in sorted(self.external):
            yield f"{address}  {' '.join(sorted(self.external[address]))}"
