"""The poller on real sockets: what it asks, how often, and what it makes of silence."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from gateway.engines.base import EngineReport, State
from gateway.engines.liveness import Activity
from gateway.runtime.poller import Poller
from gateway.runtime.probe import PollTarget, probe_once
from tests.fakes.running import eventually, in_loop, run, slack
from tests.gateway.scripted_backend import BREAK, DRIP, HANG, Page, ScriptedBackend, Table

SIGNED = {"Server": "llama.cpp"}
BUSY = Activity(in_flight=1, last_traffic_age_s=0.0)
STREAMING = Activity(in_flight=1, last_traffic_age_s=0.0, bytes_age_s=0.1)
PAIR = ("/slots", "/metrics")
CERTIFICATES = Path(__file__).parent / "upstream_certs"


def _page(value: object, status: int = 200) -> Page:
    return Page(json.dumps(value).encode(), status, SIGNED)


def _llama(**props: object) -> Table:
    return {
        "/health": _page({"status": "ok"}),
        "/props": _page({"total_slots": 2, "build_info": "b1", **props}),
        "/v1/models": _page({"data": [{"id": "m", "owned_by": "llamacpp"}]}),
        "/slots": _page([{"id": 0, "n_ctx": 512, "is_processing": True}]),
        "/metrics": Page(b"llamacpp:requests_deferred 1\n", 200, SIGNED),
    }


def _vllm() -> Table:
    return {
        "/health": Page(),
        "/version": Page(b'{"version":"0.32.0"}'),
        "/v1/models": Page(b'{"data":[{"id":"m","owned_by":"vllm"}]}'),
        "/metrics": Page(b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"),
    }


class Desk:
    """Where the poller reports to. `activity` is what it is told about every backend."""

    def __init__(self, *targets: PollTarget, **options: object) -> None:
        self.reports: list[tuple[str, EngineReport]] = []
        self.warnings: list[tuple[str, str]] = []
        self.activity = Activity()
        self.poller = Poller(
            targets,
            lambda name, report: self.reports.append((name, report)),
            lambda _name: self.activity,
            on_warning=lambda name, text: self.warnings.append((name, text)),
            **options,  # type: ignore[arg-type]
        )

    @property
    def last(self) -> EngineReport:
        return self.reports[-1][1]

    async def until(self, fits: Callable[[EngineReport], bool], within_s: float = 20) -> None:
        """Waits for a report like that, among those to come or the last one."""
        await eventually(lambda: self.reports and fits(self.last), within_s, "no such report came")

    async def rounds(self, more: int, *, poke: bool = False) -> None:
        """Waits for so many further reports of any backend."""
        goal = len(self.reports) + more

        def done() -> bool:
            if poke:
                for name in {name for name, _ in self.reports}:
                    self.poller.poke(name)
            return len(self.reports) >= goal

        await eventually(done, 10 + 6 * more)


@asynccontextmanager
async def _watching(desk: Desk) -> AsyncIterator[Desk]:
    await desk.poller.start()
    try:
        yield desk
    finally:
        await desk.poller.stop()


@in_loop
async def test_under_traffic_and_a_storm_of_pokes_slots_and_metrics_stay_one_pair_in_two_seconds() -> (
    None
):
    async with ScriptedBackend(_llama()) as backend:
        desk = Desk(PollTarget("a", backend.url, api_key="sekret"))
        desk.activity = BUSY
        async with _watching(desk):

            def three_pairs() -> bool:
                desk.poller.poke("a")
                return len(backend.times("/metrics")) >= 3

            await eventually(three_pairs, 30)
        pair = [one for one in backend.asked if one.path in PAIR]
        health = backend.times("/health")

        assert [one.path for one in pair[:6]] == list(PAIR) * 3
        assert all(b.at - a.at >= 2.0 for a, b in pairwise(pair[::2])), "pairs begin 2 s apart"
        assert all(b - a >= 0.99 for a, b in pairwise(health)), "rounds begin 1 s apart"
        assert backend.peak == 1, "one outstanding question"
        assert all(one.headers["authorization"] == "Bearer sekret" for one in backend.asked)
        weighed = [report for _, report in desk.reports if report.running is not None]
        assert [(r.running, r.waiting, r.idle_slots) for r in weighed[:2]] == [(1, 1, 0)] * 2


@in_loop
async def test_an_idle_server_is_never_weighed_however_often_someone_pokes() -> None:
    async with ScriptedBackend(_llama()) as backend:
        async with _watching(Desk(PollTarget("a", backend.url))) as desk:
            await desk.rounds(3, poke=True)

        assert not set(backend.paths()) & set(PAIR)
        assert desk.last.slots == 2


@in_loop
async def test_a_sleeper_is_not_woken_even_under_traffic() -> None:
    async with ScriptedBackend(_llama(is_sleeping=True)) as backend:
        desk = Desk(PollTarget("a", backend.url))
        desk.activity = BUSY
        async with _watching(desk):
            await desk.rounds(3, poke=True)

        assert not set(backend.paths()) & set(PAIR)
        assert desk.last.state is State.SLEEPING


@in_loop
async def test_a_router_with_unloaded_models_is_never_asked_about_one() -> None:
    table = _llama(role="router", max_instances=1)
    entries = [{"id": name, "status": {"value": "unloaded"}} for name in ("a", "b", "c")]
    table["/v1/models"] = _page({"data": entries})
    async with ScriptedBackend(table) as backend:
        desk = Desk(PollTarget("a", backend.url))
        desk.activity = BUSY
        async with _watching(desk):
            await desk.rounds(3, poke=True)

        assert set(backend.paths()) == {"/health", "/props", "/v1/models"}
        assert desk.last.models is not None
        assert [model.loaded for model in desk.last.models] == [False, False, False]


@in_loop
async def test_another_gateway_that_weighs_leaves_us_only_the_free_questions() -> None:
    async with ScriptedBackend(_llama()) as backend:
        desk = Desk(PollTarget("a", backend.url), may_weigh=lambda _name: False)
        desk.activity = BUSY
        async with _watching(desk):
            await desk.rounds(3, poke=True)

        assert not set(backend.paths()) & set(PAIR)


@in_loop
async def test_a_hanging_metrics_leaves_the_backend_up_with_unknown_waiting_and_one_warning() -> (
    None
):
    async with ScriptedBackend(_llama() | {"/metrics": HANG}) as backend:
        desk = Desk(PollTarget("a", backend.url))
        desk.activity = BUSY
        async with _watching(desk):
            await desk.until(lambda report: report.running is not None)
            await desk.rounds(2, poke=True)

        assert {report.state for _, report in desk.reports} == {State.UP}
        assert {report.waiting for _, report in desk.reports} == {None}
        assert backend.peak == 1
        gaps = [later - earlier for earlier, later in pairwise(backend.times("/metrics"))]
        assert all(gap > 9 for gap in gaps), "an unanswered question is not soon repeated"
        assert len([text for _, text in desk.warnings if "/metrics" in text]) == 1


@in_loop
async def test_bytes_on_a_live_stream_keep_a_silent_backend_up_and_without_them_three_rounds_end_it() -> (
    None
):
    async with ScriptedBackend(_llama()) as backend:
        desk = Desk(PollTarget("a", backend.url))
        async with _watching(desk):
            await desk.until(lambda report: report.state is State.UP)
            desk.activity = STREAMING
            backend.table["/health"] = BREAK
            await desk.rounds(3, poke=True)
            assert (desk.last.state, desk.last.busy) == (State.UP, True)
            assert desk.last.running is None

            desk.activity = Activity(in_flight=1, last_traffic_age_s=0.0, bytes_age_s=60.0)
            before = len(desk.reports)
            await desk.until(lambda report: report.state is State.DOWN)

        states = [report.state for _, report in desk.reports[before:]]
        assert states[-3:] == [State.UP, State.UP, State.DOWN]


@in_loop
async def test_a_refused_connection_is_down_at_once_and_the_next_owner_of_the_port_is_detected_anew() -> (
    None
):
    async with ScriptedBackend(_vllm()) as first:
        desk = Desk(PollTarget("a", first.url + "/v1"))
        await desk.poller.start()
        await desk.until(lambda report: report.engine == "vllm")
    before = len(desk.reports)
    try:
        desk.poller.poke("a")
        await desk.rounds(1)
        assert desk.reports[before][1].state is State.DOWN
        assert "refused" in desk.reports[before][1].warnings[0]
        async with ScriptedBackend(_llama(), port=first.port):
            await desk.until(lambda report: report.state is State.UP)
            assert desk.last.engine == "llama-server"
    finally:
        await desk.poller.stop()


@in_loop
async def test_a_port_that_changes_hands_unseen_is_noticed_at_the_next_full_look() -> None:
    async with ScriptedBackend(_vllm()) as backend:
        async with _watching(Desk(PollTarget("a", backend.url))) as desk:
            await desk.until(lambda report: report.engine == "vllm")
            backend.table = _llama()
            await desk.rounds(1, poke=True)

        assert (desk.last.engine, desk.last.slots) == ("llama-server", 2)


@in_loop
async def test_a_configured_engine_is_not_detected() -> None:
    async with ScriptedBackend({"/v1/models": Page(b'{"data":[{"id":"m"}]}')}) as backend:
        report = await probe_once(PollTarget("a", backend.url, engine="openai"))

        assert (report.engine, report.slots) == ("openai", 4)
        assert backend.paths() == ["/v1/models"]


@in_loop
async def test_a_loading_server_is_looked_at_every_second_until_it_is_ready() -> None:
    table = _llama()
    loading = _page({"error": {"code": 503, "message": "Loading model"}}, 503)
    async with ScriptedBackend({"/health": loading}) as backend:
        async with _watching(Desk(PollTarget("a", backend.url))) as desk:
            await desk.until(lambda report: report.state is State.LOADING)
            await desk.rounds(1)
            assert desk.last.state is State.LOADING
            backend.table = table
            began = time.monotonic()
            await desk.until(lambda report: report.state is State.UP)

        assert time.monotonic() - began < 10 * slack()


@in_loop
async def test_the_first_round_waits_neither_for_the_dead_nor_for_the_silent() -> None:
    async with ScriptedBackend(_llama()) as good, ScriptedBackend({}) as silent:
        silent.otherwise = HANG
        desk = Desk(
            PollTarget("dead", "http://127.0.0.1:1"),
            PollTarget("silent", silent.url),
            PollTarget("good", good.url),
        )
        async with _watching(desk):
            all_answered = await desk.poller.first_round(2 * slack())

        assert all_answered is False
        reports = dict(desk.reports)
        assert reports["good"].state is State.UP
        assert reports["dead"].state is State.DOWN
        assert silent.peak == 1


@in_loop
async def test_the_first_round_says_when_all_have_answered_or_there_are_none() -> None:
    async with (
        ScriptedBackend(_llama()) as backend,
        _watching(Desk(PollTarget("a", backend.url))) as desk,
    ):
        assert await desk.poller.first_round(10 * slack()) is True
    assert await Desk().poller.first_round(0) is True


@pytest.mark.parametrize(
    "environment",
    [
        {"HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"},
        {"ALL_PROXY": "socks5h://127.0.0.1:9", "HTTPS_PROXY": "nonsense://x"},
        {"NO_PROXY": "10.0.0.0/8,localhost", "HTTP_PROXY": "http://127.0.0.1:9"},
    ],
)
def test_proxies_of_the_environment_stand_between_us_and_nobody(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    async def main() -> State:
        async with ScriptedBackend(_llama()) as backend:
            return (await probe_once(PollTarget("a", backend.url))).state

    assert run(main()) is State.UP


@in_loop
async def test_an_answer_of_twenty_mebibytes_is_not_read_and_costs_only_its_figures() -> None:
    line = b"vllm:num_requests_running 1\n"
    table = _vllm() | {"/metrics": Page(line * (20 * 1024 * 1024 // len(line)))}
    async with ScriptedBackend(table) as backend:
        report = await probe_once(PollTarget("a", backend.url))

    assert (report.engine, report.state, report.running) == ("vllm", State.UP, None)


@in_loop
async def test_an_answer_compressed_without_being_asked_and_a_redirect_are_not_followed_up() -> (
    None
):
    packed = Page(b"\x1f\x8b", 200, {"Content-Encoding": "gzip"})
    async with ScriptedBackend({"/v1/models": packed}) as backend:
        unread = await probe_once(PollTarget("a", backend.url, engine="openai"))
        backend.table["/v1/models"] = Page(b"", 302, {"Location": "/elsewhere"})
        moved = await probe_once(PollTarget("a", backend.url, engine="openai"))

        assert (unread.state, unread.models) == (State.UP, None)
        assert moved.state is State.DOWN
        assert backend.paths() == ["/v1/models"] * 2


@in_loop
async def test_an_answer_that_drips_is_given_up_after_its_time() -> None:
    async with ScriptedBackend({"/v1/models": DRIP}) as backend:
        began = time.monotonic()
        report = await probe_once(PollTarget("a", backend.url, engine="openai"))

    assert report.state is State.DOWN
    assert report.warnings == ("it does not answer in time",)
    assert time.monotonic() - began < 30 * slack()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1", "refused"),
        ("http://localhost:1/v1", "refused"),
        ("http://nobody.invalid", "host name is unknown"),
        ("http://[::1", "broke"),
    ],
)
def test_a_backend_that_cannot_be_reached_is_down_with_the_reason(url: str, words: str) -> None:
    report = run(probe_once(PollTarget("a", url)))

    assert report.state is State.DOWN
    assert words in report.warnings[0]


def test_an_impossible_port_is_a_reason_too_and_not_an_error_of_ours() -> None:
    report = run(probe_once(PollTarget("a", "http://127.0.0.1:99999")), loop="asyncio")

    assert report.warnings == ("the connection broke, or does not speak HTTP",)


def test_a_certificate_is_trusted_by_its_own_authority_only(tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")

    async def main() -> list[str]:
        context = _server_context()
        server = await asyncio.start_server(_say_vllm, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        target = PollTarget("a", f"https://localhost:{port}", engine="openai")
        authorities = (str(CERTIFICATES / "ca.pem"), None, str(nonsense))
        reports = [await probe_once(replace(target, ca=ca)) for ca in authorities]
        server.close()
        return [f"{report.state}: {report.warnings[0]}" for report in reports]

    trusted, untrusted, broken = run(main(), loop="asyncio")

    assert trusted.startswith("up: ")
    assert untrusted == "down: its certificate is not trusted; set `ca`"
    assert broken == "down: its `ca` file holds no certificates"


@in_loop
async def test_a_stop_in_the_same_moment_as_a_poke_is_not_lost() -> None:
    desk = Desk(PollTarget("a", "http://127.0.0.1:1"))
    await desk.poller.start()
    await desk.poller.first_round(10 * slack())
    await asyncio.sleep(0.05)  # into the rest between two rounds
    desk.poller.poke("a")
    async with asyncio.timeout(10 * slack()):
        await desk.poller.stop()


@in_loop
async def test_a_changed_configuration_drops_begins_and_leaves_alone_what_it_should() -> None:
    async with ScriptedBackend(_llama()) as kept, ScriptedBackend(_llama()) as changed:
        one, two = PollTarget("one", kept.url), PollTarget("two", changed.url)
        async with _watching(Desk(one, two, PollTarget("gone", "http://127.0.0.1:1"))) as desk:
            await desk.poller.first_round(10 * slack())
            asked = len(kept.asked)
            desk.reports.clear()
            await desk.poller.update([one, replace(two, api_key="new")])
            await desk.rounds(1)

        assert [name for name, _ in desk.reports] == ["two"]
        assert changed.asked[-1].headers["authorization"] == "Bearer new"
        assert len(kept.asked) == asked


def test_a_fault_in_the_receiver_of_reports_does_not_end_the_watch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> int:
        calls = 0

        def broken(_name: str, _report: EngineReport) -> None:
            nonlocal calls
            calls += 1
            raise RuntimeError("boom")

        poller = Poller([PollTarget("a", "http://127.0.0.1:1")], broken, lambda _name: Activity())
        await poller.start()
        await eventually(lambda: calls >= 2, 60)
        await poller.stop()
        return calls

    with caplog.at_level(logging.ERROR):
        assert run(main()) >= 2
    assert "probing backend a failed" in caplog.text


def test_warnings_go_to_the_log_when_nobody_else_takes_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        target = PollTarget("a", "http://127.0.0.1:1", api_key="sekret")
        poller = Poller([target], lambda _n, _r: None, lambda _n: Activity())
        await poller.start()
        await poller.first_round(10 * slack())
        poller.poke("nobody")
        await poller.stop()
        assert "sekret" not in repr(target)

    with caplog.at_level(logging.WARNING):
        run(main())
    assert caplog.text.count("backend a: the connection is refused") == 1


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")
    return context


async def _say_vllm(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"data":[]}')
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
