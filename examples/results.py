"""Results of a run, as one JSON file."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from accordion_hvd.policies import Policy
from accordion_hvd.policies.base import plain
from examples.config import Settings

FORMAT = 1
Row = dict[str, Any]


class Record:
    """Collects a run's epochs; rank 0 writes them to `<output>/<name>/result.json`.

    Args:
        settings: settings of the run.
        framework: "torch" or "keras".
        rank: rank of this process.
        size: number of ranks.
        earlier: result of the run that is resumed.
    """

    def __init__(
        self,
        settings: Settings,
        framework: str,
        rank: int,
        size: int,
        earlier: Row | None = None,
    ) -> None:
        self.rank, self.settings = rank, settings
        self.folder = settings.folder
        earlier = earlier or {}
        self.rows: list[Row] = list(earlier.get("epochs", []))
        self.before = earlier.get("stats") or {}
        self.waited = float(earlier.get("seconds", 0.0))
        self.result: Row = {
            "format": FORMAT,
            "framework": framework,
            "ranks": size,
            "settings": settings.as_dict(),
        }
        self.began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, including evaluation and earlier parts of a resumed run."""
        return self.waited + time.perf_counter() - self.began

    def epoch(self, lr: float, loss: float, accuracy: float, optimizer: Any) -> Row:
        """Record an epoch that has ended.

        Args:
            lr: learning rate of the epoch.
            loss: mean training loss.
            accuracy: accuracy on the test images, in [0, 1].
            optimizer: the distributed optimizer; None for a single rank.
        """
        stats = self.stats(optimizer)
        row: Row = {
            "epoch": len(self.rows),
            "lr": lr,
            "loss": loss,
            "accuracy": accuracy,
            "sent": stats["sent"],
            "dense_sent": stats["dense_sent"],
            "seconds": self.seconds,
            "levels": dict(policy.current) if (policy := policy_of(optimizer)) else {},
        }
        self.rows.append(row)
        self.write(optimizer)
        return row

    def stats(self, optimizer: Any) -> Row:
        """Return `Exchange.stats()`, with averaged models and the counts before a resumption."""
        now = counts(optimizer, self.result["ranks"])
        total = {key: now[key] + self.before.get(key, 0) for key in _NOTHING if key != "ratio"}
        ratio = total["dense_sent"] / total["sent"] if total["sent"] else math.nan
        more = {"times": dict(now.get("seconds", {})), "privacy": now.get("privacy", {})}
        return {**total, "ratio": ratio, **more}

    def write(self, optimizer: Any) -> Row:
        """Write the result so far, and return it."""
        policy = policy_of(optimizer)
        serving = policy or (optimizer.averaging.method if optimizer is not None else None)
        self.result |= {
            "seconds": self.seconds,
            "stats": self.stats(optimizer),
            "compression": repr(serving) if serving is not None else None,
            "history": plain(policy.history) if policy else [],
            "epochs": self.rows,
        }
        if self.rank == 0:
            write_json(self.folder / "result.json", self.result)
        return self.result


_NOTHING: Row = {"steps": 0, "dense": 0.0, "dense_sent": 0.0, "payload": 0.0, "sent": 0.0}
_NOTHING |= {"received": 0.0, "ratio": math.nan}


def policy_of(optimizer: Any) -> Policy | None:
    """Return the policy of an optimizer; None if it averages models only, or for a single rank."""
    policy = getattr(getattr(optimizer, "exchange", None), "policy", None)
    return policy if isinstance(policy, Policy) else None


def counts(optimizer: Any, ranks: int) -> Row:
    """Return `Exchange.stats()`, to which the steps and bytes of averaged models are added."""
    found: Row = dict(_NOTHING)
    if policy_of(optimizer) is not None:
        found |= optimizer.exchange.stats()
    averaging = optimizer.averaging if optimizer is not None else None
    if averaging is not None:
        models = averaging.stats()
        dense = 4 * models["steps"] * sum(x.size for x in averaging.parameters.tensors())
        more = {"steps": models["steps"], "sent": models["sent"], "dense": dense}
        more["dense_sent"] = 2 * (ranks - 1) / ranks * dense
        found |= {key: found[key] + value for key, value in more.items()}
    return found


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically: readers find the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(_plain(content), indent=1, allow_nan=False) + "\n")
    part.replace(path)


def _plain(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> Row:
    """Read a file of `write_json`."""
    return json.loads(path.read_text())
