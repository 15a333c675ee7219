"""zstd with what the library lacks: bounded output at a time, and an error for a body that was cut off.

The stream reader of `zstandard` takes a cut frame for a whole one, and its other decoders give out whatever one
input makes. So the frames are followed here by their headers (RFC 8878 section 3.1), without decoding anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import IO, Final, cast

import zstandard

WINDOW: Final = 8 << 20  # bytes; RFC 9659 allows HTTP no larger one
MOST_BLOCKS: Final = (
    1 << 17
)  # 512 bytes each make a body of the largest size; smaller ones are an attack

_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_SKIPPABLE: Final = b"\x2a\x4d\x18"  # behind a byte 0x50..0x5f
_DICTIONARY_BYTES: Final = (0, 1, 2, 4)
_SIZE_BYTES: Final = (0, 2, 4, 8)


def decoded(pieces: Iterable[bytes | memoryview], step: int) -> Iterator[bytes]:
    """The content, at most `step` bytes at a time. Raises ZstdError, or EOFError when the last frame is cut."""
    source = _Source(pieces)
    decoder = zstandard.ZstdDecompressor(max_window_size=WINDOW)
    with decoder.stream_reader(cast("IO[bytes]", source), read_across_frames=True) as reader:
        while piece := reader.read(step):
            yield piece
    if not source.frames.at_end:
        raise EOFError("it ends too early")


class _Source:
    """Pieces as the file that `zstandard` wants to read from; its frames are followed on the way."""

    def __init__(self, pieces: Iterable[bytes | memoryview]) -> None:
        self._pieces = iter(pieces)
        self.frames = Frames()

    def read(self, _size: int = -1) -> bytes:
        piece = bytes(next(self._pieces, b""))
        self.frames.follow(piece)
        return piece


class Frames:
    """Where in its frames a zstd stream is."""

    def __init__(self) -> None:
        self._held = b""  # of a header that is not whole yet
        self._wanted = 5  # bytes of it
        self._skip = 0  # bytes until the next header
        self._in_frame = False
        self._checksum = 0  # bytes behind the last block
        self._blocks = 0
        self._seen = 0  # frames

    @property
    def at_end(self) -> bool:
        """At least one frame was there, and the last one is whole."""
        return self._seen > 0 and not (self._in_frame or self._held or self._skip)

    def follow(self, data: bytes) -> None:
        """Take the next bytes. What is no frame at all is the decoder's to refuse. Raises EOFError."""
        at = 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
                continue
            piece = data[at : at + self._wanted - len(self._held)]
            self._held += piece
            at += len(piece)
            if len(self._held) == self._wanted:
                self._on_header(self._held)

    def _on_header(self, header: bytes) -> None:
        if self._in_frame:
            self._on_block(int.from_bytes(header, "little"))
        elif header[:4] == _MAGIC:
            self._on_frame(header[4])
        elif len(header) == 5 and header[1:4] == _SKIPPABLE:
            self._wanted = 8
            return
        else:
            self._skip = int.from_bytes(header[4:], "little")
            self._wanted = 5
            self._seen += 1
        self._held = b""

    def _on_frame(self, descriptor: int) -> None:
        single = bool(descriptor & 32)
        size = _SIZE_BYTES[descriptor >> 6] or int(single)
        self._skip = size + int(not single) + _DICTIONARY_BYTES[descriptor & 3]
        self._checksum = 4 if descriptor & 4 else 0
        self._in_frame = True
        self._wanted = 3

    def _on_block(self, header: int) -> None:
        self._blocks += 1
        if self._blocks > MOST_BLOCKS:
            raise EOFError("it is made of too many blocks")
        is_run = header >> 1 & 3 == 1  # one byte, repeated
        self._skip = 1 if is_run else header >> 3
        if header & 1:  # the last one
            self._skip += self._checksum
            self._in_frame = False
            self._wanted = 5
            self._seen += 1
