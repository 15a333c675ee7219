"""The ledger's script in a real Redis against its twin in Python, which the property test of the protocol runs on."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest

from gateway.core.lease import ASK_S, CALM_S, LEASE_S, Claim, Message
from gateway.runtime.cluster_ledger import Heard, Ledger, LedgerError
from tests.fakes.redis_server import redis_server
from tests.fakes.running import in_loop
from tests.property import lease_ledger


def message(sender: str, number: int, epoch: str, *peers: str, **claims: Claim) -> Message:
    return Message(sender, number, epoch, claims, peers, 0.0)


def claim(hold: int, ask: int, used: int = 0, slots: int = 4) -> Claim:
    return Claim(hold, used, max(used, ask), ask, ask, slots, spare=True)


async def tell(ledger: Ledger, one: Message, told: bytes = b"") -> Heard:
    """One message on a line of its own, which is waited for."""
    async with ledger.line() as line:
        await line.send(one, told)
        answered, heard = await line.answer()
        assert answered is one
        return heard


async def past_calm(ledger: Ledger) -> str:
    """A throwaway gateway joins, and leaves when the ledger grants again. Returns the epoch."""
    while True:
        probe = message("probe", round(asyncio.get_running_loop().time() * 1e6), "", b=claim(0, 1))
        heard = await tell(ledger, probe)
        granted = heard.reply.granted["b"]
        probe = message("probe", probe.number + 1, "", b=claim(0, 0))
        await ledger.leave(probe)
        if granted:
            return heard.reply.epoch
        await asyncio.sleep(0.05)


@in_loop
async def test_the_script_and_its_twin_grant_the_same() -> None:
    rng = random.Random(7)
    async with redis_server() as redis:
        ledger = Ledger(redis.url)
        twin = lease_ledger.Ledger(epoch=await past_calm(ledger))
        numbers = dict.fromkeys("abc", 0)
        for _ in range(300):
            sender = rng.choice("abc")
            numbers[sender] += rng.choice([1, 1, 1, 0])
            hold, ask = rng.randint(0, 4), rng.randint(0, 6)
            one = message(
                sender,
                numbers[sender],
                rng.choice([twin.epoch, "", "older"]),
                b=claim(hold, max(hold, ask), used=rng.randint(0, hold)),
                c=claim(0, rng.randint(0, 2)),
            )
            expected = twin.hear(0.0, one)
            if expected is None:
                with pytest.raises(LedgerError):
                    await tell(ledger, one)
                continue
            heard = await tell(ledger, one, sender.encode())
            assert dict(heard.reply.granted) == dict(expected.granted)
            assert heard.reply.others == expected.others
            assert all(words == who.encode() for who, words in heard.told.items())
        await ledger.aclose()


@in_loop
async def test_an_older_message_that_comes_late_takes_nothing_back() -> None:
    async with redis_server() as redis:
        ledger = Ledger(redis.url)
        epoch = await past_calm(ledger)
        await tell(ledger, message("a", 2, epoch, b=claim(0, 3)))
        with pytest.raises(LedgerError, match="older message"):
            await tell(ledger, message("a", 1, epoch, b=claim(0, 0)))
        heard = await tell(ledger, message("b", 1, epoch, b=claim(0, 4)))
        assert heard.reply.granted["b"] == 1
        await ledger.aclose()


@in_loop
async def test_what_a_returning_gateway_has_in_flight_is_counted_though_its_lease_is_over() -> None:
    async with redis_server() as redis:
        ledger = Ledger(redis.url)
        epoch = await past_calm(ledger)
        await tell(ledger, message("a", 1, epoch, b=claim(0, 3)))
        back = await tell(ledger, message("b", 9, epoch, b=claim(4, 4, used=3)))
        assert back.reply.granted["b"] == 1, "the slots that are left"
        heard = await tell(ledger, message("a", 2, epoch, b=claim(2, 2)))
        assert heard.reply.granted["b"] == 2, "all slots are taken: nothing more is granted"
        await ledger.aclose()


@in_loop
async def test_a_silent_gateway_s_slots_are_free_after_its_lease_and_before_ten_seconds() -> None:
    async with redis_server() as redis:
        ledger = Ledger(redis.url)
        epoch = await past_calm(ledger)
        clock = asyncio.get_running_loop().time
        began, number = clock(), 0
        await tell(ledger, message("dead", 1, epoch, b=claim(0, 4)))
        granted = 0
        while not granted and clock() < began + 12:
            number += 1
            heard = await tell(ledger, message("a", number, epoch, b=claim(0, 4)))
            granted = heard.reply.granted["b"]
            await asyncio.sleep(0.05)
        assert LEASE_S - 0.1 < clock() - began < 10
        await ledger.aclose()


@in_loop
async def test_after_a_restart_claims_hold_and_nothing_more_is_granted_before_all_are_back() -> (
    None
):
    async with redis_server() as redis:
        ledger = Ledger(redis.url)
        epoch = await past_calm(ledger)
        await redis.stop()
        await redis.start()
        clock = asyncio.get_running_loop().time
        began = clock()
        first = await tell(ledger, message("a", 1, epoch, "b", b=claim(1, 4)))
        assert first.reply.granted["b"] == 1
        new = await tell(ledger, message("new", 1, "", b=claim(0, 4)))
        assert new.reply.granted["b"] == 0
        await asyncio.sleep(CALM_S + 0.2)
        still = await tell(ledger, message("new", 2, new.reply.epoch, b=claim(0, 4)))
        if clock() - began < LEASE_S - 0.5:
            assert still.reply.granted["b"] == 0, "b was known, and may be alive"
        back = await tell(ledger, message("b", 5, epoch, "a", b=claim(2, 2)))
        assert back.reply.granted["b"] == 0 or back.reply.granted["b"] == 2
        after = await tell(ledger, message("new", 3, new.reply.epoch, b=claim(0, 4)))
        assert sum(r.reply.granted["b"] for r in (first, back, after)) <= 4
        await ledger.aclose()


@in_loop
async def test_answers_that_come_late_are_each_to_their_own_message() -> None:
    async with redis_server() as redis:
        ledger = Ledger(redis.url)
        epoch = await past_calm(ledger)
        async with ledger.line() as line:
            redis.signal(signal.SIGSTOP)
            sent = [message("a", n, epoch, b=claim(0, n)) for n in (1, 2, 3)]
            for one in sent:
                await line.send(one, b"")
            waits = asyncio.create_task(line.answer())
            await asyncio.sleep(ASK_S)
            assert not waits.done(), "late is not never"
            redis.signal(signal.SIGCONT)
            answers = [await waits, await line.answer(), await line.answer()]
            assert [one for one, _ in answers] == sent
            assert [heard.reply.granted["b"] for _, heard in answers] == [1, 2, 3]
        await ledger.aclose()


@in_loop
async def test_a_line_that_is_given_up_leaves_no_answer_for_the_next_one() -> None:
    async with redis_server() as redis:
        ledger = Ledger(redis.url)
        epoch = await past_calm(ledger)
        redis.signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await tell(ledger, message("a", 1, epoch, b=claim(0, 4)))
        redis.signal(signal.SIGCONT)
        heard = await tell(ledger, message("a", 2, epoch, b=claim(0, 2)))
        assert heard.reply.granted["b"] == 2
        await ledger.aclose()


@in_loop
async def test_a_redis_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.runtime.cluster_ledger.PATIENCE_S", 0.5)
    async with redis_server() as redis:
        ledger = Ledger(redis.url)
        await past_calm(ledger)
        redis.signal(signal.SIGSTOP)
        with pytest.raises(LedgerError, match="no answer within"):
            await tell(ledger, message("a", 1, "", b=claim(0, 4)))
        redis.signal(signal.SIGCONT)
        await ledger.aclose()


@in_loop
async def test_a_redis_that_stood_still_takes_no_lease_from_who_spoke_meanwhile() -> None:
    async with redis_server() as redis:
        ledger = Ledger(redis.url)
        epoch = await past_calm(ledger)
        async with ledger.line() as one, ledger.line() as other:
            await one.send(message("a", 1, epoch, b=claim(0, 3)), b"")
            await one.answer()
            redis.signal(signal.SIGSTOP)
            await asyncio.sleep(LEASE_S + 0.5)
            await other.send(message("b", 1, epoch, b=claim(0, 4)), b"")
            await one.send(message("a", 2, epoch, b=claim(3, 3)), b"")
            redis.signal(signal.SIGCONT)
            _, greedy = await other.answer()
            _, back = await one.answer()
            assert (greedy.reply.granted["b"], back.reply.granted["b"]) == (1, 3)
        await ledger.aclose()


@in_loop
async def test_a_redis_that_refuses_is_told_in_its_own_words_without_the_password() -> None:
    async with redis_server() as redis:
        ledger = Ledger(redis.url.replace("redis://", "redis://:canary-pw@"))
        with pytest.raises(LedgerError) as caught:
            await tell(ledger, message("a", 1, "", b=claim(0, 4)))
        assert "canary" not in str(caught.value)
        await ledger.aclose()
        await redis.command("REPLICAOF", "127.0.0.1", "1")
        ledger = Ledger(redis.url)
        with pytest.raises(LedgerError, match=r"(?i)read.?only"):
            await tell(ledger, message("a", 1, "", b=claim(0, 4)))
        await redis.command("REPLICAOF", "NO", "ONE")
        await tell(ledger, message("a", 1, "", b=claim(0, 4)))
        await redis.command("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(LedgerError, match=r"(?i)OOM|memory"):
            await tell(ledger, message("a", 2, "", b=claim(0, 4)))
        await redis.command("CONFIG", "SET", "maxmemory", "0")
        await tell(ledger, message("a", 3, "", b=claim(0, 4)))
        await ledger.aclose()
