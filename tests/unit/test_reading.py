"""How a request names its model: in JSON, in a form, in the query of a GET; and how another name is put there."""

from __future__ import annotations

import json

import pytest

from gateway.core.errors import GatewayError
from gateway.core.reading import query_with_model, read_request, with_model
from gateway.core.routes import ROUTES

FORM = "multipart/form-data; boundary=xx"
SOUND = (
    b'--xx\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF id_slot\x00\r\n'
    b'--xx\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--xx--\r\n'
)
HEARING = ROUTES["/v1/audio/transcriptions"]
SHOW = ROUTES["/api/show"]
PROPS = ROUTES["/props"]


def test_a_form_names_its_model_in_a_field() -> None:
    request = read_request(HEARING, SOUND, FORM, b"")
    assert (request.model, request.model_present, request.permits) == ("whisper", True, 1)


def test_a_form_without_a_model_goes_to_the_default() -> None:
    body = b'--xx\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--xx--\r\n'
    assert not read_request(HEARING, body, FORM, b"").model_present


def test_the_other_name_stands_where_the_first_stood_and_the_file_stays() -> None:
    out = with_model(HEARING, SOUND, FORM, "whisper-large")
    assert out == SOUND.replace(b"\r\nwhisper\r\n", b"\r\nwhisper-large\r\n")


def test_a_path_with_forms_takes_json_too() -> None:
    body = json.dumps({"model": "m", "prompt": "x"}).encode()
    request = read_request(ROUTES["/v1/images/generations"], body, "application/json", b"")
    assert request.model == "m"


def test_a_form_is_none_of_a_chats() -> None:
    with pytest.raises(GatewayError):
        read_request(ROUTES["/v1/chat/completions"], SOUND, FORM, b"")


@pytest.mark.parametrize("field", ["model", "name"])
def test_show_knows_its_older_field(field: str) -> None:
    body = json.dumps({field: "a"}).encode()
    assert read_request(SHOW, body, "", b"").model == "a"
    assert with_model(SHOW, body, "", "b") == body.replace(b'"a"', b'"b"')


def test_a_get_names_its_model_in_the_query() -> None:
    query = b"model=org%2Fm&autoload=false"
    assert read_request(PROPS, b"", "", query).model == "org/m"
    assert not read_request(PROPS, b"", "", b"").model_present
    assert query_with_model(query, "a b") == b"model=a%20b&autoload=false"
