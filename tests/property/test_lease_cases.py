"""What the state machine found, and how slots are divided: the protocol in single steps, on the ledger's twin."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.lease import CUT_OFF_S, OWN_LEASE_S, Lease, Use
from gateway.core.lease_fair import Want, divide
from tests.property.lease_ledger import Ledger


class Talk:
    """Gateways that exchange a message with the ledger when they are told to."""

    def __init__(self, *names: str, slots: int = 4) -> None:
        self.now = 10.0
        self.ledger = Ledger()
        self.slots = slots
        self.leases = {name: Lease(name) for name in names}

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
    talk.now += OWN_LEASE_S + 2
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
        assert lease.lost(talk.now + 1, talk.now + 0.5, uses)
        assert lease.shares["b"] == early
        assert lease.lost(talk.now + CUT_OFF_S, talk.now + CUT_OFF_S - 1, talk.uses())
        assert lease.shares["b"] == early, "nobody waits in vain"
        assert lease.lost(talk.now + CUT_OFF_S, talk.now + CUT_OFF_S - 1, uses)
        assert lease.lost(talk.now + CUT_OFF_S + 1, talk.now + CUT_OFF_S, talk.uses())
        assert lease.shares["b"] == late


def test_a_gateway_that_never_heard_from_a_ledger_takes_half() -> None:
    lease = Lease("a")
    lease.ask(10.0, {"b": Use(5, 0), "c": Use(1, 0)})
    assert lease.lost(11.0, 10.0, {"b": Use(5, 0), "c": Use(1, 0)})
    assert lease.shares == {"b": 2, "c": 1}


def test_an_attempt_during_which_the_process_stood_still_says_nothing_about_the_ledger() -> None:
    talk = Talk("a")
    talk.exchange("a")
    assert not talk.leases["a"].lost(talk.now + 9, talk.now, talk.uses())
    assert not talk.leases["a"].is_alone


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
    talk.now += OWN_LEASE_S + 2
    assert talk.exchange("b", waiting=2) == 2
    assert talk.exchange("a", used=2, waiting=2) == 0, "it is counted, and that is all"
    talk.exchange("a", used=0, waiting=2)
    held = {name: one.on["b"].held for name, one in talk.ledger.members.items()}
    assert held == {"a": 0, "b": 2}
