"""The prose of the repository, sentence by sentence: pages in Markdown, and docstrings and comments of Python files."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SECTION = re.compile(r"(Args|Returns|Yields|Raises|Attributes|Example|Examples|Note):$")
_ITEM = re.compile(r"\s*([-*] |\d+\. |\w([\w*, ]|\.(?! ))*(\([^)]*\))?: )")
# Abbreviations whose full stop does not end a sentence.
_STOPS = re.compile(r"\b(e\.g|i\.e|et al|vs|cf|no|fig|sec|eq)\.", re.IGNORECASE)


@dataclass(frozen=True)
class Sentence:
    """One sentence of a file. `code` in it is replaced by the one word `CODE`, a link by its text.

    Attributes:
        file: file that contains it.
        line: number of the line on which its paragraph begins.
        text: the sentence.
    """

    file: Path
    line: int
    text: str

    @property
    def words(self) -> int:
        """Number of words; numbers and code count, signs do not."""
        return sum(any(c.isalnum() for c in word) for word in self.text.split())


@functools.cache
def sentences(file: Path) -> list[Sentence]:
    """Returns the sentences of a page or of a Python file, which nobody changes after the first call."""
    paragraphs = _page(file.read_text()) if file.suffix == ".md" else _source(file.read_text())
    return [Sentence(file, line, text) for line, paragraph in paragraphs for text in _split(paragraph)]


def _split(paragraph: str) -> Iterator[str]:
    text = re.sub(r"``?[^`]+``?", "CODE", paragraph)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+", "URL", text)
    text = _STOPS.sub(lambda found: found[0].replace(".", ""), text)
    for sentence in re.split(r"(?<=[.!?])[)*\"']*\s+", " ".join(text.split())):
        if sentence:
            yield sentence


def _paragraphs(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Joins lines to paragraphs: an empty line, a list item, an argument and a heading begin a new one."""
    first, parts = 0, list[str]()
    for number, line in lines:
        begins = not line.strip() or _ITEM.match(line) or _SECTION.match(line.strip())
        if begins and parts:
            yield first, " ".join(parts)
            parts = []
        if line.strip() and not _SECTION.match(line.strip()):
            first = first if parts else number
            parts.append(_ITEM.sub("", line, count=1) if begins else line.strip())
    if parts:
        yield first, " ".join(parts)


def _page(text: str) -> Iterator[tuple[int, str]]:
    lines, fenced = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            lines.append((number, ""))
        elif fenced or re.fullmatch(r"\s*[|: -]*\s*", line):
            lines.append((number, ""))
        elif line.strip().startswith("|"):
            lines += [
                each for cell in line.strip().strip("|").split("|") for each in ((number, cell.strip()), (number, ""))
            ]
        elif line.startswith("#") or line.startswith("<"):
            lines += [(number, ""), (number, line.lstrip("# ")), (number, "")]
        else:
            lines.append((number, line))
    yield from _paragraphs(lines)


def _source(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
                docstring = body[0].value.value
                if isinstance(docstring, str):
                    yield from _paragraphs(list(enumerate(_prose(docstring), body[0].lineno)))
    comments, last = list[tuple[int, str]](), -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|fmt:|mypy:|!)", token.string):
            line, column = token.start
            beside_code = bool(token.line[:column].strip())
            if beside_code or line != last + 1:
                comments.append((line, ""))
            comments.append((line, token.string.lstrip("# ")))
            last = -1 if beside_code else line
    yield from _paragraphs(comments)


def _prose(docstring: str) -> Iterator[str]:
    """The lines of a docstring, with indented literal blocks and tables left out."""
    literal = False
    indent = 0
    for line in docstring.expandtabs().splitlines():
        depth = len(line) - len(line.lstrip())
        if literal and line.strip() and depth <= indent:
            literal = False
        if literal or re.match(r"\s*(>>>|\.\.\.|\|)", line):
            yield ""
            continue
        if line.rstrip().endswith("::"):
            literal, indent = True, depth
        # Columns of a table are set apart by several spaces.
        yield "" if re.search(r"\S   +\S", line) else line
