"""Names of models: which there are, who may use them, and which backends serve each."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gateway.core.catalog import Catalog, Listing
from gateway.core.config import ModelAlias
from gateway.core.errors import GatewayError


def catalog(
    served: Mapping[str, str],
    aliases: Mapping[str, ModelAlias] | None = None,
    *,
    default: str | None = None,
    ollama: str = "",
) -> Catalog:
    """`served`: the models of each backend, with spaces between; `ollama`: the backends of that kind."""
    listings = {
        name: Listing(
            name, {model: {"id": model} for model in models.split()}, latest=name in ollama
        )
        for name, models in served.items()
    }
    return Catalog.build(listings, aliases or {}, default)


def find(
    found: Catalog, model: str | None, allowed: set[str] | None = None, up: str = "abcd"
) -> tuple[str, str]:
    """The pool's name, and its backends as one word."""
    names = None if allowed is None else frozenset(allowed)
    pool = found.resolve(model, names, lambda pool: bool(pool & set(up)))
    return pool.name, "".join(sorted(pool.backends))


def refusal(found: Catalog, model: str | None, allowed: set[str] | None = None) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        find(found, model, allowed)
    return caught.value


def test_a_model_is_served_by_all_backends_that_list_it() -> None:
    found = catalog({"a": "x y", "b": "y z"})
    assert find(found, "x") == ("x", "a")
    assert find(found, "y") == ("y", "ab")
    assert found.names(None) == ["x", "y", "z"]


def test_an_alias_is_all_backends_of_its_ids_and_each_is_told_its_own() -> None:
    found = catalog(
        {"a": "qwen", "b": "qwen:30b", "c": "other"}, {"coder": ModelAlias(("qwen", "qwen:30b"))}
    )
    pool = found.resolve("coder", None, lambda _: True)
    assert pool.is_alias
    assert dict(pool.ids) == {"a": "qwen", "b": "qwen:30b"}
    assert find(found, "qwen") == ("qwen", "a"), "the id itself stays a name"


def test_a_backend_that_has_several_ids_of_an_alias_is_told_the_first() -> None:
    found = catalog({"a": "big small"}, {"any": ModelAlias(("small", "big"))})
    assert found.resolve("any", None, lambda _: True).ids["a"] == "small"


def test_an_alias_hides_an_id_of_its_name() -> None:
    found = catalog({"a": "x", "b": "y"}, {"x": ModelAlias(("y",))})
    assert find(found, "x") == ("x", "b")


def test_the_fallback_serves_only_while_no_backend_of_the_ids_is_up() -> None:
    aliases = {"big": ModelAlias(("x",), fallback="small"), "small": ModelAlias(("y",))}
    found = catalog({"a": "x", "b": "y"}, aliases)
    assert find(found, "big", up="ab") == ("big", "a")
    assert find(found, "big", up="b") == ("small", "b")
    assert find(found, "big", up="") == ("small", "b")


def test_fallbacks_that_point_at_each_other_end() -> None:
    aliases = {"one": ModelAlias(("x",), fallback="two"), "two": ModelAlias(("y",), fallback="one")}
    found = catalog({"a": "x", "b": "y"}, aliases)
    assert find(found, "one", up="")[0] in {"one", "two"}


def test_a_fallback_that_nobody_serves_leaves_the_model_as_it_is() -> None:
    found = catalog({"a": "x"}, {"big": ModelAlias(("x",), fallback="nowhere")})
    assert find(found, "big", up="") == ("big", "a")


def test_an_alias_of_which_no_backend_is_known_falls_back_too() -> None:
    found = catalog({"b": "y"}, {"big": ModelAlias(("x",), fallback="y")})
    assert find(found, "big") == ("y", "b")


def test_no_model_means_the_only_one_or_the_default() -> None:
    assert find(catalog({"a": "x", "b": "x"}), None) == ("x", "ab")
    assert find(catalog({"a": "x", "b": "y"}, default="y"), None) == ("y", "b")
    assert find(catalog({"a": "x y"}, {"z": ModelAlias(("x",))}), None) == ("z", "a")
    error = refusal(catalog({"a": "x y"}), None)
    assert (error.key, error.param) == ("model_not_found", "model")
    assert "x, y" in error.message


def test_an_unknown_model_is_a_404_that_names_the_nearest_one() -> None:
    error = refusal(catalog({"a": "qwen3-coder llama"}), "qwen3-codr")
    assert (error.key, error.param) == ("model_not_found", "model")
    assert "'qwen3-coder'" in error.message


def test_the_nearest_name_is_one_that_the_key_may_use() -> None:
    error = refusal(catalog({"a": "qwen3-coder llama"}), "qwen3-codr", {"llama"})
    assert "qwen3-coder" not in error.message
    assert "'llama'" in error.message


def test_a_model_that_the_key_may_not_use_is_a_403() -> None:
    found = catalog({"a": "x y"}, {"z": ModelAlias(("x",))})
    assert refusal(found, "x", {"y"}).key == "model_not_allowed"
    assert find(found, "z", {"z"}) == ("z", "a"), "an alias is a name of its own"
    assert refusal(found, "x", {"z"}).key == "model_not_allowed"
    assert found.names(frozenset({"y", "nothing"})) == ["y"]


def test_a_name_of_a_mebibyte_is_not_repeated_whole() -> None:
    error = refusal(catalog({"a": "x"}), "m" * (1 << 20))
    assert len(error.message) < 400


def test_while_no_backend_has_told_its_models_it_is_a_503() -> None:
    error = refusal(catalog({"a": "", "b": ""}), "x")
    assert (error.key, error.retry_after_s) == ("no_backend", 5.0)
    assert refusal(catalog({}), None).key == "no_backend"


@pytest.mark.parametrize("asked", ["x", "x:latest"])
def test_with_ollama_a_name_is_its_latest(asked: str) -> None:
    found = catalog({"a": "x:latest"}, ollama="a")
    assert find(found, asked) == ("x:latest", "a")
    assert found.resolve(asked, None, lambda _: True).ids["a"] == "x:latest"


def test_other_engines_do_not_have_a_latest() -> None:
    assert refusal(catalog({"a": "x:latest"}), "x").key == "model_not_found"


def test_ollamas_latest_joins_the_pool_of_the_bare_name() -> None:
    found = catalog({"a": "x", "b": "x:latest"}, ollama="b")
    pool = found.resolve("x", None, lambda _: True)
    assert dict(pool.ids) == {"a": "x", "b": "x:latest"}


def test_a_key_that_may_use_the_latest_may_ask_for_the_bare_name() -> None:
    found = catalog({"a": "x:latest y"}, ollama="a")
    assert find(found, "x", {"x:latest"}) == ("x:latest", "a")


def test_only_the_part_of_a_pool_that_has_a_path_is_asked_unless_none_is_known_to() -> None:
    def listing(name: str, paths: set[str] | None) -> Listing:
        return Listing(name, {"x": {}}, None if paths is None else frozenset(paths))

    listings = {
        "a": listing("a", {"/v1/messages"}),
        "b": listing("b", {"/v1/embeddings"}),
        "c": listing("c", None),
    }
    found = Catalog.build(listings, {}, None)
    pool = found.pools["x"]
    assert pool.having("/v1/messages", listings).backends == {"a", "c"}
    only = {name: listings[name] for name in "ab"}
    pool = Catalog.build(only, {}, None).pools["x"]
    assert pool.having("/v1/rerank", only).backends == {"a", "b"}


def test_a_catalog_does_not_change_under_a_request() -> None:
    found = catalog({"a": "x"})
    with pytest.raises(AttributeError):
        found.default = "y"  # type: ignore[misc]
