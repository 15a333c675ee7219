"""The pages of metrics, status and logs keep up with what is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.app import Gateway
from gateway.core.cost import Price
from gateway.core.dispatch import Start
from gateway.core.fleet import Backend
from gateway.runtime.decisions import Attempt, Decision
from gateway.runtime.families import Family
from gateway.runtime.gauges import register_redis
from tests.unit.told import families, gateway_of

DOCS = Path(__file__).parents[2] / "docs"
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")
STATUS = (DOCS / "status.md").read_text(encoding="utf-8")


def documented() -> dict[str, tuple[str, str, str]]:
    """Rows of the page: name, then type, labels, meaning."""
    rows = re.findall(
        r"^\| `(slotgate_\w+)` \| (\w+) \| ([\w, ]*)\| (.+) \|$", METRICS, re.MULTILINE
    )
    return {name: (kind, labels.strip(), meaning) for name, kind, labels, meaning in rows}


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_every_metric_is_documented_with_its_type_and_labels(family: Family) -> None:
    kind, labels, meaning = documented()[family.full_name]
    assert kind == family.kind
    assert labels == ", ".join(family.labels)
    assert len(meaning) > 20 or family.name == "build_info"


def test_no_metric_is_documented_that_does_not_exist() -> None:
    told = {family.full_name for family in families()}
    optional = {name for name, row in documented().items() if "Only with" in row[2]}
    assert set(documented()) - optional <= told


def test_names_have_the_units_that_prometheus_wants() -> None:
    for family in families():
        assert family.full_name.startswith("slotgate_")
        assert family.kind != "histogram" or family.name.endswith("_seconds")
        assert family.help.endswith(".")


def test_every_field_of_the_status_is_documented() -> None:
    status = gateway_of(lambda gateway: gateway.status("req-1"))
    named = set(re.findall(r"`(\w+)`", STATUS))
    for field in [*status, *status["last_minute"], *status["backends"][0]]:
        assert field in named, field


def test_every_field_of_an_explained_decision_is_documented() -> None:
    def explained(gateway: Gateway) -> dict[str, Any]:
        price = Price(Backend("b1"), 3.0, 1.0, 1.0, 1.0, 0, 10, 40)
        start = Start(
            1, "b1", price, "hit", [price, msgspec.structs.replace(price, backend=Backend("b2"))]
        )
        decision = Decision("req-1", 0.0, "alice", "m")
        decision.attempts.append(Attempt("b1", "hit", 0.2, start.price, start.prices))
        gateway.metrics.decisions.keep(decision)
        found: dict[str, Any] = gateway.status("req-1")["decision"]
        return found

    decision = gateway_of(explained)
    attempt = decision["attempts"][0]
    assert [one["backend"] for one in attempt["others"]] == ["b2"]
    named = set(re.findall(r"`(\w+)`", STATUS))
    for field in [*decision, *attempt]:
        assert field in named, field


def test_redis_has_a_metric_only_where_there_is_one() -> None:
    def told(gateway: Gateway) -> tuple[str, str]:
        before = gateway.exposition.text()
        register_redis(gateway.metrics, lambda: False)
        return before, gateway.exposition.text()

    without, with_redis = gateway_of(told)
    assert "redis" not in without
    assert "slotgate_redis_up 0.0" in with_redis
