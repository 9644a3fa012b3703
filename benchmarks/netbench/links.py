"""Rates, round-trip time and loss of links, as users write them and as `tc` sets them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from accordion_hvd.tools.text import parse_rate, parse_time

LONGEST = 10.0
"""Largest round-trip time in seconds."""

LATENCY = "200ms"
"""Longest wait of a packet in a full link's queue."""

PACKET = 16 * 1024
"""Largest number of bytes that TCP passes down at once (a network card would segment them later). A
limited link's bucket must hold a packet, and traffic that fits into the bucket is not limited."""

BURST = 0.002
"""Size of the token bucket in seconds of the link's rate."""


def parse_rates(word: str, hosts: int) -> list[float | None]:
    """Return the rate of each host's link.

    Args:
        word: one rate for all hosts, or one for each, separated by commas.
        hosts: number of hosts.

    Raises:
        ValueError: if a rate is invalid or their number is wrong.
    """
    rates = [parse_rate(part.strip()) for part in word.split(",")]
    if len(rates) not in (1, hosts):
        raise ValueError(
            f"rate {word!r} has {len(rates)} rates; write one, or one for each of {hosts} hosts."
        )
    return rates * hosts if len(rates) == 1 else rates


def parse_rtt(word: str) -> float:
    """Return the seconds of "20ms" etc.; 0 for "none" and "0".

    Raises:
        ValueError: if `word` is not a time, or exceeds `LONGEST`.
    """
    try:
        seconds = parse_time(word)
    except ValueError:
        seconds = math.inf
    if seconds > LONGEST:
        raise ValueError(
            f"round-trip time {word!r} is invalid; write '20ms' or 'none', at most '{LONGEST:g}s'."
        )
    return seconds


def parse_loss(word: str) -> float:
    """Return the fraction of packets of "0.1%" etc.; 0 for "none" and "0".

    Raises:
        ValueError: if `word` is not a percentage below 100.
    """
    if word in ("none", "0"):
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", word)
    if match is None or float(match[1]) >= 100:
        raise ValueError(f"loss {word!r} is invalid; write '0.1%' or 'none', less than '100%'.")
    return float(match[1]) / 100


def token_bucket(bits: float) -> Sequence[str]:
    """Return the arguments of `tc` for a token bucket that holds `BURST` seconds of the rate.

    It holds at least one packet, with headers for all its segments.
    """
    burst = max(PACKET * 5 // 4, int(bits / 8 * BURST))
    return ["tbf", "rate", f"{bits:.0f}bit", "burst", str(burst), "latency", LATENCY]


def describe(rate: str, settings: Mapping[str, Any]) -> str:
    """Describe links: "50 Mbit/s, RTT 20 ms, loss 0.1 %".

    Args:
        rate: rate of the links, as users write it.
        settings: settings with the keys "rtt" and "loss", as users write them.
    """
    return ", ".join(filter(None, [_describe_rate(rate), describe_distance(settings)]))


def describe_distance(settings: Mapping[str, Any]) -> str:
    """Describe round-trip time and loss: "RTT 20 ms, loss 0.1 %"; empty if there are none."""
    parts = []
    if seconds := parse_rtt(settings.get("rtt", "none")):
        parts.append(f"RTT {1000 * seconds:g} ms")
    if lost := parse_loss(settings.get("loss", "none")):
        parts.append(f"loss {100 * lost:g} %")
    return ", ".join(parts)


def _describe_rate(rate: str) -> str:
    """Format a rate: "50 Mbit/s" for "50mbit"."""
    if rate == "none":
        return "unlimited links"
    if rate.endswith(".csv"):
        return f"rates of {rate}"
    return ", ".join(
        "unlimited" if word == "none" else f"{word[:-4]} {word[-4].upper()}bit/s"
        for word in (part.strip() for part in rate.split(","))
    )
