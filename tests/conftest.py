"""What holds for every test: the hypothesis profiles, and skips that say why.

`HYPOTHESIS_PROFILE=fuzz` searches at random; the default is the same examples every time.
"""

from __future__ import annotations

import gc
import os
from collections import Counter

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=100, stateful_step_count=30, database=None
)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_finish() -> None:
    """Thousands of tests are a large heap, and to look through it takes 0.1 s of whatever loop is running just then.

    A gateway that serves freezes its own heap likewise.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line per reason for skipping, so that a run which tested little is seen to have tested little."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
