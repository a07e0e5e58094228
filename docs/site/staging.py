"""Copies the pages of the repository to a folder for Sphinx, with links that work inside the site.

Pages in the repository stay as they are, and have links of plain Markdown. In the copy a link leads to:

- another page, at its place in the site;
- a page that shows a source file, for each file or folder that a page links;
- a copy of the file, for data and pictures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from docs.site.navigation import Navigation

# Files that a page shows, by their suffix, and the language of their text. A file of another kind is copied.
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml", ".txt": "text", "": "text"}
# A link of Markdown: what stands before its target, the target, and what stands behind it.
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
CODE = re.compile(r"(``[^`]+``|`[^`]+`)")
ANCHOR = re.compile(r'^<a id="([\w-]+)"></a>$')
FENCE = re.compile(r"\s*(`{3,}|~{3,})")


class StagingError(Exception):
    """A page has a link that leads nowhere, or no place in the navigation."""


def place(name: str) -> str:
    """Returns where a page or a file is staged, by its name below the root of the repository.

    Pages of `docs/` are at the top of the site, and a `README.md` is the index of its folder.
    """
    path = PurePosixPath(name)
    if path.suffix != ".md":
        return f"files/{name}"
    if path.parts[0] == "docs":
        path = PurePosixPath(*path.parts[1:])
        return (path.with_name("index.md") if path.name == "README.md" else path).as_posix()
    return f"project/{name.lower()}"


@dataclass
class Staging:
    """The copy of one repository's pages.

    Attributes:
        root: the repository.
        folder: where the copies are written.
        navigation: the order of pages.
        shown: places of source files and folders that pages link, by their names below the root.
        copied: names of files that are copied as they are.
    """

    root: Path
    folder: Path
    navigation: Navigation
    shown: dict[str, str] = field(default_factory=dict)
    copied: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Writes all copies."""
        pages = self.navigation.pages()
        missing = sorted({*self.pages_on_disk()} ^ {*pages})
        if missing:
            raise StagingError(
                f"these pages are in the navigation or on disk, expected both: {', '.join(missing)}; "
                "change NAVIGATION in docs/site/navigation.py"
            )
        for name in pages:
            text = self.page(name, (self.root / name).read_text())
            self.write(place(name), text + self.navigation.contents(name, place))
        for name in sorted(self.shown):
            self.write(self.shown[name], self.source(name))
        # Folders add the files that they list.
        for name in sorted(self.copied):
            target = self.folder / place(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((self.root / name).read_bytes())

    def write(self, where: str, text: str) -> None:
        """Writes one staged page."""
        target = self.folder / where
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def pages_on_disk(self) -> list[str]:
        """Returns the names of all pages: those of `docs/`, and those at the top of the repository."""
        found = [*self.root.glob("*.md"), *(self.root / "docs").rglob("*.md")]
        return sorted(page.relative_to(self.root).as_posix() for page in found)

    def page(self, name: str, text: str) -> str:
        """Returns the text of a page, with the links of the site."""
        lines = []
        for line, is_prose in prose_lines(text):
            if not is_prose:
                lines.append(line)
            elif found := ANCHOR.match(line):
                lines.append(f"({found[1]})=")
            else:
                parts = CODE.split(line)
                parts[::2] = [LINK.sub(lambda link: self.link(name, link), part) for part in parts[::2]]
                lines.append("".join(parts))
        return "\n".join(lines) + "\n"

    def link(self, name: str, found: re.Match[str]) -> str:
        """Returns one link of a page as the site has it."""
        target = found[2]
        if "://" in target or target.startswith(("#", "mailto:")):
            return found[0]
        path, _, anchor = target.partition("#")
        to = normpath(str(PurePosixPath(name).parent / path))
        if to.startswith("..") or not (self.root / to).exists():
            raise StagingError(f"{name}: the link to {target} leads to no file; expected a path from the page's folder")
        where = relpath(self.place_of(to), PurePosixPath(place(name)).parent.as_posix())
        return f"{found[1]}{where}{'#' * bool(anchor)}{anchor}{found[3]}"

    def place_of(self, name: str) -> str:
        """Returns where a linked file or folder is staged, and stores that a page links it."""
        path = self.root / name
        if path.suffix == ".md":
            return place(name)
        if path.is_dir() or path.suffix in LANGUAGES:
            self.shown.setdefault(name, f"source/{name}{'/index' * path.is_dir()}.md")
            if path.is_dir():
                for file in files_in(path):
                    self.place_of(file.relative_to(self.root).as_posix())
            return self.shown[name]
        self.copied.add(name)
        return place(name)

    def source(self, name: str) -> str:
        """Returns the page of a source file, or the list of a folder's files."""
        path = self.root / name
        if path.is_dir():
            files = [file.relative_to(self.root).as_posix() for file in files_in(path)]
            here = PurePosixPath(self.shown[name]).parent.as_posix()
            items = [f"- [{PurePosixPath(file).name}]({relpath(self.place_of(file), here)})" for file in files]
            return "\n".join(["---", "orphan: true", "---", f"# {name}/", "", *items, ""])
        text = path.read_text()
        # The fence is longer than any in the file.
        fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text) or [""]))
        head = ["---", "orphan: true", "---", f"# {name}", ""]
        code = [f"{fence}{{code-block}} {LANGUAGES[path.suffix]}", ":linenos:", "", text.rstrip("\n"), fence, ""]
        return "\n".join(head + code)


def files_in(folder: Path) -> list[Path]:
    """Returns the files of a folder that a page may show."""
    return sorted(
        file for file in folder.iterdir() if file.is_file() and file.suffix in LANGUAGES and file.stat().st_size
    )


def prose_lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yields each line of a page, with True if it is outside of fenced code."""
    fence = ""
    for line in text.splitlines():
        found = FENCE.match(line)
        if not fence and found:
            fence = found[1]
            yield line, False
        elif fence:
            if found and found[1].startswith(fence) and line.strip() == found[1]:
                fence = ""
            yield line, False
        else:
            yield line, True
