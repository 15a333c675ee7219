"""Which model names there are, and which backends serve each: frozen, rebuilt when a backend's list changes.

A pool is all backends that serve one name. A name is an alias of the configuration, or an id that an engine listed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from gateway.core.config import ModelAlias
from gateway.core.errors import GatewayError

OTHER, NONE = "other", "none"  # metric labels for a model that is not known, and for none given


@dataclass(frozen=True, slots=True)
class Listing:
    """What one backend serves: id to the engine's own document about it."""

    backend: str
    models: Mapping[str, Mapping[str, Any]]
    paths: frozenset[str] | None = None  # API paths it is known to have; None: not known
    latest: bool = False  # Ollama: `x` is `x:latest`


@dataclass(frozen=True, slots=True)
class Pool:
    """The backends of one name, with the id that each knows it by."""

    name: str
    ids: Mapping[str, str]  # backend: the model id it expects
    backends: frozenset[str]
    fallback: str | None = None
    is_alias: bool = False  # then the engine must be told its own id

    def having(
        self,
        path: str,
        listings: Mapping[str, Listing],
        lacking: frozenset[str] = frozenset(),
        *,
        strict: bool = False,
    ) -> Pool:
        """The part of the pool that has this API path; all of it when none is known to, unless `strict`.

        `lacking`: backends that have said that they do not have it.
        """
        able = []
        for name in self.backends:
            paths = listings[name].paths
            if (paths is None or path in paths) and name not in lacking:
                able.append(name)
        if len(able) == len(self.backends) or not (able or strict):
            return self
        return self.among(able)

    def among(self, names: Collection[str]) -> Pool:
        """The part of the pool that is among these backends."""
        ids = {name: own for name, own in self.ids.items() if name in names}
        return replace(self, ids=ids, backends=frozenset(ids))


@dataclass(frozen=True, slots=True)
class Catalog:
    """All names. Built by `build`; never changed."""

    pools: Mapping[str, Pool] = field(default_factory=dict)
    listings: Mapping[str, Listing] = field(default_factory=dict)
    default: str | None = None
    path: str | None = None  # only of the backends that are known to serve this path

    @classmethod
    def build(
        cls, listings: Mapping[str, Listing], aliases: Mapping[str, ModelAlias], default: str | None
    ) -> Catalog:
        """One pool for each id, and one for each alias; an alias hides an id of the same name."""
        pools: dict[str, Pool] = {}
        for name in sorted({i for listing in listings.values() for i in listing.models}):
            pools[name] = _pool(name, (name,), listings)
        ids = list(pools)
        for name, alias in aliases.items():
            pool = _pool(name, alias.ids, listings)
            pools[name] = replace(pool, fallback=alias.fallback, is_alias=True)
        if default is None:
            default = _only(list(aliases) or _own_ids(ids, listings))
        return cls(pools, dict(listings), default)

    def serving(self, path: str) -> Catalog:
        """The part that can be asked for one engine's own path: of the backends that are known to serve it.

        Without a default there, the only model of that part is meant.
        """
        able = {
            name: listing
            for name, listing in self.listings.items()
            if listing.paths is not None and path in listing.paths
        }
        pools = {
            pool.name: part for pool in self.pools.values() if (part := pool.among(able)).backends
        }
        default = self.default if self.default in pools else None
        if default is None:
            default = _only([name for name, pool in pools.items() if pool.is_alias])
        if default is None:
            default = _only(_own_ids(pools, able))
        unsure = any(listing.paths is None for listing in self.listings.values())
        listings = able if able or not unsure else self.listings
        return Catalog(pools, listings, default, path)

    def resolve(
        self,
        model: str | None,
        allowed: frozenset[str] | None,
        is_up: Callable[[frozenset[str]], bool],
    ) -> Pool:
        """The pool of this name, or of its fallback when none of its backends is up.

        `allowed`: the names that the key may use, None for all.
        Raises GatewayError: model_not_found, model_not_allowed, or no_backend while nothing is known yet.
        """
        name = model if model is not None else self.default
        pool = self._find(name)
        if pool is None:
            raise self._not_found(name, allowed)
        if allowed is not None and name not in allowed and pool.name not in allowed:
            raise GatewayError(
                "model_not_allowed", f"This key may not use the model {name!r}.", "model"
            )
        seen = {pool.name} if pool.fallback else ()
        while pool.fallback and pool.fallback not in seen and not is_up(pool.backends):
            follow = self._find(pool.fallback)
            if follow is None:
                break
            seen = {*seen, follow.name}
            pool = follow
        return pool

    def label(self, model: str | None) -> str:
        """What a request for this model is counted under: a name that is known here, or `other`."""
        pool = self._find(model)
        return OTHER if pool is None else pool.name

    def names(self, allowed: frozenset[str] | None) -> list[str]:
        """The names a key may use, in a stable order."""
        return [name for name in self.pools if allowed is None or name in allowed]

    def listed(self, allowed: frozenset[str] | None) -> list[str]:
        """The names to show to a key: without the second names that an engine has for one model."""
        if allowed is not None:
            return self.names(allowed)
        own = set(_own_ids(self.pools, self.listings))
        return [name for name, pool in self.pools.items() if pool.is_alias or name in own]

    def told(self, name: str) -> Mapping[str, Any] | None:
        """What an engine says of the model of this name; always the same engine while nothing changes."""
        pool = self.pools[name]
        for backend in sorted(pool.backends):
            own = self.listings[backend].models.get(pool.ids[backend])
            if own:
                return own
        return None

    def _find(self, name: str | None) -> Pool | None:
        if name is None:
            return None
        pool = self.pools.get(name)
        if pool is None and not name.endswith(":latest"):
            latest = self.pools.get(name + ":latest")
            if latest is not None and any(self.listings[b].latest for b in latest.backends):
                return latest
        return pool

    @property
    def is_empty(self) -> bool:
        """No backend has told its models yet."""
        return not any(listing.models for listing in self.listings.values())

    def _not_found(self, name: str | None, allowed: frozenset[str] | None) -> GatewayError:
        if self.path is not None and not self.listings:
            return GatewayError("not_found", f"No backend here serves {self.path}.")
        if self.is_empty:
            return nothing_known()
        names = self.names(allowed)
        if name is None:
            return GatewayError(
                "model_not_found",
                f"The request names no model. There are: {', '.join(names[:10])}.",
                "model",
            )
        shown = name if len(name) <= 100 else name[:100] + "..."
        near = get_close_matches(shown, names, n=1, cutoff=0.0)
        hint = f" The nearest known model is {near[0]!r}." if near else ""
        where = f" on a backend that serves {self.path}" if self.path else ""
        return GatewayError(
            "model_not_found", f"The model {shown!r} does not exist{where}.{hint}", "model"
        )


def nothing_known() -> GatewayError:
    """The refusal while no backend has said what it has."""
    return GatewayError(
        "no_backend",
        "Server overloaded: no backend has told its models yet. Please try again in 5s.",
        retry_after_s=5.0,
    )


def _pool(name: str, ids: tuple[str, ...], listings: Mapping[str, Listing]) -> Pool:
    served: dict[str, str] = {}
    for listing in listings.values():
        found = next((own for one in ids if (own := _served(listing, one)) is not None), None)
        if found is not None:
            served[listing.backend] = found
    return Pool(name, served, frozenset(served))


def _served(listing: Listing, model: str) -> str | None:
    if model in listing.models:
        return model
    if listing.latest:
        bare = model.removesuffix(":latest")
        other = bare if bare != model else model + ":latest"
        if other in listing.models:
            return other
    return None


def _own_ids(names: Iterable[str], listings: Mapping[str, Listing]) -> list[str]:
    """Those that are an engine's own id of a model, not a second name for it."""
    own = {
        document.get("id", name)
        for listing in listings.values()
        for name, document in listing.models.items()
    }
    return [name for name in names if name in own]


def _only(names: list[str]) -> str | None:
    return names[0] if len(names) == 1 else None
