"""The model of a multipart form."""

from __future__ import annotations

import pytest

from gateway.core.multipart import is_multipart, multipart_model, replace_multipart_model

TYPE = "multipart/form-data; boundary=xYz"


def form(*parts: bytes, boundary: bytes = b"xYz") -> bytes:
    return (
        b"".join(b"--%b\r\n%b\r\n" % (boundary, part) for part in parts) + b"--%b--\r\n" % boundary
    )


def field(name: bytes, value: bytes) -> bytes:
    return b'Content-Disposition: form-data; name="%b"\r\n\r\n%b' % (name, value)


AUDIO = (
    b'Content-Disposition: form-data; name="file"; filename="model"\r\n'
    b"Content-Type: audio/wav\r\n\r\n"
    b'RIFF\r\n\r\n--xY\r\nname="model"\r\n\r\nno\x00\xff'
)


@pytest.mark.parametrize(
    "body",
    [
        form(field(b"model", b"whisper-1")),
        form(AUDIO, field(b"model", b"whisper-1"), field(b"language", b"en")),
        form(field(b"language", b"model"), field(b"model", b" whisper-1\r\n")),
        b"preamble\r\n" + form(field(b"model", b"whisper-1")),
        form(b"content-disposition:form-data;name=model\r\nX: y\r\n\r\nwhisper-1"),
        form(b'Content-Type: text/plain\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-1'),
        form(field(b"model", b"whisper-1"), field(b"model", b"other")),
    ],
)  # fmt: skip
def test_the_model_field_is_found_wherever_it_stands(body: bytes) -> None:
    assert multipart_model(body, TYPE) == "whisper-1"
    assert multipart_model(replace_multipart_model(body, TYPE, "large-v3"), TYPE) == "large-v3"


@pytest.mark.parametrize(
    "content_type",
    [
        'multipart/form-data; boundary="xYz"',
        "Multipart/Form-Data;charset=utf-8; BOUNDARY=xYz",
        "multipart/form-data; boundary=xYz; charset=utf-8",
    ],
)
def test_the_boundary_is_read_in_every_spelling(content_type: str) -> None:
    assert is_multipart(content_type)
    assert multipart_model(form(field(b"model", b"m")), content_type) == "m"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"", TYPE),
        (b"--xYz", TYPE),
        (b"--xYz--\r\n", TYPE),
        (form(field(b"language", b"en")), TYPE),
        (form(AUDIO), TYPE),
        (form(field(b"model", b"")), TYPE),
        (form(field(b"model", b"\xff")), TYPE),
        (form(field(b"model", b"m" * 5000)), TYPE),
        (form(field(b"models", b"m")), TYPE),
        (form(field(b"model", b"m"))[:-9], TYPE),
        (form(field(b"model", b"m")), "multipart/form-data"),
        (form(field(b"model", b"m")), "multipart/form-data; boundary=other"),
        (form(field(b"model", b"m")), "multipart/form-data; boundary=xYzz"),
        (form(*([field(b"x", b"y")] * 100), field(b"model", b"m")), TYPE),
    ],
)
def test_a_form_without_a_usable_model_has_none(body: bytes, content_type: str) -> None:
    assert multipart_model(body, content_type) is None


def test_a_form_without_the_field_is_left_alone() -> None:
    body = form(AUDIO)
    assert replace_multipart_model(body, TYPE, "m") is body


def test_replacing_changes_the_value_and_no_other_byte() -> None:
    body = form(AUDIO, field(b"model", b"a"), field(b"language", b"en"))
    expected = form(AUDIO, field(b"model", "\u00e9".encode()), field(b"language", b"en"))
    assert replace_multipart_model(body, TYPE, "\u00e9") == expected
