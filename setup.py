"""Puts back the links to the upper floors where an archive has turned them into text files, then builds.

`bagua_kernels/comm` and `bagua_kernels/algorithms` are symbolic links. Python's `zipfile`, and so `pip install` of a zip
archive, writes such a link as a text file that holds its target; packages behind it would be missing from the wheel.
"""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent


def restore_link(name: str) -> None:
    """Links `bagua_kernels/<name>` to the folder of that name at the top, unless there is code behind it already.

    Raises:
        SystemExit: the folder is not there, or the link cannot be made.
    """
    link = ROOT / "bagua_kernels" / name
    if (link / "__init__.py").is_file():
        return
    if not (ROOT / name / "__init__.py").is_file():
        raise SystemExit(f"the sources are incomplete: expected a package in {ROOT / name}; unpack the archive again")
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..") / name, target_is_directory=True)
    except OSError as error:
        raise SystemExit(
            f"{link} has to be a link to ../{name}, and cannot be made one ({error}): install from a git clone, or from "
            "a wheel"
        ) from error


restore_link("comm")
restore_link("algorithms")
setup()
