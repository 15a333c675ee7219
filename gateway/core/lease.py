"""Slots of each backend that this gateway may lend, when several gateways share them: events in, decisions out.

Law of this file (law 1, for all gateways together): what is lent here is never more than what this gateway holds by
the ledger, and the ledger never gives a slot to somebody before whoever held it has said that it let go, or has been
silent for the length of its lease. The one exception: a living gateway that is cut off from the ledger for longer
than its lease goes on with its own last share, or with one slot for requests that have a share of nothing at all.

How a slot moves. Every gateway sends a `Message` some 20 to 50 times a second: what it holds, uses, needs and asks
for. The ledger (`runtime/cluster_ledger.lua`) answers with what is granted, and with what everybody else holds and needs. From
that table each works out the same fair division (`core.lease_fair`). Who has more than its part lends nothing new at
once, tells the ledger what it has let go of with its next message, and whoever asks for it gets it with its own next.

A slow ledger is not a lost one. A message goes out every `RENEW_S` whether or not the one before was answered, so the
ledger goes on hearing of a gateway however long its answers take, and an answer counts however late it comes: what it
grants stands as far as every later message still asks for it. A ledger that has not answered in time is away, as far
as limits and the log are concerned, and the share stays what it was.

Pauses. A process that was stopped does not notice, but its lease ends all the same. So a lease has an end by this
gateway's own clock, earlier than the ledger's; after it nothing is left of it but what is in flight, until the ledger
was asked again: it answers, and what it says holds, or it cannot be reached, and the exception does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.core.lease_fair import Want, divide

ASK_S: Final = (
    2.0  # an answer came in time if it took no longer; without one for so long, the ledger is away
)
RENEW_S: Final = 1.0  # a message goes out at least so often, and `tick` is called
PAUSED_S: Final = 1.0  # who wakes so much later than that has stood still
LEASE_S: Final = 6.0  # at the ledger, from when it hears a message
SEEN_S: Final = (
    1.0  # the ledger has to see for so long that it is over: it may have stood still itself
)
OWN_LEASE_S: Final = 5.0  # here, from before that message was sent: clocks may differ by a sixth
CUT_OFF_S: Final = 7.5  # no answer for so long: it is cut off, and its lease over by any clock
CALM_S: Final = (
    2.0  # after a restart of the ledger: by then every living gateway has claimed its share
)
SHORT_CALM_S: Final = 0.3  # after its memory was lost: who is connected says so ten times in it
TURN_MS: Final = 1_000  # how long an odd slot is one gateway's
PEAK_S: Final = 1.0
NO_LIMIT: Final = 1 << 30
UNSEEN: Final = ""  # the epoch of a gateway that never heard from a ledger


@dataclass(frozen=True, slots=True)
class Use:
    """One backend as dispatch sees it now, in permits."""

    slots: int
    used: int  # in flight and settling
    waiting: int = 0  # of requests that could use it
    spare: bool = True  # is it fit to hold slots in advance?
    starved: bool = False  # somebody waits who could use it, and has a share of nothing else either

    @property
    def need(self) -> int:
        return min(self.slots, self.used + self.waiting)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a gateway says of one backend. It lends no more than `hold` until it is answered.

    What it was granted and has not yet heard of is still its own, up to what it asks for.
    """

    hold: int
    used: int
    need: int
    peak: int
    ask: int
    slots: int
    spare: bool


@dataclass(frozen=True, slots=True)
class Message:
    """What a gateway sends. Older numbers than the last one heard are ignored by the ledger."""

    sender: str
    number: int
    epoch: str  # of the ledger that its claims come from
    claims: Mapping[str, Claim]
    peers: tuple[str, ...]  # the gateways it knows of: a ledger that lost its memory waits for them
    sent_at: float  # the sender's own clock; it is not transmitted


@dataclass(frozen=True, slots=True)
class Standing:
    """What the ledger last heard from another gateway about one backend."""

    held: int
    used: int
    need: int
    peak: int
    spare: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """What the ledger answers. `others` never holds the sender itself."""

    epoch: str  # another value: it is another ledger, or lost its memory
    at_ms: int  # by the ledger's clock
    granted: Mapping[str, int]
    others: Mapping[str, Mapping[str, Standing]]  # gateway: backend: standing


@dataclass(slots=True, eq=False)
class _Holding:
    """One backend's slots here. Owned by `Lease`."""

    hold: int = 0  # by the ledger
    floor: int = 0  # what it lends at least: 1 once it was starved and cut off
    share: int = 0  # what dispatch may lend: the hold, or less while some of it is let go
    peaks: list[tuple[float, int]] = field(default_factory=list)  # (when, need), ever smaller


class Lease:
    """What one gateway holds of all backends. Times are its own monotonic seconds."""

    def __init__(self, me: str) -> None:
        self.me = me
        self.others: Mapping[str, Mapping[str, Standing]] = {}
        self.until = 0.0  # nothing is lent after it
        self.is_alone = False  # the ledger does not answer, or not in time
        self._epoch = UNSEEN
        self._heard_at = -CUT_OFF_S  # when the last answer came, however late
        self._since = 0.0  # nobody answered in time since
        self._ticked_at = 0.0
        self._is_news = False  # there was an answer since the last message
        self._turn = 0
        self._number = 0
        self._ended = 0.0  # the end that was noticed last
        self._void = 0  # answers to messages up to this number are of a lease that has ended
        self._asked: list[Message] = []  # not answered yet
        self._holdings: dict[str, _Holding] = {}

    # ------------------------------------------------------------------ events

    def tick(self, now: float, uses: Mapping[str, Use]) -> bool:
        """To be called every `RENEW_S`. True: for want of an answer in time it goes on alone.

        Not so for a process that stood still meanwhile: it has to ask again first.
        """
        stood_still = now - self._ticked_at > RENEW_S + PAUSED_S
        self._ticked_at = now
        if stood_still:
            self._since = now
        if now - self._since < ASK_S:
            return False
        self.lost(now, uses)
        return True

    def ask(self, now: float, uses: Mapping[str, Use]) -> Message:
        """Time to tell the ledger. Afterwards `shares` must reach dispatch before the message leaves."""
        self._keep(uses)
        self._lapse(now, uses)
        self._number += 1
        claims = {name: self._claim(now, name, use) for name, use in uses.items()}
        self._is_news = False
        message = Message(self.me, self._number, self._epoch, claims, tuple(self.others), now)
        self._asked.append(message)
        return message

    def heard(self, now: float, message: Message, reply: Reply, uses: Mapping[str, Use]) -> None:
        """The ledger answered this message, maybe after later ones have left. Answers come in the order of messages."""
        self._asked = [later for later in self._asked if later.number > message.number]
        self._is_news = True
        self._epoch, self.others = reply.epoch, reply.others
        self._turn = reply.at_ms // TURN_MS
        self._heard_at = now
        if now - message.sent_at <= ASK_S:
            self.is_alone = False
            self._since = now
        if not self.is_alone:
            self.until = message.sent_at + OWN_LEASE_S
        for name, granted in reply.granted.items():
            holding = self._holdings.get(name)
            if holding is not None:
                stands = min(granted, self._least_asked(name))
                ended = message.number <= self._void
                holding.hold = min(stands, holding.hold) if ended else stands
                holding.floor = 0
                use = uses.get(name)
                part = stands if use is None else self._part(now, name, holding, use)
                holding.share = min(holding.hold, part)

    def lost(self, now: float, uses: Mapping[str, Use]) -> None:
        """The ledger cannot be reached: on with the last known share.

        One that never heard from it takes half of the slots, as one of a pair.
        """
        self._keep(uses)
        self._lapse(now, uses)
        self.is_alone = True
        self._since = now
        self.until = now + OWN_LEASE_S
        for name, use in uses.items():
            holding = self._holdings[name]
            if self._epoch == UNSEEN and not self._may_still_hear(now):
                holding.hold = max(1, use.slots // 2)
            if use.starved and now >= self._heard_at + CUT_OFF_S:
                holding.floor = 1
            holding.share = max(holding.floor, holding.hold)

    def hung_up(self) -> None:
        """No answer will come any more to what was asked until now."""
        self._asked.clear()

    # ------------------------------------------------------------------ decisions

    @property
    def shares(self) -> dict[str, int]:
        """What dispatch may lend of each backend, until `until`."""
        return {name: one.share for name, one in self._holdings.items()}

    def is_short(self, uses: Mapping[str, Use]) -> bool:
        """Does anybody need more of any backend than they hold? Then slots should move fast."""
        for name, use in uses.items():
            holding = self._holdings.get(name)
            if holding is None or use.need > holding.share or holding.share < holding.hold:
                return True
        return any(
            one.need > one.held for theirs in self.others.values() for one in theirs.values()
        )

    def used_elsewhere(self, name: str) -> int:
        """Permits that other gateways have in flight there, as the ledger last heard."""
        return sum(theirs[name].used for theirs in self.others.values() if name in theirs)

    # ------------------------------------------------------------------ helpers

    def _keep(self, uses: Mapping[str, Use]) -> None:
        for name in [name for name in self._holdings if name not in uses]:
            del self._holdings[name]
        for name in uses:
            self._holdings.setdefault(name, _Holding())

    def _may_still_hear(self, now: float) -> bool:
        """Its first message has left, and the answer may be slow."""
        return bool(self._asked) and now < self._asked[0].sent_at + CUT_OFF_S

    def _lapse(self, now: float, uses: Mapping[str, Use]) -> None:
        """If it ended, this process stood still. Others may have it: what is in flight is all that is left of it."""
        if now < self.until:
            return
        if self._ended != self.until:
            self._ended, self._void = self.until, self._number
        for name, use in uses.items():
            holding = self._holdings[name]
            holding.hold = min(holding.hold, use.used)

    def _claim(self, now: float, name: str, use: Use) -> Claim:
        holding = self._holdings[name]
        part = self._part(now, name, holding, use)
        if self._is_news or not self.is_alone:  # while nobody is heard, nothing is let go
            if part < holding.hold:
                holding.hold = max(part, min(holding.hold, use.used))
            holding.share = min(holding.hold, part)
        peak = _peak(now, holding, use.need)
        ask = max(part, holding.hold)
        return Claim(holding.hold, use.used, use.need, peak, ask, use.slots, use.spare)

    def _least_asked(self, name: str) -> int:
        """What every message that is not answered yet still asks for."""
        asks = (one.claims[name].ask if name in one.claims else 0 for one in self._asked)
        return min(asks, default=NO_LIMIT)

    def _part(self, now: float, name: str, holding: _Holding, use: Use) -> int:
        """Its fair part of one backend's slots; never what others hold by the ledger, who may have got it meanwhile."""
        elsewhere = sum(theirs[name].held for theirs in self.others.values() if name in theirs)
        wants = {
            other: Want(theirs[name].need, theirs[name].peak, theirs[name].spare)
            for other, theirs in self.others.items()
            if name in theirs
        }
        wants[self.me] = Want(use.need, _peak(now, holding, use.need), use.spare)
        place = sorted(self._holdings).index(name)  # so that nobody is the last one everywhere
        part = divide(use.slots, wants, self._turn + place)[self.me]
        return (
            part
            if elsewhere + holding.hold <= use.slots
            else min(part, max(0, use.slots - elsewhere))
        )


def _peak(now: float, holding: _Holding, need: int) -> int:
    peaks = holding.peaks
    while peaks and peaks[-1][1] <= need:
        peaks.pop()
    peaks.append((now, need))
    while peaks[0][0] < now - PEAK_S:
        peaks.pop(0)
    return peaks[0][1]
