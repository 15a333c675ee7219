"""What the state machine found, and how slots are divided: the protocol in single steps, on the ledger's twin."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.lease import (
    ASK_S,
    CALM_S,
    CUT_OFF_S,
    LEASE_S,
    RENEW_S,
    SEEN_S,
    Lease,
    Message,
    Use,
)
from gateway.core.lease_fair import Want, divide
from tests.property.lease_ledger import Ledger


class Talk:
    """Gateways that exchange a message with the ledger when they are told to."""

    def __init__(self, *names: str, slots: int = 4) -> None:
        self.now = 10.0
        self.ledger = Ledger()
        self.slots = slots
        self.leases = {name: Lease(name) for name in names}

    def is_silent(self, seen_by: str) -> None:
        """All others are, for longer than their leases, and this one's messages let the ledger see it."""
        self.now += LEASE_S + 0.1
        self.exchange(seen_by)
        self.now += SEEN_S + 0.1
        self.exchange(seen_by)

    def exchange(self, name: str, used: int = 0, waiting: int = 0, spare: bool = True) -> int:
        """Returns its share."""
        lease, uses = self.leases[name], self.uses(used, waiting, spare)
        message = lease.ask(self.now, uses)
        reply = self.ledger.hear(self.now, message)
        assert reply is not None
        lease.heard(self.now, message, reply, uses)
        return lease.shares["b"]

    def uses(self, used: int = 0, waiting: int = 0, spare: bool = True) -> dict[str, Use]:
        return {"b": Use(self.slots, used, waiting, spare)}


def test_a_lone_gateway_has_all_slots_and_shares_them_with_the_next() -> None:
    talk = Talk("a", "b")
    assert talk.exchange("a") == 4
    assert talk.exchange("b") == 0, "nothing is free yet"
    assert talk.exchange("a") == 2, "it lends no more, but has not said so yet"
    assert talk.exchange("b") == 0
    talk.exchange("a")
    assert talk.exchange("b") == 2


def test_what_is_in_use_is_not_taken_away_and_goes_over_as_it_becomes_free() -> None:
    talk = Talk("a", "b")
    assert talk.exchange("a", used=4, waiting=4) == 4
    talk.now += 2
    assert talk.exchange("b", waiting=4) == 0
    assert talk.exchange("a", used=4) == 2, "it lends nothing new of what it has to give back"
    assert talk.exchange("b", waiting=4) == 0
    talk.exchange("a", used=3)
    assert talk.exchange("b", waiting=4) == 1


def test_an_idle_gateway_gives_all_its_slots_to_a_busy_one_in_two_exchanges() -> None:
    talk = Talk("a", "b")
    for _ in range(3):
        talk.exchange("a")
        talk.exchange("b")
    assert talk.exchange("a", used=2, waiting=2) == 2
    assert talk.exchange("b") == 0
    assert talk.exchange("a", used=2, waiting=2) == 2
    talk.exchange("b")
    assert talk.exchange("a", used=2, waiting=2) == 4


def test_the_only_slot_is_everybodys_in_turn() -> None:
    talk = Talk("a", "b", slots=1)
    had = set()
    for _ in range(100):
        for name in ("a", "b"):
            if talk.exchange(name, waiting=3):
                had.add(name)
        talk.now += 0.1
    assert had == {"a", "b"}


def test_a_lease_that_ended_in_a_pause_is_not_claimed_from_a_ledger_that_forgot() -> None:
    talk = Talk("a", "b", slots=1)
    assert talk.exchange("a") == 1
    talk.is_silent(seen_by="b")
    assert talk.exchange("b") == 1
    talk.ledger.restart(talk.now, "other")
    assert talk.exchange("a", waiting=1) == 0
    talk.exchange("b", used=1)
    held = {name: one.on["b"].held for name, one in talk.ledger.members.items()}
    assert held == {"a": 0, "b": 1}


def test_a_cut_off_gateway_keeps_its_share_and_one_that_starves_gets_one_slot_in_the_end() -> None:
    talk = Talk("a", "b")
    talk.exchange("a", used=4, waiting=1)
    talk.exchange("b")
    for name, early, late in (("a", 4, 4), ("b", 0, 1)):
        lease = talk.leases[name]
        uses = {"b": Use(4, 0, 1, starved=name == "b")}
        lease.lost(talk.now + 1, uses)
        assert lease.shares["b"] == early
        lease.lost(talk.now + 4, uses)
        lease.lost(talk.now + CUT_OFF_S, talk.uses())
        assert lease.shares["b"] == early, "nobody waits in vain"
        lease.lost(talk.now + CUT_OFF_S, uses)
        lease.lost(talk.now + CUT_OFF_S + 1, talk.uses())
        assert lease.shares["b"] == late


def test_a_gateway_that_never_heard_from_a_ledger_takes_half() -> None:
    lease = Lease("a")
    uses = {"b": Use(5, 0), "c": Use(1, 0)}
    lease.lost(10.0, uses)
    assert lease.shares == {"b": 2, "c": 1}


def test_a_new_gateway_that_may_still_hear_from_a_slow_ledger_takes_nothing_yet() -> None:
    lease, uses = Lease("a"), {"b": Use(5, 0)}
    lease.ask(10.0, uses)
    lease.lost(12.0, uses)
    assert lease.shares == {"b": 0}
    lease.lost(10.0 + CUT_OFF_S, uses)
    assert lease.shares == {"b": 2}


def test_who_hears_no_answer_in_time_goes_on_alone_with_the_share_it_has() -> None:
    talk = Talk("a")
    talk.exchange("a")
    lease = talk.leases["a"]
    assert [lease.tick(talk.now + n * RENEW_S, talk.uses()) for n in (0, 1, 2)] == [0, 0, 1]
    assert lease.is_alone
    assert lease.shares["b"] == 4


def test_a_process_that_stood_still_does_not_take_that_for_the_silence_of_the_ledger() -> None:
    talk = Talk("a")
    talk.exchange("a")
    assert not talk.leases["a"].tick(talk.now + 9, talk.uses())
    assert not talk.leases["a"].is_alone


def test_who_stood_still_and_then_meets_no_ledger_has_no_more_than_what_is_in_flight() -> None:
    talk = Talk("a")
    talk.exchange("a")
    talk.leases["a"].lost(talk.now + 9, talk.uses(used=1))
    assert talk.leases["a"].shares["b"] == 1


def asked(talk: Talk, name: str, **use: int) -> Message:
    """A message that the ledger hears at once, and whose answer is on its way."""
    return talk.leases[name].ask(talk.now, talk.uses(**use))


def test_a_slow_answer_grants_what_later_messages_still_ask_for() -> None:
    talk = Talk("a", "b")
    first = asked(talk, "a", waiting=4)
    reply = talk.ledger.hear(talk.now, first)
    assert reply is not None
    talk.now += RENEW_S
    talk.ledger.hear(talk.now, asked(talk, "a", waiting=4))
    talk.leases["a"].heard(talk.now, first, reply, talk.uses(waiting=4))
    assert talk.leases["a"].shares["b"] == 4


def test_a_slow_answer_brings_nothing_back_that_was_let_go_meanwhile() -> None:
    talk = Talk("a", "b")
    talk.exchange("a")
    talk.exchange("b", waiting=4)
    first = asked(talk, "a", waiting=4)
    reply = talk.ledger.hear(talk.now, first)
    assert reply is not None
    talk.now += 2.0
    second = asked(talk, "a")  # nobody waits here any more
    talk.ledger.hear(talk.now, second)
    assert talk.exchange("b", waiting=4) == 4 - second.claims["b"].ask
    talk.leases["a"].heard(talk.now, first, reply, talk.uses(waiting=4))
    assert talk.leases["a"].shares["b"] <= second.claims["b"].ask


def test_a_ledger_that_takes_ten_seconds_to_answer_still_moves_slots_to_who_starves() -> None:
    talk = Talk("a", "b")
    talk.exchange("a")
    for _ in range(2):
        talk.exchange("b", waiting=1)
        talk.exchange("a")
    slow, on_its_way = talk.leases["b"], []
    uses = {"b": Use(4, 0, 4, starved=False)}
    for _ in range(30):
        talk.now += RENEW_S
        slow.tick(talk.now, uses)
        message = slow.ask(talk.now, uses)
        on_its_way.append((talk.now + 10, message, talk.ledger.hear(talk.now, message)))
        for _ in range(2):
            talk.exchange("a")
        if on_its_way[0][0] <= talk.now:
            _, message, reply = on_its_way.pop(0)
            assert reply is not None
            slow.heard(talk.now, message, reply, uses)
    assert slow.is_alone
    assert slow.shares["b"] == 4
    held = {name: one.on["b"].held for name, one in talk.ledger.members.items()}
    assert held == {"a": 0, "b": 4}


def test_an_answer_that_came_in_time_ends_being_alone() -> None:
    talk = Talk("a")
    talk.exchange("a")
    lease = talk.leases["a"]
    lease.lost(talk.now, talk.uses())
    message = lease.ask(talk.now, talk.uses())
    reply = talk.ledger.hear(talk.now, message)
    assert reply is not None
    lease.heard(talk.now + ASK_S + 0.1, message, reply, talk.uses())
    assert lease.is_alone
    talk.exchange("a")
    assert not lease.is_alone


def test_while_nobody_is_heard_nothing_is_let_go_however_much_others_wanted() -> None:
    talk = Talk("a", "b")
    talk.exchange("a")
    talk.exchange("b", waiting=4)
    talk.exchange("a", used=4)
    lease = talk.leases["a"]
    lease.ask(talk.now, talk.uses(used=4))
    lease.lost(talk.now + ASK_S, talk.uses())
    for n in range(5):
        talk.now += RENEW_S
        lease.tick(talk.now, talk.uses())
        assert lease.ask(talk.now, talk.uses()).claims["b"].hold == 4, n


def test_after_a_restart_what_was_claimed_is_kept_by_the_messages_that_follow() -> None:
    talk = Talk("a")
    talk.exchange("a", used=2)
    talk.ledger.restart(talk.now, "other")
    for _ in range(3):
        assert talk.exchange("a", used=2) == 4
        talk.now += 0.1


def test_what_runs_in_excess_is_granted_to_nobody_else() -> None:
    talk = Talk("a", "b", "c", slots=2)
    talk.exchange("a", used=2)
    talk.is_silent(seen_by="b")
    assert talk.exchange("b", waiting=2) == 2
    talk.exchange("a", used=2)
    talk.exchange("b", spare=False)
    assert talk.ledger.members["b"].granted == {"b": 0}
    assert talk.exchange("c", waiting=2) == 0, "a's two requests still run"
    talk.exchange("a")
    talk.exchange("c", waiting=2)
    assert talk.exchange("c", waiting=2) == 2


def test_an_older_message_that_comes_late_takes_nothing_back() -> None:
    talk = Talk("a", "b")
    older = asked(talk, "a")
    assert talk.exchange("a", waiting=4) == 4
    assert talk.ledger.hear(talk.now, older) is None
    assert talk.ledger.members["a"].granted == {"b": 4}


def test_who_was_known_before_a_restart_is_waited_for() -> None:
    talk = Talk("a", "b", slots=2)
    for _ in range(3):
        talk.exchange("a", waiting=1)
        talk.exchange("b", waiting=1)
    talk.ledger.restart(talk.now, "other")
    talk.exchange("a", waiting=2)
    talk.now += CALM_S + 0.5
    for _ in range(3):
        assert talk.exchange("a", waiting=2) == 1, "b is not back yet"
    assert talk.exchange("b", waiting=1) == 1


def test_who_comes_after_the_calm_claims_nothing_though_it_knows_others_who_are_missing() -> None:
    """Otherwise it would make the ledger wait for those, and itself claim what was granted since."""
    talk = Talk("a", "b", "c", slots=3)
    for _ in range(4):
        for name in ("a", "b", "c"):
            talk.exchange(name, waiting=1)
    talk.ledger.restart(talk.now, "other")
    talk.leases["new"] = Lease("new")
    talk.exchange("new")
    talk.now += CALM_S + 0.5
    for _ in range(2):
        talk.exchange("new", waiting=3)
    assert talk.ledger.members["new"].granted == {"b": 3}
    talk.exchange("a", waiting=1)
    assert talk.ledger.members["a"].granted == {"b": 0}
    assert not talk.ledger.awaited


def test_half_of_the_slots_taken_without_a_ledger_are_not_claimed_from_one() -> None:
    talk = Talk("a", "b")
    assert talk.exchange("a", waiting=4) == 4
    talk.leases["b"].lost(talk.now, talk.uses())
    assert talk.leases["b"].shares["b"] == 2
    talk.ledger.restart(talk.now, "other")
    assert talk.exchange("b") == 0
    assert talk.exchange("a", waiting=4) == 4


def test_an_answer_from_before_a_pause_brings_nothing_back() -> None:
    talk = Talk("a", "b")
    first = asked(talk, "a", waiting=4)
    reply = talk.ledger.hear(talk.now, first)
    assert reply is not None
    talk.exchange("a")
    first = asked(talk, "a", waiting=4)
    reply = talk.ledger.hear(talk.now, first)
    assert reply is not None
    talk.is_silent(seen_by="b")
    lease = talk.leases["a"]
    lease.ask(talk.now, talk.uses())
    lease.lost(talk.now + ASK_S, talk.uses(waiting=4))
    lease.heard(talk.now + ASK_S, first, reply, talk.uses(waiting=4))
    lease.lost(talk.now + 2 * ASK_S, talk.uses(waiting=4))
    assert lease.shares["b"] == 0


def test_a_ledger_that_stood_still_ends_no_lease_of_who_has_spoken_meanwhile() -> None:
    talk = Talk("a", "b")
    talk.exchange("a", used=3, waiting=1)
    talk.now += LEASE_S + 0.5
    greedy = asked(talk, "b", waiting=4)
    reply = talk.ledger.hear(talk.now, greedy)
    assert reply is not None
    assert reply.granted["b"] == 0
    talk.exchange("a", used=3, waiting=1)
    assert talk.ledger.members["a"].granted == {"b": 4}


def test_who_drains_holds_only_what_is_in_flight() -> None:
    talk = Talk("a", "b")
    talk.exchange("a", used=1)
    talk.now += 2
    talk.exchange("b")
    assert talk.exchange("a", used=1, spare=False) == 1
    talk.exchange("a", used=1, spare=False)
    talk.exchange("b")
    assert talk.exchange("b") == 3


wants = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(Want, st.integers(0, 9), st.integers(0, 9), st.booleans()),
    min_size=1,
)


@given(st.integers(0, 12), wants, st.integers(0, 9))
def test_a_division_is_never_too_much_and_leaves_nothing_over(
    slots: int, wants: dict[str, Want], turn: int
) -> None:
    shares = divide(slots, wants, turn)
    assert sum(shares.values()) <= slots
    needs = sum(one.need for one in wants.values())
    if needs >= slots or any(one.spare for one in wants.values()):
        assert sum(shares.values()) == slots
    for name, want in wants.items():
        if shares[name] < want.need:
            assert all(shares[o] <= shares[name] + 1 for o in wants), "nobody has two more"


def test_who_returns_with_work_in_flight_does_not_lend_its_slots_again_while_others_have_them() -> (
    None
):
    talk = Talk("a", "b", slots=2)
    talk.exchange("a", used=2)
    talk.is_silent(seen_by="b")
    assert talk.exchange("b", waiting=2) == 2
    assert talk.exchange("a", used=2, waiting=2) == 0, "it is counted, and that is all"
    talk.exchange("a", used=0, waiting=2)
    held = {name: one.on["b"].held for name, one in talk.ledger.members.items()}
    assert held == {"a": 0, "b": 2}
