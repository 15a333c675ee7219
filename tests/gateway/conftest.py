"""What tests of the whole gateway import: see tests/fakes/gateway.py for what it does.

`from tests.gateway.conftest import running_gateway, in_loop, run, slack` works too.
"""

from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import eventually, in_loop, run, slack

__all__ = ["Running", "eventually", "in_loop", "run", "running_gateway", "slack"]
