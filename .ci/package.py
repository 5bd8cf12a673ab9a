"""Checks what would be published, after ``python -m build``.

``tox -e package`` builds, checks and installs; ``python .ci/package.py FOLDER`` is its
last step. The sdist has every file that pyproject.toml names and no other; the wheel has the
package, ``py.typed`` and the command, and works in a fresh environment without any of its
dependencies as far as nothing is loaded.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
_FIND_TYPES = """
import sys, spdl_torch
from pathlib import Path
sys.exit(not Path(spdl_torch.__file__).with_name("py.typed").exists())
"""

BY_ITSELF = {"PKG-INFO", "pyproject.toml", ".gitignore"}
"""Added to every sdist."""


def files_in_git(*paths: str) -> set[str]:
    """The files below these paths, as the repository has them."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *paths]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


def check_equal(what: str, there: set[str], wanted: set[str]) -> None:
    """Exit with the names that are too many or too few."""
    if there != wanted:
        sys.exit(f"{what}: missing {sorted(wanted - there)}, not wanted {sorted(there - wanted)}")
    print(f"{what}: all {len(wanted)}, and no other")


def check_sdist(path: Path) -> None:
    """It has what ``[tool.hatch.build.targets.sdist]`` includes."""
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    include = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    check_equal(path.name, names - BY_ITSELF, files_in_git(*include))
    missing = BY_ITSELF - {".gitignore"} - names
    if missing:
        sys.exit(f"{path.name}: missing {sorted(missing)}")


def check_wheel(path: Path) -> str:
    """It has the package alone, with its types; return the version."""
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        content = message_from_bytes(archive.read(metadata))
    check_equal(
        path.name,
        {name for name in names if ".dist-info/" not in name},
        files_in_git("spdl_torch"),
    )
    if "spdl_torch/py.typed" not in names:
        sys.exit(f"{path.name}: no py.typed")
    if content["Requires-Python"] != PROJECT["project"]["requires-python"]:
        sys.exit(f"{path.name}: Requires-Python is {content['Requires-Python']}")
    check_links(str(content.get_payload()), str(content["Version"]))
    extras = set(content.get_all("Provides-Extra", []))
    check_equal("extras", extras, set(PROJECT["project"]["optional-dependencies"]))
    return str(content["Version"])


def check_links(page: str, version: str) -> None:
    """What an index page shows has no relative link, and those into the repository lead to files
    of this release."""
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    source = re.escape(PROJECT["project"]["urls"]["Source"])
    inside = [re.fullmatch(rf"{source}/(?:blob|raw)/v{version}/([^#]+)(#.*)?", x) for x in links]
    check_equal("links that are not whole", {x for x in links if not re.match("[a-z]+:", x)}, set())
    missing = {x[1] for x in inside if x and not (ROOT / x[1]).is_file()}
    if missing or not any(inside):
        sys.exit(f"the index page links to what is not there: {sorted(missing)}")


def check_release(version: str) -> None:
    """A version that is no ``.dev`` one is the changelog's newest, and the one to cite."""
    if "dev" in version:
        return
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / ".github" / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d[\d.]*) - (\d{4}-\d\d-\d\d)$", changelog, flags=re.M)
    cited = re.search(r'^version: (.+)\ndate-released: "(.+)"$', citation, flags=re.M)
    if newest is None or cited is None or newest.groups() != cited.groups():
        sys.exit(f"the changelog's newest release is {newest}, the one to cite is {cited}")
    if newest[1] != version:
        sys.exit(f"the version is {version}, the changelog's newest is {newest[1]}")


def check_installed(archive: Path, version: str) -> None:
    """Install the wheel, or the sdist as pip builds it, into a fresh environment without any of its
    dependencies: the command says its version, and the types are there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        programs = Path(folder) / ("Scripts" if sys.platform == "win32" else "bin")
        install = [programs / "python", "-m", "pip", "install", "--quiet", "--no-deps", archive]
        subprocess.run(install, check=True)
        for command in (
            [programs / "spdl-torch", "--version"],
            [programs / "python", "-m", "spdl_torch", "--version"],
            [programs / "python", "-c", "import spdl_torch; print(spdl_torch.__version__)"],
        ):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if done.returncode != 0 or version not in done.stdout:
                sys.exit(f"{command}: {done.stdout}{done.stderr}")
        typed = [programs / "python", "-c", _FIND_TYPES]
        if subprocess.run(typed, cwd=folder).returncode != 0:
            sys.exit(f"{archive.name}: installed without py.typed")
        print(f"{archive.name} installed: --version says {version}, and nothing else was needed")


def main() -> None:
    """Check the one sdist and the one wheel in the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with an sdist and a wheel")
    folder = parser.parse_args().folder
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    check_sdist(sdist)
    version = check_wheel(wheel)
    check_release(version)
    for archive in (wheel, sdist):
        check_installed(archive, version)


if __name__ == "__main__":
    main()
