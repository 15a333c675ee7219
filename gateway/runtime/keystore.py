"""The keys file on disk: read whole, replaced atomically, 0600, safe against a second writer.

Law of this file: whoever reads the file at any moment sees it as it was or as it will be, never between.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import string
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import yaml

from gateway.core.keys import Key, KeyRing
from gateway.core.settings import keyfile
from gateway.core.settings.nodes import Notes
from gateway.runtime.yamlfile import compose

PREFIX: Final = "sk-sg-"
_ALPHABET: Final = string.ascii_letters + string.digits
_LENGTH: Final = 32  # of 62 characters: 190 bits, of which the contract asks for 160
_HEADER: Final = (
    "# Written by `slotgate keys`, which keeps no comments. It holds hashes, not keys.\n"
)


def new_secret() -> str:
    """A fresh key: one word that a double click selects and that a path can hold."""
    return PREFIX + "".join(secrets.choice(_ALPHABET) for _ in range(_LENGTH))


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file; none if it does not exist. Raises ConfigErrors."""
    notes = Notes(str(path))
    keys = keyfile.read(compose(path, notes), notes) if path.exists() else ()
    notes.raise_mistakes()
    return keys


class KeyStore:
    """The keys of one file as it was when it was read. `runtime.reload` notices a change; then another is made."""

    def __init__(self, path: str | Path) -> None:
        """Reads the file; a missing one is a ring without keys, which refuses everybody.

        Raises ConfigErrors.
        """
        self.path = Path(path)
        self.ring = KeyRing(read_keys(self.path))


class NameTakenError(Exception):
    """A key of this name exists."""


class UnknownNameError(Exception):
    """No key has this name."""


def add(path: Path, key: Key) -> None:
    """Add a key to the file, making the file if need be.

    Raises NameTakenError, ConfigErrors (the file is wrong; it stays as it is) or OSError.
    """
    with _locked(path):
        keys = read_keys(path)
        if any(other.name == key.name for other in keys):
            raise NameTakenError(key.name)
        _write(path, [*keys, key])


def revoke(path: Path, name: str) -> None:
    """Take a key out of the file.

    Raises UnknownNameError, ConfigErrors (the file is wrong; it stays as it is) or OSError.
    """
    with _locked(path):
        keys = read_keys(path)
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            raise UnknownNameError(name)
        _write(path, left)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time. The folder is locked, not the file: a rename would leave the lock behind."""
    folder = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)  # gives the lock back too


def _write(path: Path, keys: Sequence[Key]) -> None:
    target = path.resolve()  # through a symbolic link: replace what it points to
    text = _HEADER + yaml.safe_dump(
        [keyfile.as_record(key) for key in keys], sort_keys=False, allow_unicode=True
    )
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # made 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            _keep_owner(target, file.fileno())
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _read_back(Path(temporary), keys)
        Path(temporary).replace(target)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise
    _sync_folder(target.parent)


def _read_back(written: Path, keys: Sequence[Key]) -> None:
    """A file that we could not read ourselves must never replace one that we can."""
    if read_keys(written) != tuple(keys):
        raise AssertionError("the keys written are not the keys read back")


def _keep_owner(target: Path, descriptor: int) -> None:
    """`sudo slotgate keys` must not take the file away from the user that the gateway runs as."""
    with suppress(OSError):  # not there yet, or not ours to give: then it is the writer's
        there = target.stat()
        os.fchown(descriptor, there.st_uid, there.st_gid)


def _sync_folder(folder: Path) -> None:
    """The rename itself must survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
