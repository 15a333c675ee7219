"""`slotgate status`, as a person reads it."""

from __future__ import annotations

import io
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner, Result
from rich.console import Console, RenderableType

from gateway.cli.status import status
from gateway.cli.status_tables import explanation, overview
from tests.unit.told import gateway_of

BACKEND: dict[str, Any] = {
    "name": "gpu1",
    "engine": "llama-server",
    "state": "busy",
    "slots": 4,
    "slots_source": "assumed",
    "in_flight": 2,
    "settling": 0,
    "others": 1.0,
    "cached_share": 0.81,
    "kv_used_ratio": None,
    "report_age_s": 2.2,
}
PRICE = {
    "backend": "gpu1",
    "cost_s": 0.3,
    "wait_s": 0.0,
    "load_s": 0.0,
    "backlog_s": 0.1,
    "own_s": 0.2,
    "crowd": 1,
    "uncached_tokens": 1200,
    "matched_bytes": 9000,
}
DECISION: dict[str, Any] = {
    "request_id": "req-1",
    "model": "m",
    "key": "alice",
    "outcome": "served",
    "ttft_s": 0.41,
    "seconds": 3.0,
    "prompt_tokens": 5000,
    "cached_tokens": 3800,
    "attempts": [
        {
            **PRICE,
            "affinity": "hit",
            "queued_s": 0.05,
            "others": [{**PRICE, "backend": "gpu2", "cost_s": 4.5}],
        }
    ],
}


def shown(what: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(what)
    return out.getvalue()


def test_the_overview_has_findings_slots_as_cells_and_p95s() -> None:
    document = gateway_of(lambda gateway: gateway.status())
    document["backends"] = [BACKEND]
    document["models"] = {"m": {"backends": ["gpu1"], "queued": 3, "queue_limit": 4}}
    document["p95"]["m"] = {"1m": {"ttft": 1.25, "itl": 0.021}, "5m": {"ttft": None, "itl": None}}
    document["shed"] = {"m/queue_full": 7, "other/no_backend": 1}
    document["keys"] = {"alice": {"requests": 1234, "served": 1200, "prompt_tokens": 5_000_000}}
    text = shown(overview(document))
    assert "No backend can take work" in text  # a finding of the gateway that is not started
    assert "■■■□ 2/4 (assumed)" in text
    assert "81%" in text
    assert "3/4" in text
    assert "1.2 s" in text
    assert "21 ms" in text
    assert "5,000,000" in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith(("m ", "all "))] == [
        "7",
        "8",
    ]


def test_an_explanation_sets_the_chosen_backend_beside_the_others() -> None:
    text = shown(explanation(DECISION))
    assert "req-1  m  key alice: served" in text
    assert "after 50 ms in line to gpu1, affinity hit" in text
    cost = next(line for line in text.splitlines() if line.startswith("cost"))
    assert cost.split()[1:5] == ["300", "ms", "4.5", "s"]
    assert "first token after 410 ms" in text
    assert "3,800 of 5,000 prompt tokens were cached" in text


def test_one_that_still_runs_is_told_as_that() -> None:
    running = DECISION | {"outcome": None, "ttft_s": None, "seconds": None, "cached_tokens": None}
    assert "still running" in shown(explanation(running))


def asked(*arguments: str) -> Result:
    return CliRunner().invoke(
        status, [*arguments], env={"SLOTGATE_URL": None, "SLOTGATE_KEY": None}
    )


def test_nobody_there_is_one_line_that_says_what_to_do() -> None:
    result = asked("--url", "http://127.0.0.1:9/v1")
    assert result.exit_code == 1
    assert "no gateway answers at http://127.0.0.1:9/v1" in result.output
    assert "--url" in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx2.Response(401), "wants an admin key"),
        (httpx2.Response(403), "is not an admin key"),
        (httpx2.Response(404, text="<html>"), "is no Slotgate"),
        (httpx2.Response(200, text="<html>"), "is no Slotgate"),
        (httpx2.Response(200, json={"status": "ok"}), "is no Slotgate"),
    ],
)
def test_other_answers_say_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, answer: httpx2.Response, words: str
) -> None:
    answer.request = httpx2.Request("GET", "http://x/status")
    monkeypatch.setattr(httpx2, "get", lambda *_, **__: answer)
    result = asked("--url", "http://x")
    assert result.exit_code == 1
    assert words in result.output


def test_watch_and_explain_together_are_wrong_usage() -> None:
    assert asked("--watch", "--explain", "req-1").exit_code == 2
