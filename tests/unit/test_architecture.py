"""The rules of the house that a machine can check: who may import whom, and that core and engines are pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "asyncio",
    "socket",
    "time",
    "random",
    "logging",
    "os",
    "httpx2",
    "starlette",
    "redis",
    "yaml",
    "prometheus_client",
}
PURE_FILES = sorted(
    path for package in ("core", "engines") for path in (ROOT / "gateway" / package).rglob("*.py")
)
ALL_FILES = sorted((ROOT / "gateway").rglob("*.py"))


def test_imports_obey_the_contracts() -> None:
    """In a process of its own: the checker switches off all loggers that there are."""
    script = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_pure_files_to_check() -> None:
    assert len(PURE_FILES) > 2


@pytest.mark.parametrize("path", PURE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_and_engines_are_pure(path: Path) -> None:
    """Also inside functions, where import-linter's layers would allow an indirect import."""
    found = imported(path) & FORBIDDEN
    assert not found, f"{path.relative_to(ROOT)} imports {sorted(found)}"


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_broad_except_says_who_notices(path: Path) -> None:
    """Unless it raises again, which everybody notices."""
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler) and is_broad(node) and not raises_again(node):
            said = " ".join(lines[node.lineno - 1 : node.body[0].lineno])
            words = said.replace("# noqa: BLE001", "").partition("#")[2]
            assert words.strip(), f"{path.name}:{node.lineno}: a broad `except` without a comment"


def imported(path: Path) -> set[str]:
    """The top-level packages that a file imports, wherever in the file."""
    out: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            out.add(node.module.partition(".")[0])
    return out


def is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type
    return caught is None or (
        isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException")
    )


def raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None
