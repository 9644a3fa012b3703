"""How long ranks wait for a rank that does not answer, in all engines."""

from __future__ import annotations

import math
import os
import time

from accordion_hvd import check

VARIABLE = "ACCORDION_HVD_TIMEOUT"
"""Environment variable with the seconds after which a rank that does not answer counts as lost."""

DEFAULT = 900.0
"""Seconds; longer than an evaluation on one rank should last."""

_GLOO = 30.0  # seconds that Horovod's own threads wait for those of other ranks over Gloo


def seconds() -> float:
    """Return the timeout of this process in seconds.

    Raises:
        ValueError: if ACCORDION_HVD_TIMEOUT is not a number of at least 1.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return DEFAULT
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value < 1e6:
        check.refuse("environment", VARIABLE, text, "a number of seconds from 1 to 1e6")
    return value


def interval() -> float:
    """Return the seconds between messages of a rank that waits: a minute, or less to be in time."""
    return min(60.0, seconds() / 5)


class Wait:
    """The seconds of a wait, without those in which this process did not run.

    Schedulers stop jobs for hours (`scontrol suspend`, `docker pause`). A stopped process sees a
    long time between two calls of `seconds`, of which `longest` seconds count.
    """

    def __init__(self, longest: float = 1.0) -> None:
        self._last, self._seconds, self._longest = time.monotonic(), 0.0, longest

    def seconds(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._last, self._longest)
        self._last = now
        return self._seconds


def limit_horovod() -> None:
    """Shorten Horovod's limit for its own threads over Gloo if the timeout is shorter.

    Call this function before Horovod starts. A setting of the job has precedence.
    """
    if seconds() < _GLOO:
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(math.ceil(seconds())))
