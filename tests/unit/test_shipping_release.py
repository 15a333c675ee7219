"""`make release-check` says everything that a release lacks, at once; and says so of the paper before it builds."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gateway import __version__

ROOT = Path(__file__).parents[2]
CHECK = ROOT / "deploy" / "release" / "check.sh"
KUSTOMIZATION = "deploy/kubernetes/base/kustomization.yaml"


def git(folder: Path, *arguments: str) -> None:
    who = {f"GIT_{role}_{what}": "t@t" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}  # fmt: skip
    subprocess.run(["git", *arguments], cwd=folder, env={**os.environ, **who}, check=True, capture_output=True)  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """As much of a project as the paper is about, committed and fit to be released as 1.2.3."""
    for name, text in {
        "gateway/__init__.py": '__version__ = "1.2.3"\n',
        "CHANGELOG.md": "# Changelog\n\n## Unreleased\n\n## 1.2.3 - 2026-05-04\n\n### Added\n\n- All of it.\n",
        KUSTOMIZATION: 'images:\n  - newTag: "1.2.3"\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "all")
    return tmp_path


def paper(folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", str(CHECK), "paper"],
        env={**os.environ, "RELEASE_ROOT": str(folder)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_checkout_that_lacks_nothing_is_fit(checkout: Path) -> None:
    assert paper(checkout) == (0, "Fit to be released: slotgate 1.2.3\n")
    git(checkout, "tag", "v1.2.3")
    assert paper(checkout)[0] == 0, "tagged, and checked again"


def test_everything_that_is_missing_is_said_at_once(checkout: Path) -> None:
    git(checkout, "tag", "v1.2.4")
    (checkout / "gateway/__init__.py").write_text('__version__ = "1.2.4"\n')
    changes = (checkout / "CHANGELOG.md").read_text()
    (checkout / "CHANGELOG.md").write_text(
        changes.replace("## Unreleased\n", "## Unreleased\n\n- More.\n")
    )
    git(checkout, "commit", "-aqm", "more")
    (checkout / "left.txt").write_text("not committed")
    status, told = paper(checkout)
    assert status == 1
    for part in ("no section `## 1.2.4", "under Unreleased", "newTag", "not committed", "tag v1.2.4 exists"):  # fmt: skip
        assert part in told, part


def test_a_version_that_pip_would_not_order_is_refused(checkout: Path) -> None:
    (checkout / "gateway/__init__.py").write_text('__version__ = "next"\n')
    assert "`next` is no version" in paper(checkout)[1]


def test_what_is_shipped_has_the_version_of_the_package() -> None:
    assert f'newTag: "{__version__}"' in (ROOT / KUSTOMIZATION).read_text()


def test_make_and_the_manual_name_the_check() -> None:
    assert "deploy/release/check.sh" in (ROOT / "Makefile").read_text()
    assert "make release-check" in (ROOT / "docs" / "releasing.md").read_text()
    assert os.access(CHECK, os.X_OK)
