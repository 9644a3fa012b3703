"""The settings of a comparison of samplers on a graph."""

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

WHO = "settings"


@dataclass
class GraphSettings:
    """A GCN trained with several samplers, each with several seeds.

    Args:
        name: of the comparison; its results are in `<output>/<name>`.
        framework: torch or keras.
        data: cora, citeseer (fetched, or from ACCORDION_DATA) or blocks (made, no download).
        nodes: of blocks.
        partition: metis, random or hash.
        sampling: layer (LADIES) or node (GraphSAGE).
        sizes: nodes of a layer, or neighbours of a node, for each hop from the batch outwards; as
            many hops as the network has layers.
        mode: bernoulli or iid.
        skews: values of s to train with; 1 is the base sampler, with which the others are compared.
        budgets: values of D to train with.
        rule: how s follows from D (measured, tight, worst).
        most: no s is larger.
        warmup: epochs in which s grows to what it shall be.
        guard: look after the budget while training.
        reweight: false trains without re-weighting, which is biased; for comparisons.
        wire: how rows of features travel (none, fp16, bf16 or int8).
        prefetch: fetch the next batch's rows while this one is computed.
        width: hidden units.
        dropout: share of the inputs of each layer.
        compression: of the weights' gradients, a word such as powersgd:4.
        epochs: passes over the training nodes.
        batch_size: training nodes of a rank in a step, at most.
        evaluate: epochs between evaluations.
        lr: of Adam.
        weight_decay: of Adam, in the first layer.
        seeds: trainings with each sampler.
        seed: the first seed.
        output: folder for results.
        progress: show what is going on.
    """

    name: str = "gcn"
    framework: Literal["torch", "keras"] = "torch"
    data: Literal["blocks", "cora", "citeseer"] = "blocks"
    nodes: int = 5000
    partition: Literal["metis", "random", "hash"] = "metis"
    sampling: Literal["layer", "node"] = "layer"
    sizes: list[int] = field(default_factory=lambda: [256, 512])
    mode: Literal["bernoulli", "iid"] = "bernoulli"
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
        """Raises: ValueError when a value is impossible."""
        for key in ("width", "epochs", "batch_size", "evaluate", "seeds"):
            check.integer(WHO, key, getattr(self, key), least=1)
        for key in ("seed", "warmup"):
            check.integer(WHO, key, getattr(self, key), least=0)
        check.integer(WHO, "nodes", self.nodes, least=100)
        if not self.sizes:
            check.refuse(WHO, "sizes", self.sizes, "a size for each layer")
        for size in self.sizes:
            check.integer(WHO, "sizes", size, least=1)
        for key in ("skews", "budgets"):
            for value in getattr(self, key):
                check.at_least(WHO, key, value, least=1)
        if not self.methods():
            check.refuse(WHO, "skews", self.skews, "given where budgets are not")
        check.at_least(WHO, "most", self.most, least=1)
        for key in ("lr", "weight_decay"):
            check.at_least(WHO, key, getattr(self, key), least=0)
        if not (check.is_number(self.dropout) and 0 <= self.dropout < 1):
            check.refuse(WHO, "dropout", self.dropout, "a number in [0, 1)")
        if not re.fullmatch(r"[\w.+-]+", self.name) or set(self.name) == {"."}:
            check.refuse(WHO, "name", self.name, "made of letters, digits and . _ + -")
        self._check_words()

    def _check_words(self) -> None:
        from accordion_hvd.graph.rows import wire_of

        wire_of(self.rows_as())
        word = self.compression or os.environ.get(VARIABLE)
        try:
            as_policy(word or "dense")
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings: compression is {word!r}: {error}") from None

    def rows_as(self) -> str | None:
        """`wire`, as `FeatureStore` takes it."""
        return None if self.wire in (None, "none") else self.wire

    def policy(self) -> Policy | None:
        """A new policy for gradients; None if `compression` names none."""
        return as_policy(self.compression) if self.compression else None

    def methods(self) -> list[dict[str, float]]:
        """What distinguishes the samplers: `skew` or `budget`."""
        methods = [{"skew": value} for value in self.skews]
        return methods + [{"budget": value} for value in self.budgets]

    def sampler(self) -> dict[str, Any]:
        """Arguments of `SkewedSampler` that all have in common."""
        size = "layer_size" if self.sampling == "layer" else "fanout"
        keys = ("mode", "rule", "most", "warmup", "reweight")
        return {size: self.sizes, **{key: getattr(self, key) for key in keys}}

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def with_(self, **changes: Any) -> GraphSettings:
        """The same but for some values."""
        return replace(self, **changes)


def read(description: str, arguments: Sequence[str] | None = None) -> GraphSettings:
    """The settings that the command line asks for; see `config.read`."""
    from examples import config

    return config.read(description, arguments, GraphSettings)
