"""Plain English on pages, in docstrings, comments and errors: short sentences, no private phrases, one meaning a word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.docs.prose import Sentence, sentences

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FLOORS = ("bagua_kernels", "comm", "algorithms")
SOURCES = [
    file
    for folder in (*FLOORS, "bench", "docs", "examples")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if not any(parent.is_symlink() for parent in file.parents)
]

MOST_WORDS = 25

# Beside each pattern, what to write instead.
PHRASES = {
    r"\bwhoever\b|\bhis own\b|\bsomebody\b": "name the code, the rank or the caller",
    r"\btakes? note of\b": "stores",
    r"\blets? go of\b": "releases, drops",
    r"\btells?\b": "returns, raises, logs, contains",
    r"\bsays?\b": "returns, raises, logs, contains",
    r"\bsigns? of life\b": "heartbeat",
    r"\bone more says\b|\bwhat is lent\b": "name the noun",
    r"\b(bytes?|floats?|float32|bits?|seconds|calls?|sockets|connections?|scales?|one) an? "
    r"(rank|element|block|step|host|node|parameter|pair|bucket|call|tensor|process|second)\b": "per",
    r"\bfor ever so\b|\bhave the wire\b|\bfall short of it\b": "a plain verb",
    # "All told" is the name of rows in committed results.
    r"(?<!\ball )\btold\b": "sent, reported, called with, distinguished",
    r"\bgone on with\b": "continued, reused",
    r"(?<!there )\bis (?-i:none)\b(?! of (these|those|them)\b)": "is not one, is not from",
    r"\bagain is harmless\b": "calling it again does nothing",
}

# Parts of names that have got a field term; on the right, the term.
WORDS = {"verdict": "diagnosis", "twin": "copy", "meeting": "rendezvous", "attempt": "start"}
# Further ones of algorithms.
HOOKS = {
    "lends": "reads",
    "adopts": "reads",
    "late": "has_memory",
    "settle": "end_step",
    "units": "loss_scale",
    "waits": "yields",
}
# Each of these names has one class on all floors.
ONE_CLASS = ("Layout", "Plan", "Lane", "Part", "Watch", "Store", "Table", "Group", "Counters")


def place(file: Path) -> str:
    return file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name


def long_sentences(files: Iterable[Path]) -> list[str]:
    return [
        f"{place(each.file)}:{each.line}: {each.words} words, expected at most {MOST_WORDS}; divide: {each.text}"
        for file in files
        for each in sentences(file)
        if each.words > MOST_WORDS
    ]


def found_phrases(each: Sentence) -> Iterator[str]:
    for pattern, instead in PHRASES.items():
        if found := re.search(pattern, each.text, re.IGNORECASE):
            yield f"{place(each.file)}:{each.line}: {found[0]!r}; write: {instead}: {each.text}"


def texts(file: Path) -> Iterator[Sentence]:
    """The strings of a file that a user may read, such as errors; docstrings are left out."""
    tree = ast.parse(file.read_text())
    prose = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value and node not in prose:
            yield Sentence(file, node.lineno, node.value)


def private_texts(files: Iterable[Path]) -> list[str]:
    return [message for file in files for each in texts(file) for message in found_phrases(each)]


def private_phrases(files: Iterable[Path]) -> list[str]:
    return [message for file in files for each in sentences(file) for message in found_phrases(each)]


def booleans_without_true(files: Iterable[Path]) -> list[str]:
    """Descriptions of attributes and arguments, and cells of tables, that begin with "whether"."""
    return [
        f"{place(each.file)}:{each.line}: begins with 'whether'; write 'True if …': {each.text}"
        for file in files
        for each in sentences(file)
        if each.text.lower().startswith("whether ")
    ]


def definitions(file: Path) -> Iterator[tuple[int, str]]:
    """The names of classes, functions and attributes that a file defines, with their lines; not of local variables."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield statement.lineno, statement.target.id
                elif isinstance(statement, ast.Assign):
                    yield from ((statement.lineno, each.id) for each in statement.targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def old_names(files: Iterable[Path]) -> list[str]:
    messages, classes = [], dict[str, str]()
    for file in files:
        words = {**WORDS, **HOOKS} if place(file).startswith("algorithms/") else WORDS
        for line, name in definitions(file):
            parts = {part.lower() for part in re.findall(r"[A-Z]?[a-z]+", name)}
            messages += [
                f"{place(file)}:{line}: {name}: expected {words[w]!r} instead of {w!r}" for w in parts & set(words)
            ]
            if name in ONE_CLASS and classes.setdefault(name, place(file)) != place(file):
                messages.append(f"{place(file)}:{line}: {name} is a name in {classes[name]} already; expected another")
    return messages


def test_sentences_are_short() -> None:
    assert not (found := long_sentences(PAGES + SOURCES)), "\n".join(found)


def test_phrases_are_plain() -> None:
    assert not (found := private_phrases(PAGES + SOURCES)), "\n".join(found)


def test_errors_are_plain() -> None:
    sources = [file for file in SOURCES if file.relative_to(ROOT).parts[0] in FLOORS]
    assert not (found := private_texts(sources)), "\n".join(found)


def test_booleans_begin_with_true_if() -> None:
    assert not (found := booleans_without_true(PAGES + SOURCES)), "\n".join(found)


def test_names_have_one_meaning() -> None:
    sources = [file for file in SOURCES if file.relative_to(ROOT).parts[0] in FLOORS]
    assert not (found := old_names(sources)), "\n".join(found)


def test_faults_are_found(tmp_path: Path) -> None:
    """Each check finds its fault in a file that has all of them."""
    file = tmp_path / "faulty.py"
    file.write_text(
        f'"""Does {"very " * MOST_WORDS}much.\n\nAttributes:\n    verdict: whether it tells four bytes a rank.\n"""\n\n'
        "verdict = True  # whoever reads this\n"
        'error = "rank 0 says so"\n'
    )
    page = tmp_path / "faulty.md"
    page.write_text(f"# Page\n\nA {'long ' * MOST_WORDS}sentence.\n\n| `late` | whether it says so |\n")
    (line,) = long_sentences([file])
    assert line.startswith("faulty.py:1: 27 words")
    assert [message.split()[0] for message in long_sentences([page])] == ["faulty.md:3:"]
    assert len(private_phrases([file])) == 3
    assert len(private_phrases([page])) == 1
    assert [message.split()[:2] for message in private_texts([file])] == [["faulty.py:8:", "'says';"]]
    assert [message.split()[0] for message in booleans_without_true([file, page])] == ["faulty.py:4:", "faulty.md:5:"]
    assert len(old_names([file])) == 1


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("The caller is told.", 1),
        ("Buckets are gone on with.", 1),
        ("A spec is none.", 1),
        ("Ends it; again is harmless.", 1),
        ("The value is None, if there is none, or is none of these. It goes on with all told.", 0),
    ],
)
def test_phrases_are_found(tmp_path: Path, text: str, faults: int) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{text}\n")
    assert len(private_phrases([page])) == faults


def test_items_hide_no_sentence(tmp_path: Path) -> None:
    """A name before a colon begins an argument's description; words with a full stop among them do not."""
    file = tmp_path / "items.py"
    file.write_text('"""Does it.\n\nArgs:\n    one, two: the first. It is\n        told. So: it ends.\n"""\n')
    assert [each.text for each in sentences(file)] == ["Does it.", "the first.", "It is told.", "So: it ends."]
