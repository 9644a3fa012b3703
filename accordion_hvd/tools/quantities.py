"""Rates and times as users write them: "200mbit", "20ms"."""

from __future__ import annotations

import re

RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_rate(word: str) -> float | None:
    """Return the bits per second of "50mbit", "1gbit" etc.; None for "none", an unlimited link.

    Raises:
        ValueError: if `word` is not a rate.
    """
    if word == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", word.lower())
    if match is None or not float(match[1]):
        raise ValueError(f"rate {word!r} is invalid; write '200mbit', '1gbit' or 'none'.")
    return float(match[1]) * RATES[match[2]]


def parse_time(word: str) -> float:
    """Return the seconds of "20ms" etc.; 0 for "none" and "0".

    Raises:
        ValueError: if `word` is not a time.
    """
    if word in ("none", "0"):
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", word.lower())
    if match is None:
        raise ValueError(f"time {word!r} is invalid; write '20ms', '1.5s' or 'none'.")
    return float(match[1]) * TIMES[match[2]]
