"""The builder of the documentation site: staged pages, the order of pages, the check of links, and pages of the interface."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from docs.site import interface
from docs.site.links import Site
from docs.site.navigation import Navigation
from docs.site.staging import Staging, StagingError, place

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "# Project\n\n[docs](docs/README.md)\n",
    "docs/README.md": "# Start\n\n[one](one.md#a-head) [two](folder/README.md) [three](https://example.org/x.md)\n",
    "docs/one.md": (
        "# One\n\n## A head\n\n<a id=\"here\"></a>\n\n[code](../src/it.py), [data](../data/x.json), [up](../README.md)\n"
        "[folder](../src) ![picture](../data/x.png) `[not](../a/link.md)`\n\n```md\n[nor](../this/one.md)\n```\n"
    ),
    "docs/folder/README.md": "# Folder\n\n[b](b.md) and [a](a.md), [one](../one.md#here)\n",
    "docs/folder/a.md": "# A\n",
    "docs/folder/b.md": "# B\n",
    "src/it.py": '"""It."""\n\nx = "```"\n',
    "data/x.json": "{}",
    "data/x.png": "",
}  # fmt: skip
SECTIONS = {"All": ["one.md", "folder/README.md", "made"], "Project": ["../README.md"]}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def staged(tmp_path: Path, **changes: str) -> Path:
    root = write(tmp_path / "root", PAGES | {name.replace("__", "/") + ".md": text for name, text in changes.items()})
    Staging(root, tmp_path / "staged", Navigation(root, sections=dict(SECTIONS))).run()
    return tmp_path / "staged"


def test_links_lead_to_the_places_in_the_site(tmp_path: Path) -> None:
    folder = staged(tmp_path)
    one = (folder / "one.md").read_text()
    assert "[code](source/src/it.py.md), [data](files/data/x.json), [up](project/readme.md)" in one
    assert "[folder](source/src/index.md) ![picture](files/data/x.png)" in one
    assert "(here)=" in one
    for kept in ("`[not](../a/link.md)`", "[nor](../this/one.md)"):
        assert kept in one
    index = (folder / "index.md").read_text()
    assert "[one](one.md#a-head) [two](folder/index.md) [three](https://example.org/x.md)" in index
    assert (folder / "files/data/x.json").read_text() == "{}"
    assert "[it.py](it.py.md)" in (folder / "source/src/index.md").read_text()
    # A fence in the file does not end that of the page.
    assert "````{code-block} python" in (folder / "source/src/it.py.md").read_text()


def test_pages_below_others_are_in_the_order_of_their_links(tmp_path: Path) -> None:
    folder = staged(tmp_path)
    tables = (folder / "index.md").read_text().split("```{toctree}")[1:]
    assert next(table.split()[-4:-1] for table in tables) == ["one", "folder/index", "made"]
    assert ":caption: Project" in tables[1]
    assert (folder / "folder/index.md").read_text().split("```{toctree}")[1].split()[1:3] == ["b", "a"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"docs__folder__a": "[x](lost.md)\n"}, "docs/folder/a.md: the link to lost.md leads to no file"),
        ({"docs__folder__a": "[x](../../../x)\n"}, "leads to no file"),
        ({"docs__extra": "# Extra\n"}, "docs/extra.md"),
    ],
)
def test_faults_of_pages_are_errors(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(StagingError, match=message):
        staged(tmp_path, **changes)


def test_all_pages_have_a_place(tmp_path: Path) -> None:
    """`make docs` stages what is here, and no other page; the pages themselves stay as they are."""
    before = {file: file.stat().st_mtime_ns for file in ROOT.glob("docs/**/*.md")}
    staging = Staging(ROOT, tmp_path, Navigation(ROOT))
    staging.run()
    assert (tmp_path / "index.md").is_file()
    assert {staging.root / name for name in staging.pages_on_disk()} >= set(before)
    assert before == {file: file.stat().st_mtime_ns for file in before}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("docs/README.md", "index.md"), ("docs/moving/README.md", "moving/index.md"), ("CHANGELOG.md", "project/changelog.md"),
     ("docs/a.md", "a.md"), ("bench/x.json", "files/bench/x.json")],
)  # fmt: skip
def test_places(name: str, expected: str) -> None:
    assert place(name) == expected


def html(body: str) -> str:
    return f"<html><head><link rel='stylesheet' href='style.css'></head><body>{body}</body></html>"


def test_every_broken_link_is_found(tmp_path: Path) -> None:
    write(tmp_path, {
        "style.css": "",
        "index.html": html(
            "<a href='sub/b.html#good'>1</a><a href='#top' id='top'>2</a><a href='https://example.org/'>3</a>"
            "<a href='lost.html'>4</a><a href='sub/b.html#lost'>5</a><img src='lost.png'><a href='../out.html'>6</a>"
            "<a href='/etc'>7</a><a href='mailto:a@example.org'>8</a><a href='sub/'>9</a><a href='with%20space.txt'>10</a>"
        ),
        "with space.txt": "",
        "sub/b.html": "<h1 id='good'>B</h1><a href='../index.html'>back</a><img srcset='../style.css 1x, no.png 2x'>",
        "lonely.html": html("<a href='index.html'>nobody comes here</a>"),
    })  # fmt: skip
    site = Site(tmp_path)
    site.check()
    assert sorted(site.broken) == [
        "index.html: ../out.html leads to no file",
        "index.html: /etc leads to no file",
        "index.html: lost.html leads to no file",
        "index.html: lost.png leads to no file",
        "index.html: sub/ leads to no file",
        "index.html: sub/b.html#lost leads to no anchor of sub/b.html",
        "lonely.html: no link leads here from index.html",
        "sub/b.html: no.png leads to no file",
    ]
    assert list(site.external_lines()) == ["https://example.org/  index.html"]


def test_names_without_a_docstring_are_found() -> None:
    class Bare:
        def method(self) -> None:
            pass

        def _private(self) -> None:
            pass

    class Described:
        """It is."""

        def method(self) -> None:
            """It is, too."""

    class Inherits(Described):
        """It is."""

        def method(self) -> None:
            pass

    names = [interface.Public("own", cls.__name__, cls) for cls in (Bare, Described, Inherits)]
    names.append(interface.Public("own", "NUMBER", 3))
    assert interface.undocumented(names) == ["own.Bare", "own.Bare.method"]


def test_public_names_have_docstrings() -> None:
    """And each is described on one page, or is another name of what is described."""
    file = ROOT / "tests" / "public_names.txt"
    names = interface.public_names(file)
    assert interface.undocumented(names) == []
    text = "".join(interface.Pages(names, interface.former_paths(file)).all().values())
    for each in names:
        mentions = (f":: {each.path}\n", f"``{each.path}``", f"~{each.path}`")
        assert any(mention in text for mention in mentions), each.path


def test_comments_of_values_are_found() -> None:
    comment = interface.comment_of("bagua_kernels.launchers.multitensor", "GRADIENT")
    assert " ".join(comment).startswith("The column of gradients")
    assert interface.comment_of("bagua_kernels.launchers.multitensor", "nothing") == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [("with |x| < 2", "with \\|x\\| < 2"), ("`|x|` and |y|", "`|x|` and \\|y\\|")],
)
def test_bars_are_escaped_in_prose_alone(line: str, expected: str) -> None:
    assert interface.escaped(["Code::", "", "    |a|", line]) == ["Code::", "", "    |a|", expected]


def test_environment_has_all_variables() -> None:
    from bagua_kernels import knobs

    page = interface.environment()
    for each in vars(knobs).values():
        if isinstance(each, knobs.Knob):
            assert f"| `{each.variable}` |" in page


@pytest.mark.slow
def test_the_site_builds() -> None:
    """Sphinx reads all pages, which takes a minute. `make docs` runs the tests of figures, too."""
    python = ROOT / ".venv-docs" / "bin" / "python"
    if not python.exists():
        pytest.skip("there is no .venv-docs: run make docs")
    found = subprocess.run([python, "-m", "docs.site", "--no-figures"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
