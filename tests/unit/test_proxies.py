"""X-Forwarded-For is believed from trusted proxies, and only as far as they reach."""

from __future__ import annotations

import pytest

from gateway.runtime.proxies import TrustedProxies

PROXIES = ("10.0.0.0/8", "fd00::/8", "127.0.0.1/32")


@pytest.mark.parametrize(
    ("peer", "told", "client"),
    [
        pytest.param("10.0.0.1", ["8.8.8.8"], "8.8.8.8", id="one proxy"),
        pytest.param("10.0.0.1", ["8.8.8.8, 10.0.0.2"], "8.8.8.8", id="two proxies"),
        pytest.param("10.0.0.1", ["6.6.6.6, 8.8.8.8, 10.0.0.2"], "8.8.8.8", id="one invented"),
        pytest.param("10.0.0.1", ["6.6.6.6", "8.8.8.8"], "8.8.8.8", id="two headers"),
        pytest.param("10.0.0.1", ["10.0.0.9"], "10.0.0.9", id="a client among the proxies"),
        pytest.param("8.8.8.8", ["1.2.3.4"], "8.8.8.8", id="not trusted"),
        pytest.param("10.0.0.1", [], "10.0.0.1", id="a proxy that says nothing"),
        pytest.param("10.0.0.1", ["unknown"], "10.0.0.1", id="no address"),
        pytest.param("10.0.0.1", ["8.8.8.8, x\ny, 10.0.0.2"], "10.0.0.2", id="garbage between"),
        pytest.param("10.0.0.1", ["8.8.8.8:4711"], "8.8.8.8", id="with a port"),
        pytest.param("10.0.0.1", ["[2001:db8::1]:4711"], "2001:db8::1", id="IPv6 with a port"),
        pytest.param("10.0.0.1", ["2001:DB8:0::1"], "2001:db8::1", id="IPv6, not as usual"),
        pytest.param("fd00::1", ["8.8.8.8"], "8.8.8.8", id="a proxy with IPv6"),
        pytest.param("::ffff:10.0.0.1", ["8.8.8.8"], "8.8.8.8", id="IPv4 in IPv6"),
        pytest.param("", ["8.8.8.8"], "", id="no address at all"),
    ],
)
def test_the_client_is_the_last_address_that_no_proxy_stands_for(
    peer: str, told: list[str], client: str
) -> None:
    headers = [(b"host", b"h"), *((b"x-forwarded-for", one.encode()) for one in told)]
    assert TrustedProxies(PROXIES).client(peer, headers) == client


def test_without_trusted_proxies_nobody_is_believed() -> None:
    assert TrustedProxies().client("10.0.0.1", [(b"x-forwarded-for", b"8.8.8.8")]) == "10.0.0.1"


def test_a_chain_without_end_costs_no_more_than_a_short_one() -> None:
    chain = b",".join([b"8.8.8.8", *[b"10.0.0.1"] * 10_000])
    assert TrustedProxies(PROXIES).client("10.0.0.1", [(b"x-forwarded-for", chain)]) == "10.0.0.1"
