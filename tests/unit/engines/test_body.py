"""Foreign JSON: what has not the expected shape is None, never an exception."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.engines.base import Answer
from gateway.engines.body import (
    child,
    count,
    document_of,
    least_context,
    listed_models,
    number,
    objects,
    owner,
    text,
    value_of,
)
from tests.unit.engines.talk import said


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b'{"data":', b"\xff\xfe", b'"\xff"', b"NaN", b"[" * 100_000, b'{"a":NaN}'],
)
def test_what_is_not_json_is_read_as_nothing(body: bytes) -> None:
    assert value_of(Answer(200, {}, body)) is None


@pytest.mark.parametrize(
    "answer",
    [
        None,
        Answer(500, {}, b"{}"),
        Answer(200, {}, b'{"a":1}', cut=True),
        Answer(200, {}, b'{"a":1}' + b" " * (1 << 20)),
    ],
)
def test_an_answer_that_is_missing_failed_cut_or_overlong_has_no_value(
    answer: Answer | None,
) -> None:
    assert value_of(answer) is None
    assert document_of(answer) == {}


def test_a_list_is_not_a_document_and_a_document_is_not_a_list() -> None:
    assert document_of(said([1])) == {}
    assert list(objects({"a": 1})) == []
    assert list(objects([1, {"a": 1}, None])) == [{"a": 1}]


def test_a_child_is_found_by_its_names_or_is_empty() -> None:
    assert child({"a": {"b": {"c": 1}}}, "a", "b") == {"c": 1}
    assert child({"a": [1]}, "a", "b") == {}


@pytest.mark.parametrize("value", [None, True, "3", float("nan"), float("inf"), -1, 11, [], {}])
def test_a_figure_that_cannot_be_true_is_not_said(value: Any) -> None:
    assert number(value, 10) is None
    assert count(value, most=10) is None


def test_a_plausible_figure_is_taken() -> None:
    assert number(0.5, 1) == 0.5
    assert count(4.0, least=1) == 4
    assert count(0, least=1) is None


@pytest.mark.parametrize("value", [None, "", 7, "a\nb", "x" * 513])
def test_a_name_must_be_short_and_printable(value: Any) -> None:
    assert text(value) is None


def test_models_are_listed_once_each_in_order_with_their_own_entry() -> None:
    answer = said({"data": [{"id": "b", "x": 1}, {"id": "a"}, {"id": "b"}, {"id": 3}, "c"]})

    models = listed_models(answer)

    assert models is not None
    assert [(m.id, m.document) for m in models] == [("b", {"id": "b", "x": 1}), ("a", {"id": "a"})]


def test_a_list_of_a_whole_hub_is_bounded() -> None:
    models = listed_models(said({"data": [{"id": str(i)} for i in range(5000)]}))

    assert models is not None
    assert len(models) == 2000


@pytest.mark.parametrize("value", [{}, {"data": {}}, {"data": "x"}, [], {"models": []}])
def test_what_is_not_a_list_of_models_is_none_and_not_an_empty_list(value: Any) -> None:
    assert listed_models(said(value)) is None


def test_null_for_a_list_means_that_there_are_no_models() -> None:
    assert listed_models(said({"data": None})) == ()
    assert owner(said({"data": None})) is None


def test_the_least_context_of_all_models_counts_in_either_way_of_saying_it() -> None:
    models = listed_models(
        said(
            {
                "data": [
                    {"id": "a", "max_model_len": 4096},
                    {"id": "b", "meta": {"n_ctx": 2048}},
                    {"id": "c", "max_model_len": -1},
                ]
            }
        )
    )

    assert least_context(models) == 2048
    assert least_context(None) is None
