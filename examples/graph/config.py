"""Settings of a comparison of samplers on a graph."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from accordion_hvd import check
from accordion_hvd.policies import Policy
from accordion_hvd.resolve import as_policy
from examples.config import VARIABLE

OWNER = "settings"
"""Owner of the settings in error messages."""


@dataclass
class GraphSettings:
    """Settings of a GCN that is trained with several samplers and several seeds each.

    Args:
        name: name of the comparison; its results are in `<output>/<name>`.
        framework: torch or keras.
        data: cora or citeseer (downloaded, or from ACCORDION_DATA), or blocks (generated).
        nodes: number of nodes of blocks.
        partition: metis, random or hash.
        sampling: layer (LADIES) or node (GraphSAGE).
        sizes: nodes per layer, or neighbours per node, for each hop from the batch outwards; the
            network has one layer per hop.
        mode: fixed, bernoulli or iid.
        skews: values of s to train with; 1 is the base sampler, the baseline of the comparison.
        budgets: values of D to train with.
        rule: how s follows from D (measured, tight, worst).
        most: upper bound of s.
        warmup: epochs in which s grows to its full value.
        guard: guard the second-moment budget during training.
        reweight: false to train without re-weighting, which is biased; for comparisons.
        wire: format of feature rows in messages (none, fp16, bf16 or int8).
        prefetch: fetch the rows of the next batch during the computation of the current one.
        width: number of hidden units.
        dropout: dropout rate of the inputs of each layer.
        compression: compression of the weights' gradients, a spec string such as powersgd:4.
        epochs: passes over the training nodes.
        batch_size: maximum number of training nodes per rank and step.
        evaluate: epochs between evaluations.
        lr: learning rate of Adam.
        weight_decay: weight decay of the first layer.
        seeds: number of trainings with each sampler.
        seed: the first seed.
        output: folder for results.
        progress: print a line after each training.
    """

    name: str = "gcn"
    framework: Literal["torch", "keras"] = "torch"
    data: Literal["blocks", "cora", "citeseer"] = "blocks"
    nodes: int = 5000
    partition: Literal["metis", "random", "hash"] = "metis"
    sampling: Literal["layer", "node"] = "layer"
    sizes: list[int] = field(default_factory=lambda: [256, 512])
    mode: Literal["fixed", "bernoulli", "iid"] = "fixed"
    skews: list[float] = field(default_factory=lambda: [1.0])
    budgets: list[float] = field(default_factory=lambda: [2.0])
    rule: Literal["measured", "tight", "worst"] = "measured"
    most: float = 20.0
    warmup: int = 0
    guard: bool = False
    reweight: bool = True
    wire: str | None = None
    prefetch: bool = True
    width: int = 16
    dropout: float = 0.5
    compression: str | None = None
    epochs: int = 100
    batch_size: int = 64
    evaluate: int = 5
    lr: float = 0.01
    weight_decay: float = 5e-4
    seeds: int = 1
    seed: int = 1
    output: str = "runs"
    progress: bool = True

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: if a value is not allowed.
        """
        for key in ("width", "epochs", "batch_size", "evaluate", "seeds"):
            check.integer(OWNER, key, getattr(self, key), least=1)
        for key in ("seed", "warmup"):
            check.integer(OWNER, key, getattr(self, key), least=0)
        check.integer(OWNER, "nodes", self.nodes, least=100)
        if not self.sizes:
            check.refuse(OWNER, "sizes", self.sizes, "a size for each layer")
        for size in self.sizes:
            check.integer(OWNER, "sizes", size, least=1)
        for key in ("skews", "budgets"):
            for value in getattr(self, key):
                check.at_least(OWNER, key, value, least=1)
        if not self.methods():
            check.refuse(OWNER, "skews", self.skews, "a list of numbers if budgets is empty")
        check.at_least(OWNER, "most", self.most, least=1)
        for key in ("lr", "weight_decay"):
            check.at_least(OWNER, key, getattr(self, key), least=0)
        if not (check.is_number(self.dropout) and 0 <= self.dropout < 1):
            check.refuse(OWNER, "dropout", self.dropout, "a number in [0, 1)")
        if not re.fullmatch(r"[\w.+-]+", self.name) or set(self.name) == {"."}:
            check.refuse(OWNER, "name", self.name, "made of letters, digits and . _ + -")
        self._check_words()

    def _check_words(self) -> None:
        from accordion_hvd.graph.rows import wire_of

        wire_of(self.rows_as())
        spec = self.compression or os.environ.get(VARIABLE)
        try:
            as_policy(spec or "dense")
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings: compression is {spec!r}: {error}") from None

    def rows_as(self) -> str | None:
        """Return `wire` as the argument `compression` of `FeatureStore`."""
        return None if self.wire in (None, "none") else self.wire

    def policy(self) -> Policy | None:
        """Return a new policy for gradients; None if `compression` is not set."""
        return as_policy(self.compression) if self.compression else None

    def methods(self) -> list[dict[str, float]]:
        """Return the argument of each sampler: `skew` or `budget`."""
        methods = [{"skew": value} for value in self.skews]
        return methods + [{"budget": value} for value in self.budgets]

    def sampler(self) -> dict[str, Any]:
        """Return the arguments of `SkewedSampler` that all samplers share."""
        size = "layer_size" if self.sampling == "layer" else "fanout"
        keys = ("mode", "rule", "most", "warmup", "reweight")
        return {size: self.sizes, **{key: getattr(self, key) for key in keys}}

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as a dict."""
        return asdict(self)

    def with_(self, **changes: Any) -> GraphSettings:
        """Return a copy with some settings changed."""
        return replace(self, **changes)


def read(description: str, arguments: Sequence[str] | None = None) -> GraphSettings:
    """Return the settings from the command line; see `config.read`."""
    from examples import config

    return config.read(description, arguments, GraphSettings)
