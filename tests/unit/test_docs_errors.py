"""docs/errors.md holds every code that the gateway can send, with the status that it is sent with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.core.errors import SITUATIONS, Outcome
from gateway.core.overflow import CODE
from gateway.core.routes import ROUTES

DOCS = Path(__file__).parents[2] / "docs"
ERRORS = (DOCS / "errors.md").read_text(encoding="utf-8")
API = (DOCS / "api.md").read_text(encoding="utf-8")


def rows() -> dict[str, list[str]]:
    """The rows of the tables of codes."""
    found = {}
    for line in ERRORS.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        match = re.fullmatch(r"`([a-z_]+)`", cells[0])
        if match is not None and len(cells) == 5:
            found[match[1]] = cells
    return found


@pytest.mark.parametrize("key", SITUATIONS)
def test_every_code_has_a_row_with_its_statuses(key: str) -> None:
    row = SITUATIONS[key]
    cells = rows()[row.code]
    assert str(row.status) in cells[1]
    if row.anthropic_status is not None:
        assert str(row.anthropic_status) in cells[1]
    assert row.anthropic_type in cells[2]
    assert all(len(cell) > 15 for cell in cells[3:5]), "a cause, and what a client should do"


def test_the_page_names_no_code_that_is_never_sent() -> None:
    assert set(rows()) == {row.code for row in SITUATIONS.values()} | {CODE}


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_is_explained(outcome: Outcome) -> None:
    assert f"`{outcome.value}`" in ERRORS


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_every_relayed_path_is_on_the_page_of_the_api(path: str) -> None:
    assert re.search(rf"`(GET |POST )?{re.escape(path)}`", API)
