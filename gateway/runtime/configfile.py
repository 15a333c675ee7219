"""The config file: read whole, checked whole, with the files that it names.

Law of this file: a config is used whole or not at all, and its writer learns of every mistake at once.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gateway.core.config import Backend, Config
from gateway.core.settings import rules
from gateway.core.settings.nodes import Entries, Items, Node, Notes, Scalar, child
from gateway.runtime.yamlfile import compose

KEYS_FILE: Final = "keys.yaml"


def load(
    path: str | Path,
    *,
    host: str | None = None,
    port: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Read a config file; `host` and `port` replace those of the file, as the command line does.

    Raises ConfigErrors with every mistake, each with its line.
    """
    path = Path(path)
    notes = rules.notes_for(str(path))
    root = compose(path, notes, os.environ if environ is None else environ)
    folder = path.absolute().parent
    if root is None:
        notes.wrong("", "is empty; write at least `backends: [{url: http://127.0.0.1:8080}]`", 1)
        notes.raise_mistakes()
    return _checked(root or Items(1, ()), notes, folder, host=host, port=port)


def from_backends(
    urls: Sequence[str],
    *,
    host: str | None = None,
    port: int | None = None,
    folder: Path | None = None,
) -> Config:
    """The config of `serve --backend URL…`: all defaults, and keys.yaml of the folder if there is one.

    `folder` is the current one unless given. Raises ConfigErrors, whose mistakes have no line.
    """
    backends = tuple(
        Entries(0, ((Scalar(0, "url", "url"), Scalar(0, url, url)),)) for url in dict.fromkeys(urls)
    )
    root = Entries(0, ((Scalar(0, "backends", "backends"), Items(0, backends)),))
    notes = rules.notes_for("command line")
    return _checked(root, notes, Path.cwd() if folder is None else folder, host=host, port=port)


def keys_file_of(path: str | Path, *, environ: Mapping[str, str] | None = None) -> Path:
    """The keys file that a config names, or keys.yaml beside it; nothing else in the config matters.

    So keys can be made before the config is right. Raises ConfigErrors if the file is no YAML mapping.
    """
    path = Path(path)
    notes = Notes(str(path))
    root = compose(path, notes, os.environ if environ is None else environ)
    named = child(child(root, "auth"), "keys_file")
    if isinstance(named, Scalar) and isinstance(named.value, str) and named.text.strip():
        return path.absolute().parent / named.text.strip()
    relevant = [one for one in notes.mistakes if one.path == "auth.keys_file"]
    if relevant:
        notes.mistakes[:] = relevant
        notes.raise_mistakes()
    return path.absolute().parent / KEYS_FILE


def _checked(
    root: Node, notes: Notes, folder: Path, *, host: str | None, port: int | None
) -> Config:
    keys_file = folder / KEYS_FILE
    config = rules.read(
        root,
        notes,
        folder=folder,
        default_keys_file=str(keys_file) if keys_file.exists() else None,
        host=host,
        port=port,
    )
    if config is not None:
        _check_files(config, notes)
    notes.raise_mistakes()
    if config is None:
        raise AssertionError("a config that could not be built has at least one mistake")
    return config


def _check_files(config: Config, notes: Notes) -> None:
    if tls := config.listen.tls:
        readable = [
            _is_readable(tls.cert, "listen.tls.cert", notes),
            _is_readable(tls.key, "listen.tls.key", notes),
        ]
        if all(readable):
            _check_pair(tls.cert, tls.key, notes)
    paths = [path for path, _ in notes.all_of(Backend)]
    for path, backend in zip(paths, config.backends, strict=True):
        if backend.ca and _is_readable(backend.ca, f"{path}.ca", notes):
            _check_ca(backend.ca, f"{path}.ca", notes)


def _is_readable(file: str, path: str, notes: Notes) -> bool:
    try:
        with Path(file).open("rb") as opened:
            opened.read(1)
    except OSError as error:
        notes.wrong(path, f"cannot read {file}: {error.strerror}; check the name and permissions")
        return False
    return True


def _check_pair(cert: str, key: str, notes: Notes) -> None:
    try:
        _certificates(cert)
    except (ssl.SSLError, OSError):
        notes.wrong("listen.tls.cert", f"{cert} holds no PEM certificate; write the path of one")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            notes.wrong(
                "listen.tls.key", f"{key} does not belong to the certificate; write its own key"
            )
        else:
            notes.wrong("listen.tls.key", f"{key} is not a PEM private key without a password")


def _check_ca(file: str, path: str, notes: Notes) -> None:
    try:
        _certificates(file)
    except (ssl.SSLError, OSError):
        notes.wrong(path, f"{file} holds no PEM certificate; write the path of one")


def _certificates(file: str) -> None:
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
