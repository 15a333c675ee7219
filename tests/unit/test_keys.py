"""Whose key is it, and may it pass: examples of every rule."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.keys import Key, KeyRing, Refusal, digests_in, end_of_day, hash_of, presented
from gateway.core.settings.keyfile import as_record, expiry_text, parse_expiry
from gateway.core.settings.kinds import Wrong

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
ALICE = Key(name="alice", hash=hash_of("sk-alice"))
BOB = Key(name="bob", hash=hash_of("sk-bob"), models=frozenset({"coder"}))
OLD = Key(name="old", hash=hash_of("sk-old"), expires=NOW)
RING = KeyRing((ALICE, BOB, OLD))


@pytest.mark.parametrize(
    ("secrets", "found"),
    [
        ((), Refusal.ABSENT),
        (("sk-alice",), ALICE),
        (("sk-alice", "sk-alice"), ALICE),
        (("dummy", "sk-bob", "x"), BOB),
        (("sk-old", "sk-bob"), BOB),
        (("sk-alice", "sk-bob"), Refusal.AMBIGUOUS),
        (("sk-old",), Refusal.EXPIRED),
        (("dummy", "sk-old"), Refusal.EXPIRED),
        (("dummy",), Refusal.UNKNOWN),
        (("sk-alic",), Refusal.UNKNOWN),
        (("sk-alice ",), Refusal.UNKNOWN),
        (("SK-ALICE",), Refusal.UNKNOWN),
        (("é\udc80",), Refusal.UNKNOWN),
        ((ALICE.hash.hex(),), Refusal.UNKNOWN),
        ((f"sha256:{ALICE.hash.hex()}",), Refusal.UNKNOWN),
    ],
)
def test_exactly_one_valid_key_counts(secrets: tuple[str, ...], found: Key | Refusal) -> None:
    assert RING.find([hash_of(secret) for secret in secrets], lambda: NOW) is found


def test_a_ring_without_keys_refuses_everybody() -> None:
    assert KeyRing().find((hash_of("sk-alice"),), lambda: NOW) is Refusal.UNKNOWN
    assert KeyRing().find((), lambda: NOW) is Refusal.ABSENT


@pytest.mark.parametrize("refusal", Refusal)
def test_every_refusal_is_a_401_that_says_what_to_do(refusal: Refusal) -> None:
    error = refusal.error
    assert (error.key, error.situation.status) == ("invalid_api_key", 401)
    assert error.message == refusal.value


def test_a_key_lasts_to_its_last_instant_and_not_beyond() -> None:
    assert OLD.is_valid(NOW - timedelta(microseconds=1))
    assert not OLD.is_valid(NOW)
    assert not OLD.is_valid(NOW.astimezone(timezone(timedelta(hours=5))))


def test_a_ring_shows_no_secret_and_knows_hashes_only() -> None:
    assert "sk-alice" not in repr(RING)
    assert ALICE.hash == sha256(b"sk-alice").digest()


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], ()),
        ([(b"authorization", b"Bearer K")], ("K",)),
        ([(b"authorization", b"bearer K")], ("K",)),
        ([(b"authorization", b"BEARER   K  ")], ("K",)),
        ([(b"authorization", b"  Bearer K")], ("K",)),
        ([(b"authorization", b"Bearer ")], ()),
        ([(b"authorization", b"Bearer")], ()),
        ([(b"authorization", b"K")], ()),
        ([(b"authorization", b"Basic Szo=")], ()),
        ([(b"authorization", b"BearerK")], ()),
        ([(b"x-api-key", b"K")], ("K",)),
        ([(b"api-key", b" K ")], ("K",)),
        ([(b"x-api-key", b"")], ()),
        ([(b"x-goog-api-key", b"K")], ()),
        ([(b"cookie", b"K")], ()),
        ([(b"authorization", b"Bearer K"), (b"x-api-key", b"K")], ("K",)),
        (
            [(b"x-api-key", b"A"), (b"authorization", b"Bearer B"), (b"api-key", b"C")],
            ("A", "B", "C"),
        ),
        ([(b"authorization", b"Bearer A"), (b"authorization", b"Bearer B")], ("A", "B")),
        ([(b"x-api-key", b"\xff\xfe")], ("ÿþ",)),
    ],
)
def test_every_form_of_credential_is_seen(
    headers: list[tuple[bytes, bytes]], expected: tuple[str, ...]
) -> None:
    assert presented(headers) == expected


@given(
    st.lists(st.tuples(st.sampled_from([b"authorization", b"x-api-key", b"api-key"]), st.binary()))
)
def test_no_header_whatever_its_bytes_breaks_the_lookup(headers: list[tuple[bytes, bytes]]) -> None:
    assert RING.find(digests_in(headers), lambda: NOW) in {Refusal.ABSENT, Refusal.UNKNOWN}


@pytest.mark.parametrize(
    ("text", "first_invalid"),
    [
        ("2026-11-29", datetime(2026, 11, 30, tzinfo=UTC)),
        ("2026-12-31", datetime(2027, 1, 1, tzinfo=UTC)),
        ("2028-02-29", datetime(2028, 3, 1, tzinfo=UTC)),
        ("2026-11-29T18:00:00", datetime(2026, 11, 29, 18, tzinfo=UTC)),
        ("2026-11-29 18:00:00+01:00", datetime(2026, 11, 29, 17, tzinfo=UTC)),
        ("2026-11-29T18:00:00Z", datetime(2026, 11, 29, 18, tzinfo=UTC)),
    ],
)
def test_a_date_lasts_until_the_day_is_over(text: str, first_invalid: datetime) -> None:
    assert parse_expiry(text) == first_invalid


@pytest.mark.parametrize(
    "text", ["", "tomorrow", "2026-02-30", "31.12.2026", "9999-12-31", "12", "2026-W01"]
)
def test_what_is_no_date_is_refused(text: str) -> None:
    with pytest.raises(Wrong, match="write for example"):
        parse_expiry(text)


def test_the_last_day_is_written_back_as_it_was_given() -> None:
    assert expiry_text(end_of_day(date(2027, 12, 31))) == date(2027, 12, 31)
    assert expiry_text(datetime(2027, 1, 1, 5, tzinfo=UTC)) == "2027-01-01T05:00:00+00:00"


def test_a_record_leaves_defaults_out() -> None:
    assert as_record(ALICE) == {"name": "alice", "hash": f"sha256:{ALICE.hash.hex()}"}
