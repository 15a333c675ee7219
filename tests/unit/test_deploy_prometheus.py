"""What deploy/ asks Prometheus for exists: every series, label and recorded name; and promtool agrees with the rest."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.told import families

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "slotgate.json").read_text())
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool on PATH (apt-get install prometheus)"
)

OUTSIDE = {"instance", "job", "le"}  # labels that Prometheus itself adds


def rules() -> list[dict[str, Any]]:
    found = []
    for name in ("rules.yml", "alerts.yml"):
        for group in yaml.safe_load((PROMETHEUS / name).read_text())["groups"]:
            found += group["rules"]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule.get("record") or rule["alert"], rule["expr"]
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]


SERIES = {
    f"{family.full_name}{suffix}": set(family.labels)
    for family in families()
    for suffix in (("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",))
} | {"slotgate_redis_up": set()}


@pytest.mark.parametrize(("where", "text"), list(expressions()), ids=lambda part: part[:40])
def test_every_series_and_label_that_is_named_exists(where: str, text: str) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    names = re.findall(r"\bslotgate[_:][\w:]+", text)
    assert names or "up{" in text, where
    for name in names:
        assert name in (recorded if ":" in name else SERIES), name
    for name, matchers in re.findall(r"\b(slotgate_\w+)\{([^}]*)\}", text):
        for label in re.findall(r"(\w+)\s*=~?", matchers):
            assert label in SERIES[name] | OUTSIDE, f"{name} has no label {label}"
    for labels in re.findall(r"\bby \(([^)]*)\)", text):
        known = set().union(*(SERIES.get(name, set()) for name in names)) | OUTSIDE
        assert {label.strip() for label in labels.split(",")} <= known | {"model", "backend"}


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) >= 8
    for alert in alerts:
        assert alert["labels"]["severity"] in ("info", "warning", "critical"), alert["alert"]
        assert len(alert["annotations"]["summary"]) > 20
        assert len(alert["annotations"]["runbook"]) > 40


def test_the_board_has_panels_side_by_side_and_asks_the_chosen_prometheus() -> None:
    seen: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & seen, f"{panel['title']} overlaps another panel"
        assert max(x for x, _ in cells) < 24
        seen |= cells
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["title"]


def test_the_scrape_sends_a_key_from_a_file_and_loads_both_rule_files() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    job = config["scrape_configs"][0]
    assert job["authorization"]["credentials_file"]
    assert config["rule_files"] == ["rules.yml", "alerts.yml"]


@needs_promtool
def test_promtool_accepts_configuration_and_rules(tmp_path: Path) -> None:
    shutil.copytree(PROMETHEUS, tmp_path / "prometheus")
    (tmp_path / "prometheus" / "slotgate.key").write_text("sk-sg-x")
    _promtool("check", "config", str(tmp_path / "prometheus" / "prometheus.yml"))


@needs_promtool
def test_p95_across_gateways_and_alerts_come_out_as_meant(tmp_path: Path) -> None:
    """Two gateways, one fast and one slow: the p95 of both together is the slow one's, which no mean of p95s is."""
    buckets = [
        ("a", "0.5", "0+95x60"), ("a", "1.0", "0+95x60"), ("a", "5.0", "0+95x60"), ("a", "+Inf", "0+95x60"),
        ("b", "0.5", "0+0x60"), ("b", "1.0", "0+0x60"), ("b", "5.0", "0+15x60"), ("b", "+Inf", "0+15x60"),
    ]  # fmt: skip
    series = [
        {"series": f'slotgate_ttft_seconds_bucket{{instance="{at}",model="m",backend="g",le="{le}"}}', "values": grows}
        for at, le, grows in buckets
    ]  # fmt: skip
    series += [
        {
            "series": 'slotgate_backend_preemptions_total{instance="a",backend="g"}',
            "values": "0+2x60",
        },
        {
            "series": 'slotgate_backend_state{instance="a",backend="g",state="down"}',
            "values": "1x60",
        },
    ]
    case = {
        "rule_files": [str(PROMETHEUS / "rules.yml"), str(PROMETHEUS / "alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [
                    {
                        "expr": "slotgate:ttft_seconds:p95_5m > bool 1",
                        "eval_time": "30m",
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    },
                    {
                        "expr": 'ALERTS{alertname=~"SlotgatePreempts|SlotgateBackendDown|SlotgateSheds",alertstate="firing"}',
                        "eval_time": "45m",
                        "exp_samples": [
                            {"labels": _alert("SlotgatePreempts"), "value": 1},
                            {"labels": _alert("SlotgateBackendDown", state="down"), "value": 1},
                        ],
                    },
                ],
            }
        ],
    }
    file = tmp_path / "case.yml"
    file.write_text(yaml.safe_dump(case))
    _promtool("test", "rules", str(file))


def _alert(name: str, **more: str) -> str:
    labels = {
        "alertname": name, "alertstate": "firing", "backend": "g", "instance": "a", "severity": "warning", **more,
    }  # fmt: skip
    pairs = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"ALERTS{{{pairs}}}"


def _promtool(*arguments: str) -> None:
    assert PROMTOOL is not None
    run = subprocess.run(
        [PROMTOOL, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
