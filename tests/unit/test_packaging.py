"""The package that people install: whole, startable from anywhere, and with versions that fit each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gateway import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements-dev.lock").read_text().splitlines()
BUILD = "import hatchling.build as b, sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def build(what: str, folder: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked: what an installation puts beside its dependencies."""
    wheel = build("build_wheel", tmp_path_factory.mktemp("dist"))
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(unpacked: Path) -> None:
    def files(root: Path) -> set[str]:
        found = (path for path in (root / "gateway").rglob("*") if path.is_file())
        return {str(path.relative_to(root)) for path in found if "__pycache__" not in path.parts}

    assert files(unpacked) == files(ROOT)
    assert "gateway/py.typed" in files(unpacked)
    others = {path.name for path in unpacked.iterdir()} - {"gateway"}
    assert others == {f"slotgate-{__version__}.dist-info"}


def test_the_wheel_runs_from_an_empty_folder(unpacked: Path, tmp_path: Path) -> None:
    starts = "import gateway, gateway.__main__ as m; print(gateway.__file__); m.main(prog_name='slotgate')"
    done = subprocess.run(
        [sys.executable, "-P", "-c", starts, "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        check=False,
    )
    where, version = done.stdout.splitlines()
    assert Path(where).is_relative_to(unpacked)
    assert version == f"slotgate, version {__version__}"
    assert list(tmp_path.iterdir()) == []


def test_the_command_is_called_slotgate(unpacked: Path) -> None:
    (points,) = unpacked.glob("*.dist-info/entry_points.txt")
    assert "slotgate = gateway.__main__:main" in points.read_text()


def test_the_source_archive_holds_what_its_tests_and_documents_need(tmp_path: Path) -> None:
    with tarfile.open(build("build_sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in (
        "pyproject.toml",
        "Makefile",
        "requirements-dev.lock",
        "README.md",
        "LICENSE",
        "gateway/__main__.py",
        "config/minimal.yaml",
        "docs/quickstart.md",
        "tests/conftest.py",
    ):
        assert needed in names, needed
    assert not [name for name in names if ".venv" in name or "__pycache__" in name]


def test_the_lock_is_of_plain_versions_and_names_no_index() -> None:
    pins = [line for line in LOCK if not line.startswith("#")]
    assert pins
    assert [line for line in pins if not re.fullmatch(r"[\w.-]+==[\w.!+-]+", line)] == []


def test_the_lock_fits_the_project() -> None:
    pins = dict(line.split("==") for line in LOCK if not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    extras = PROJECT["optional-dependencies"]
    wrong = []
    for text in [*PROJECT["dependencies"], *extras["dev"], *extras["demo"]]:
        needed = Requirement(text)
        pinned = pins.get(canonicalize_name(needed.name))
        if pinned is None or not needed.specifier.contains(pinned, prereleases=True):
            wrong.append(f"{text}: locked is {pinned}")
    assert wrong == [], "run `make lock`"


def test_nothing_committed_names_a_private_index_or_somebodys_folder() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    private = re.compile(rb"(?:extra-)?index-url|/(?:root|work|home/\w+)/")
    found = {}
    for name in listed.stdout.split("\0"):
        file = ROOT / name
        if (
            name
            and file.is_file()
            and not name.startswith("tests/")
            and (hit := private.search(file.read_bytes()))
        ):
            found[name] = hit[0]
    assert found == {}
