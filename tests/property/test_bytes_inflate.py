"""Any body through any codings comes out as it was; any damage is an error or is none; and the limit holds."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable

import brotli  # type: ignore[import-untyped]
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import GatewayError
from gateway.runtime.inflate import inflate
from gateway.runtime.inflate_zstd import Frames

CODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "deflate": zlib.compress,
    "br": lambda data: brotli.compress(data, quality=3),
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}
bodies = st.one_of(
    st.binary(max_size=300),
    st.builds(
        lambda piece, times: piece * times, st.binary(min_size=1, max_size=40), st.integers(1, 9000)
    ),
)
chains = st.lists(st.sampled_from(sorted(CODERS)), min_size=1, max_size=3)


def _coded(body: bytes, chain: list[str]) -> bytes:
    for coding in chain:
        body = CODERS[coding](body)
    return body


def _decoded(body: bytes, chain: list[str], limit: int = 1 << 26) -> bytes | str:
    """The decoded body, or the key of the refusal."""
    try:
        return asyncio.run(
            inflate(body, tuple(chain), limit, lambda: GatewayError("body_too_large", ""))
        )
    except GatewayError as error:
        return error.key


@given(bodies, chains)
def test_what_was_coded_comes_out_as_it_was(body: bytes, chain: list[str]) -> None:
    assert _decoded(_coded(body, chain), chain) == body


@given(bodies, chains, st.data())
def test_a_cut_body_is_an_error_and_never_a_shorter_body(
    body: bytes, chain: list[str], data: st.DataObject
) -> None:
    whole = _coded(body, chain)
    at = data.draw(st.integers(0, len(whole) - 1))
    assert _decoded(whole[:at], chain) == "invalid_json"


@given(bodies, chains, st.data())
def test_a_changed_byte_is_an_error_or_a_body_but_never_a_crash(
    body: bytes, chain: list[str], data: st.DataObject
) -> None:
    whole = bytearray(_coded(body, chain))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    found = _decoded(bytes(whole), chain)
    assert isinstance(found, bytes) or found in ("invalid_json", "body_too_large")


@given(st.binary(max_size=2000), chains)
def test_any_bytes_at_all_are_an_error_or_a_body(body: bytes, chain: list[str]) -> None:
    found = _decoded(body, chain)
    assert isinstance(found, bytes) or found in ("invalid_json", "body_too_large")


@given(bodies, st.sampled_from(sorted(CODERS)), st.integers(0, 1 << 19))
def test_the_limit_is_exact(body: bytes, coding: str, limit: int) -> None:
    expected = body if len(body) <= limit else "body_too_large"
    assert _decoded(CODERS[coding](body), [coding], limit) == expected


@given(st.lists(bodies, min_size=1, max_size=3), st.data())
def test_frames_are_at_their_end_only_behind_whole_ones_however_they_are_cut(
    contents: list[bytes], data: st.DataObject
) -> None:
    frames = [CODERS["zstd"](content) for content in contents]
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"12345"
    frames.insert(data.draw(st.integers(0, len(frames))), skippable)
    ends = {sum(map(len, frames[: count + 1])) for count in range(len(frames))}
    stream, at, seen = b"".join(frames), 0, Frames()
    while at < len(stream):
        step = data.draw(st.integers(1, len(stream) - at))
        seen.follow(stream[at : at + step])
        at += step
        assert seen.at_end == (at in ends)
