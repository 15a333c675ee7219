"""A child that never becomes ready, or (`--url`) does and then (`--stubborn`) does not mind SIGTERM."""

from __future__ import annotations

import signal
import sys
import time

from gateway.cli.child_server import die_with_parent, say

if __name__ == "__main__":
    die_with_parent()
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "--url" in sys.argv:
        say(url="http://stubborn")
    time.sleep(600)
