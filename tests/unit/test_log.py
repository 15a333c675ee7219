"""The log: one line is one line, for people or for machines; and writing it never holds those who log."""

from __future__ import annotations

import io
import json
import threading
import time

import pytest
from msgspec.structs import replace

from gateway.runtime import log as module
from gateway.runtime.log import LineLog, RequestLine
from tests.fakes.running import slack

REQUEST = RequestLine(
    request_id="req-1",
    key="alice",
    client=None,
    method="POST",
    path="/v1/chat/completions",
    model="m",
    outcome="queue_full",
    status=503,
    queue_ms=0.4,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Stuck(io.StringIO):
    """A disk that takes no more until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, text: str) -> int:
        self.go.wait(20)
        return super().write(text)


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def written(stream: io.StringIO, *lines: RequestLine, form: str = "json") -> list[str]:
    log = LineLog("info", form, stream)
    for line in lines:
        log.request(line)
    log.close()
    return stream.getvalue().splitlines()


def test_a_request_is_one_json_object_without_what_has_no_value() -> None:
    (line,) = written(io.StringIO(), REQUEST)
    document = json.loads(line)
    assert document.pop("time").endswith("+00:00")
    assert document.pop("level") == "info"
    assert document == {
        "event": "request",
        "request_id": "req-1",
        "key": "alice",
        "method": "POST",
        "path": "/v1/chat/completions",
        "model": "m",
        "outcome": "queue_full",
        "status": 503,
        "queue_ms": 0.4,
    }
    assert list(document)[:2] == ["event", "request_id"]


def test_a_terminal_gets_a_line_for_people_and_anything_else_json() -> None:
    (line,) = written(Terminal(), REQUEST, form="auto")
    assert "request " in line
    assert "key=alice" in line
    assert "status=503" in line
    assert "None" not in line
    (line,) = written(io.StringIO(), REQUEST, form="auto")
    assert json.loads(line)["status"] == 503


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("odd", ["a\nlevel=error fake", "\x1b[2J", "a\r\nb", "  ", "\u2028", '"'])
def test_nothing_that_a_client_sends_begins_a_line_or_steers_a_terminal(
    form: str, odd: str
) -> None:
    text = io.StringIO()
    written(text, replace(REQUEST, request_id=odd), form=form)
    assert text.getvalue().count("\n") == 1
    assert "\x1b" not in text.getvalue()
    if form == "json":
        assert json.loads(text.getvalue())["request_id"] == odd


def test_lines_below_the_level_are_left_out_and_the_level_may_change() -> None:
    stream = io.StringIO()
    log = LineLog("warning", "json", stream)
    log.request(REQUEST)
    log.event("warning", "backend", backend="b1", state="down")
    log.apply("debug", "json")
    log.event("debug", "reload", backends=2)
    log.close()
    events = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert events == ["backend", "reload"]


def test_lines_keep_their_order_from_many_threads_and_none_is_lost() -> None:
    stream = io.StringIO()
    log = LineLog("info", "json", stream)

    def many(name: int) -> None:
        for number in range(500):
            log.event("info", "x", who=name, number=number)

    threads = [threading.Thread(target=many, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == 2000
    for name in range(4):
        assert [line["number"] for line in lines if line["who"] == name] == list(range(500))


def test_a_disk_that_is_stuck_holds_nobody_and_what_it_misses_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 100)
    stream = Stuck()
    log = LineLog("info", "json", stream)
    began = time.thread_time()
    for _ in range(5_000):
        log.request(REQUEST)
    assert time.thread_time() - began < 2 * slack()
    assert log.dropped >= 5_000 - 2 * 100 - 500
    stream.go.set()
    log.close()
    kept = len(stream.getvalue().splitlines())
    assert kept + log.dropped == 5_000


def test_a_full_disk_is_counted_and_survived() -> None:
    log = LineLog("info", "json", Broken())
    log.request(REQUEST)
    log.close()
    assert log.dropped == 1
