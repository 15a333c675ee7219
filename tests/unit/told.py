"""What a gateway that is built, and not started, tells: for tests that hold pages and files against it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from gateway.app import Gateway
from gateway.runtime.configfile import from_backends
from gateway.runtime.families import Family

T = TypeVar("T")


def gateway_of(read: Callable[[Gateway], T]) -> T:
    """What `read` says of it."""

    async def main() -> T:
        gateway = Gateway(from_backends(("http://127.0.0.1:9",), host=None, port=0))
        try:
            return read(gateway)
        finally:
            gateway.log.close()

    return asyncio.run(main())


def families() -> list[Family]:
    """Every metric."""
    return list(gateway_of(lambda gateway: gateway.exposition.families()))
