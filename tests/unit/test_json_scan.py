"""Bodies of any size and shape are stepped through at C speed (law 10)."""

from __future__ import annotations

import contextlib
import json
import os
import time

import pytest

from gateway.core.errors import GatewayError
from gateway.core.json_scan import members
from gateway.core.request import parse
from gateway.core.wire import Wire

SLACK = float(os.environ.get("SLOTGATE_TEST_SLACK", "1"))
MIB = 1 << 20


def fastest(body: bytes, wire: Wire = Wire.CHAT, times: int = 3) -> float:
    spent = []
    for _ in range(times):
        start = time.process_time()
        with contextlib.suppress(GatewayError):
            parse(body, wire)
        spent.append(time.process_time() - start)
    return min(spent)


def test_a_body_of_8_kib_is_parsed_in_microseconds() -> None:
    message = {"role": "user", "content": "The quick brown fox.\n" * 10}
    body = json.dumps({"model": "m", "messages": [message] * 32, "stream": True}).encode()
    assert len(body) > 7000
    assert fastest(body, times=200) < 300e-6 * SLACK


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":["' + b"iVBORw0K" * (16 * MIB // 8) + b'"]}',
        b'{"model":"m","messages":[' + b"0," * (8 * MIB) + b"0]}",
        b'{"model":"m","messages":[' + b"[]," * (5 * MIB) + b"[]]}",
        b'{"model":"m","prompt":[' + b'"",' * (5 * MIB) + b'""]}',
        b'{"model":"m",' + b'"a":0,' * (2 * MIB) + b'"a":0}',
        b"{" + b",".join(b'"%x":0' % key for key in range(1 << 20)) + b"}",
        b'{"model":"m","messages":["' + b'\\"' * (8 * MIB) + b'"]}',
        b'{"model":"m","messages":["' + b"\\ud83d" * (2 * MIB) + b'"]}',
        b'{"model":"m","messages":[' + b"NaN," * (4 * MIB) + b"NaN]}",
        b'{"model":"m","x":[' + b"0," * (4 * MIB) + b'0],"x":[' + b"0," * (4 * MIB) + b"1]}",
        b'{"model":"m","x":1' + b" " * (16 * MIB) + b',"x":2}',
    ],
    ids=["image", "zeros", "lists", "prompts", "repeated", "members", "quotes", "halves", "nan", "twice", "blank"],
)  # fmt: skip
@pytest.mark.parametrize("wire", [Wire.CHAT, Wire.COMPLETIONS])
def test_no_body_of_12_to_16_mib_holds_the_loop_for_long(body: bytes, wire: Wire) -> None:
    assert fastest(body, wire, times=2) < 0.5 * SLACK


# The one assumption about msgspec that its documentation does not state


@pytest.mark.parametrize("value", ["1", "-1.5e7", '"a\\"b"', "[1,[2],{}]", '{"a":"}"}', "null"])
@pytest.mark.parametrize("gap", ["", " ", "\n\t "])
def test_the_end_of_a_repeated_value_is_found(value: str, gap: str) -> None:
    body = f'{{"x":{value}{gap},"x":{{}}{gap},"y":0}}'.encode()
    found = members(body)
    assert [(member.name, body[member.value : member.end]) for member in found] == [
        ("x", value.encode()),
        ("x", b"{}"),
        ("y", b"0"),
    ]


def test_names_are_the_bodys_own_where_only_lenient_parsers_accept_it() -> None:
    body = b'{"NaN":NaN,"0e0":1,"\\ud83d\\ude00":[Infinity],"x":"\\ud83d"}'
    found = [(each.name, body[each.value : each.end]) for each in members(body)]
    assert found == [
        ("NaN", b"NaN"),
        ("0e0", b"1"),
        ("\U0001f600", b"[Infinity]"),
        ("x", b'"\\ud83d"'),
    ]


def test_at_every_depth_a_body_is_either_read_or_refused() -> None:
    read = 0
    for depth in (*range(800, 1100), 100_000):  # about the limit of CPython 3.11, and above any
        body = b'{"model":"m","messages":[%b%b]}' % (b"[" * depth, b"]" * depth)
        with contextlib.suppress(GatewayError):
            read += parse(body, Wire.CHAT).model == "m"
    assert read < 301
