"""Where conversations go, seen from outside: back to the engine that has them, and not all to the same one."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from tests.fakes.behaviour import Behaviour
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import in_loop

SYSTEM = "You are careful. " * 200  # 3,400 characters that all share
RATE = 20_000.0  # prompt tokens a second


class Talk:
    """A conversation that grows."""

    def __init__(self, slotgate: Running, name: str, own: int = 150) -> None:
        self.slotgate = slotgate
        self.messages: list[dict[str, str]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{name} asks about {name}. " * own},
        ]
        self.went: list[str] = []
        self.affinity: list[str] = []

    async def turn(self, *, stream: bool = False) -> None:
        answer = await self.slotgate.chat(messages=self.messages, max_tokens=4, stream=stream)
        assert answer.status_code == 200
        self.went.append(answer.headers["x-slotgate-backend"])
        self.affinity.append(answer.headers["x-slotgate-affinity"])
        reply = "yes" if stream else answer.json()["choices"][0]["message"]["content"]
        self.messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "And then? " * 8},
        ]


async def engines(
    stack: AsyncExitStack, count: int, slots: int, *, answer_s: float = 0.0
) -> list[FakeEngine]:
    how = Behaviour(tokens=3, itl_s=answer_s / 3, prefill_tokens_per_s=RATE)
    return [
        await stack.enter_async_context(FakeEngine(slots=slots, behaviour=how))
        for _ in range(count)
    ]


@in_loop
async def test_every_turn_goes_back_to_the_engine_that_has_the_conversation() -> None:
    async with AsyncExitStack() as stack:
        fleet = await engines(stack, 3, 2)
        slotgate = await stack.enter_async_context(running_gateway(*fleet))
        talks = [Talk(slotgate, name) for name in ("ann", "bob", "cat", "dan")]
        for _ in range(4):
            await asyncio.gather(*(talk.turn() for talk in talks))
        for talk in talks:
            assert len(set(talk.went)) == 1, talk.went
            assert talk.affinity[1:] == ["hit"] * 3
        predicted = await slotgate.metric("affinity_predicted_tokens_total")
        reported = await slotgate.metric("affinity_cached_tokens_total")
        assert reported > 0
        assert 0.85 <= predicted / reported <= 1.15
        slotgate.sent = 16


@in_loop
async def test_a_shared_system_prompt_does_not_send_everybody_to_one_engine() -> None:
    """B062: affinity without a term for load makes a hot spot while peers idle.

    A cold prompt takes 45 ms here and an answer 200 ms, so nobody is better off waiting for the warm engine.
    """
    async with AsyncExitStack() as stack:
        fleet = await engines(stack, 4, 1, answer_s=0.3)
        slotgate = await stack.enter_async_context(running_gateway(*fleet))
        await Talk(slotgate, "first", own=10).turn()
        talks = [Talk(slotgate, name, own=10) for name in ("ann", "bob", "cat", "dan")]
        await asyncio.gather(*(talk.turn() for talk in talks))
        assert len({talk.went[0] for talk in talks}) == 4
        slotgate.sent = 5


@in_loop
async def test_without_affinity_nothing_is_said_of_it() -> None:
    async with AsyncExitStack() as stack:
        fleet = await engines(stack, 2, 1)
        slotgate = await stack.enter_async_context(
            running_gateway(*fleet, routing={"affinity": False})
        )
        talk = Talk(slotgate, "ann", own=10)
        await talk.turn()
        await talk.turn()
        assert talk.affinity == ["none", "none"]
        slotgate.sent = 2


@in_loop
async def test_an_answer_that_is_no_stream_teaches_how_fast_its_engine_reads() -> None:
    """llama-server tells it in `timings`; here it reads a thousand tokens a second."""
    async with AsyncExitStack() as stack:
        fleet = await engines(stack, 1, 1)
        slotgate = await stack.enter_async_context(running_gateway(*fleet))
        for name in ("ann", "bob", "cat"):
            await Talk(slotgate, name, own=100).turn()
        rate = slotgate.gateway.dispatcher.dispatch.backends["b1"].prefill_rate
        assert rate.samples == 3
        assert 900 <= rate.own <= 1100
        slotgate.sent = 3
