"""What a backend has said that it does not serve."""

from __future__ import annotations

import pytest

from gateway.core.lacking import AGAIN_AFTER_S, Lacking
from tests.unit.recorded import body_of

PATH = "/v1/rerank"


def heard(status: int, body: bytes) -> frozenset[str]:
    lacking = Lacking()
    lacking.hear(0.0, "b1", PATH, status, body)
    return lacking.backends(1.0, PATH)


@pytest.mark.parametrize(
    ("status", "sample"),
    [
        (404, "llama-server/notfound.http"),
        (404, "vllm/err_embeddings.http"),
        (501, "llama-server/embeddings_unsupported.http"),
        (501, "llama-server/rerank_unsupported.http"),
    ],
)
def test_an_engines_words_for_an_unknown_path_are_understood(status: int, sample: str) -> None:
    assert heard(status, body_of(sample)) == {"b1"}


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, body_of("vllm/err_model.http")),
        (404, b'{"error":"model \'nope\' not found"}'),
        (404, b""),
        (400, b'{"detail":"Not Found"}'),
        (500, b"File Not Found"),
        (200, b"404 page not found"),
    ],
)
def test_anything_else_says_nothing_of_the_path(status: int, body: bytes) -> None:
    assert heard(status, body) == frozenset()


def test_it_is_about_that_path_alone_and_tried_again_after_a_while() -> None:
    lacking = Lacking()
    lacking.hear(0.0, "b1", PATH, 501, b"")
    lacking.hear(5.0, "b2", PATH, 404, b'{"detail": "Not Found"}')
    assert lacking.backends(6.0, PATH) == {"b1", "b2"}
    assert lacking.backends(6.0, "/v1/score") == frozenset()
    assert lacking.backends(AGAIN_AFTER_S + 1, PATH) == {"b2"}
    assert lacking.backends(AGAIN_AFTER_S + 6, PATH) == frozenset()
