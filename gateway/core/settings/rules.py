"""Rules between settings, and the reading of a whole config.

Law of this file: `read` returns a Config only if nothing at all was noted against the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import PurePath

from gateway.core.config import Backend, Config, Listen, ModelAlias, Tls, is_loopback
from gateway.core.settings import checks, table
from gateway.core.settings.kinds import Wrong, read_at
from gateway.core.settings.nodes import Node, Notes
from gateway.core.settings.sections import homes, join


def notes_for(file: str) -> Notes:
    """A fresh list of mistakes for one reading of a config."""
    return Notes(file, homes(table.ROOT))


def read(
    node: Node,
    notes: Notes,
    *,
    folder: PurePath,
    default_keys_file: str | None,
    host: str | None = None,
    port: int | None = None,
) -> Config | None:
    """Read a composed config; None when it is not even a mapping. What is wrong is in `notes`.

    `folder` is what relative paths are relative to; `default_keys_file` is used when none is set;
    `host` and `port` replace those of the file, as the command line does.
    """
    config = read_at(table.ROOT, node, "", notes)
    if not isinstance(config, Config):
        return None
    config = _located(config, folder, default_keys_file)
    config = replace(config, listen=_listen(config.listen, host, port, notes))
    _backends(config, notes)
    _models(config, notes)
    _exposure(config, notes)
    return config


def doubts(config: Config) -> tuple[str, ...]:
    """What is allowed but looks like a slip: `path: words`, for `slotgate check` to warn of."""
    found: list[str] = []
    for name, alias in config.models.items():
        if _all_listed(config) and not any(_is_listed(one, config) for one in alias.ids):
            found.append(f"models.{name}.ids: no backend lists any of these ids in its `models`")
    found += [
        f"backends {one.name}: `ca` has no effect, because the URL is not https"
        for one in config.backends
        if one.ca and not one.url.lower().startswith("https:")
    ]
    if all(backend.drain for backend in config.backends):
        found.append("backends: every backend has drain: true, so nothing will be served")
    return tuple(found)


def unconfirmed(config: Config) -> tuple[str, ...]:
    """The names that only an engine can confirm: `path: words`, for a check that does not ask them."""
    return tuple(
        f"{path}: `{name}` is no alias; it works only if a backend serves a model of this id"
        for path, name in references(config)
        if name not in config.models and not _is_listed(name, config)
    )


def references(config: Config) -> Iterable[tuple[str, str]]:
    """Each place where a setting names a model or an alias."""
    if config.default_model is not None:
        yield "default_model", config.default_model
    for name, alias in config.models.items():
        if alias.fallback is not None:
            yield join(f"models.{name}", "fallback"), alias.fallback


def _located(config: Config, folder: PurePath, default_keys_file: str | None) -> Config:
    """The same config with absolute paths, each relative one starting at the config's folder."""

    def at(name: str) -> str:
        return str(folder / name)

    tls = config.listen.tls
    keys_file = config.auth.keys_file
    return replace(
        config,
        listen=replace(config.listen, tls=Tls(at(tls.cert), at(tls.key)) if tls else None),
        auth=replace(config.auth, keys_file=at(keys_file) if keys_file else default_keys_file),
        backends=tuple(replace(one, ca=at(one.ca) if one.ca else None) for one in config.backends),
    )


def _listen(listen: Listen, host: str | None, port: int | None, notes: Notes) -> Listen:
    if host is not None:
        try:
            listen = replace(listen, host=checks.host(host))
        except Wrong as wrong:
            notes.wrong("listen.host", f"`{host}` {wrong}", 0)
    return listen if port is None else replace(listen, port=port)


def _backends(config: Config, notes: Notes) -> None:
    if not config.backends and not notes.any_below("backends"):
        example = "backends: [{url: http://127.0.0.1:8080}]"
        notes.wrong("backends", f"is missing; write at least one, for example {example}")
    names: dict[str, str] = {}
    engines: dict[tuple[str, str, str], str] = {}
    for path, backend in notes.all_of(Backend):
        first = names.setdefault(backend.name, path)
        if first != path:
            notes.wrong(
                f"{path}.name", f"`{backend.name}` is also the name of {first}; give each its own"
            )
        same = engines.setdefault(checks.one_engine(backend.url), path)
        if same != path:
            notes.wrong(
                f"{path}.url",
                f"is the same engine as {same}, whose slots would count twice; keep one",
            )


def _models(config: Config, notes: Notes) -> None:
    all_known = _all_listed(config) and not notes.any_below("backends", "models")
    for path, name in references(config) if all_known else ():
        if name not in config.models and not _is_listed(name, config):
            known = [
                *config.models,
                *(one for each in config.backends for one in each.models or ()),
            ]
            near = get_close_matches(name, known, n=1)
            advice = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known)}"
            notes.wrong(path, f"`{name}` is neither an alias nor a listed model; {advice}")
    told: set[str] = set()
    for name in config.models:
        cycle = _cycle(name, config.models)
        if cycle and not told.intersection(cycle):
            told.update(cycle)
            way = " -> ".join([*cycle, cycle[0]])
            notes.wrong(f"models.{name}.fallback", f"goes in a circle ({way}); remove one fallback")


def _cycle(start: str, models: Mapping[str, ModelAlias]) -> list[str]:
    """The fallbacks from `start` if they lead back to it, else nothing."""
    way = [start]
    while (after := models[way[-1]].fallback) is not None and after in models:
        if after == start:
            return way
        if after in way:
            return []  # the circle does not hold `start`: told where it begins
        way.append(after)
    return []


def _exposure(config: Config, notes: Notes) -> None:
    """A gateway without keys is for its own machine alone, and not for the web pages shown on it."""
    for_all = "*" in config.cors.origins
    if for_all and not config.needs_key:
        notes.wrong(
            "cors.origins",
            "`*` needs keys; name the origins, or make a key with `slotgate keys new`",
        )
    if is_loopback(config.listen.host):
        return
    host = config.listen.host
    if config.auth.anonymous:
        notes.wrong(
            "auth.anonymous",
            f"true is only accepted on a loopback address, and listen.host is {host}; "
            "write false, or listen.host: 127.0.0.1",
        )
    elif config.auth.keys_file is None and not notes.any_below("auth"):
        notes.wrong(
            "auth.keys_file",
            f"is needed because listen.host {host} is not a loopback address; write keys_file: keys.yaml "
            "and make a key with `slotgate keys new NAME`",
        )


def _is_listed(model: str, config: Config) -> bool:
    """Whether a backend lists the model; Ollama knows `x:latest` as `x` too."""
    listed = {name for backend in config.backends for name in backend.models or ()}
    return model in listed or f"{model}:latest" in listed


def _all_listed(config: Config) -> bool:
    """Whether the file alone knows every model: no backend is left to say its own."""
    return all(backend.models is not None for backend in config.backends)
