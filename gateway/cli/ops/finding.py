"""One thing that the doctor found.

Law of this file: a finding says what was seen in numbers, what it means, the very setting to change, and how to see that
it worked. A finding that is `wrong` makes the exit status 1; another is only worth knowing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`code`: its name, the same for ever. `about`: a backend's name, or `host`."""

    code: str
    about: str
    seen: str
    means: str
    change: str
    then: str
    wrong: bool = True
