"""The contract of algorithms: requests, `Info`, `Spec` and `Compressor`.

An algorithm is a *conversation*: a Python generator that yields the collectives it wants and is
sent their results. It never calls a network and never names a framework, so the same few lines
run under PyTorch hooks, inside Keras' `fit`, in a TensorFlow graph and in a NumPy simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar

from accordion_hvd import _renamed, check
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec, Tensor

State = dict[str, Tensor]
Hosts = tuple[tuple[int, ...], ...]
"""Ranks that share a machine, machine by machine."""


@dataclass(frozen=True, eq=False)
class Request:
    """One collective that a conversation asks for.

    Attributes:
        group: ranks taking part, None for all.
        decode: makes of a tensor that came (of each rank's, for an `Allgather`) what the
            conversation is sent instead. It returns that, and a vector that holds something else
            than 0 if the tensor cannot be right; where values are at hand it may also raise
            ValueError. Then `PayloadError` names the sender, before any conversation goes on
            from its first request: what all have done to their states is taken back.
    """

    tensor: Tensor
    group: tuple[int, ...] | None = field(default=None, kw_only=True)
    decode: Callable[[Tensor], tuple[Any, Tensor]] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, eq=False)
class Allreduce(Request):
    """Element-wise combination over the ranks; the result has the tensor's shape and dtype.

    Any dtype may be asked for; what the engine cannot add, the communicator emulates.

    Attributes:
        op: "mean" (floating point only), "sum" or "max".
        wire: for "mean", the dtype in which values travel ("float16", "bfloat16") instead of
            their own; they are added in fp32 or better where the engine allows it.
        reuse: the conversation will not read `tensor` again, so its memory may hold the result.
        sender: who alone adds something else than zeros to a "sum", where there is a `decode`: an
            integer, or a scalar tensor in a graph.
    """

    op: str = field(default="mean", kw_only=True)
    wire: str | None = field(default=None, kw_only=True)
    reuse: bool = field(default=False, kw_only=True)
    sender: Any = field(default=None, kw_only=True)


@dataclass(frozen=True, eq=False)
class Allgather(Request):
    """Everybody's tensor; the result is a tuple with one tensor per rank, in rank order.

    Attributes:
        uneven: the first dimension may differ between ranks (costs an exchange of sizes).
    """

    uneven: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, eq=False)
class Broadcast(Request):
    """The tensor of rank `root` on every rank; all ranks pass one of the same shape and dtype."""

    root: int = field(default=0, kw_only=True)


@dataclass(frozen=True, eq=False)
class Alltoall(Request):
    """Row `r` of the tensor goes to rank `r`; the result stacks what came, in rank order.

    The first dimension must be the number of ranks taking part.

    Attributes:
        splits: the number of rows for each rank instead, in rank order; their sum is the first
            dimension. The result is then a tuple with what each rank has sent. The other
            dimensions must be alike on all ranks. Not in graphs.
    """

    splits: tuple[int, ...] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, eq=False)
class Neighbours(Request):
    """The tensor goes to some ranks; the result is a tuple of what others have sent to this one.

    All ranks ask for it together, with tensors of one size, and agree about who sends to whom.

    Attributes:
        to: ranks that get the tensor.
        of: ranks whose tensors come, in the order of the result.
    """

    to: tuple[int, ...] = field(default=(), kw_only=True)
    of: tuple[int, ...] = field(default=(), kw_only=True)


Requests = Request | tuple[Request, ...]
"""A request, or several that leave together, as their results arrive together."""

ExchangeGenerator = Generator[Requests, Any, tuple[Tensor, State]]


RENAMED = {
    "by_machine": "topology_aware",
    "checks": "detects_nonfinite",
    "contracts": "contractive",
    "foreign": "rescale_from_one",
    "halves": "fp16_reduction",
    "in_parts": "sharded",
    "inherit": "warm_start",
    "local": "per_rank_state",
    "park": "deactivate",
    "reads": "needs_weights",
    "regroup": "rescale",
    "settling": "startup_steps",
    "several": "per_sample",
    "stacks": "batching",
    "whole": "expand_residual",
}
"""Old names of members that a compressor may define, and the new ones."""


@dataclass(frozen=True)
class Info:
    """The facts that an algorithm knows about an exchange besides the tensor.

    Attributes:
        step: exchanges so far, skipped ones included; an integer, or a scalar tensor in a graph.
        rank: this process among those that exchange.
        size: how many processes exchange.
        name: the bucket's name, equal on all ranks; the root of its random seeds.
        lr: the learning rate now.
        hosts: who shares a machine with whom; () means that nobody asked or nobody does. Only
            told where a compressor is `topology_aware`.
        phase: what `Compressor.variant` says now; an integer, in a graph too.
        sizes: elements of each tensor, where the conversation's vector is several side by side;
            () where that is not known.
        parameter: the weights, shaped as the gradient is; only where a compressor `needs_weights`
            them.
        hyper: settings of the tensor's parameter group, by name.
    """

    step: Any = 0
    rank: int = 0
    size: int = 1
    name: str = ""
    lr: Any = 0.0
    hosts: Hosts = ()
    phase: int = 0
    sizes: tuple[int, ...] = ()
    parameter: Tensor = None
    hyper: Mapping[str, Any] = field(default_factory=dict)

    machines = _renamed.attribute("machines", "hosts")


class NotForStockHorovod:
    """Says what to write when one of our objects is handed to Horovod's own wrapper.

    Horovod's compression protocol, `compress(tensor) -> (tensor, context)`, has no room for a
    conversation: it passes no name, allows one tensor and one allreduce.
    """

    def compress(self, tensor: Tensor) -> Any:
        """Refuse to serve Horovod's own wrapper.

        Raises: TypeError, with the import line to use instead.
        """
        framework = "torch" if type(tensor).__module__.startswith("torch") else "tensorflow"
        raise TypeError(
            f"{self!r} was given to Horovod's own wrapper, which cannot run it. Write "
            f"`import accordion_hvd.{framework} as hvd` instead of "
            f"`import horovod.{framework} as hvd` (and the same for horovod.tensorflow.keras)."
        )

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """Refuse, as `compress` does."""
        return self.compress(tensor)


class Compressor(NotForStockHorovod):
    """One algorithm and its hyper-parameters; it has no memory of its own.

    A subclass is a frozen dataclass that defines `init` and `exchange`. What it remembers between
    steps is the state: a dict whose keys `init` names. State is fp32 whatever the gradient is.

    Attributes:
        target: "gradient" (before the step) or "parameter" (after it).
        output: "gradient", or "update" for algorithms that return a finished direction; an inner
            optimizer with momentum is then refused.
        scope: "tensor" (called with one tensor in its own shape), "flat" (with vectors that may
            hold several tensors side by side), "joint" (with one such vector of all tensors that
            are large enough and not exempt) or "model" (the whole model as one vector).
        batching: which small tensors may share one call of `exchange`, so that many cost little
            more than one: "alike" (tensors of one shape, stacked along a new first dimension, as
            is their state), "any" (all, flattened into one vector; for methods without state) or
            "" (none). `info.name` is then that of the first, and `info.lr` not that of all.
        detects_nonfinite: whether it finds non-finite gradients itself: the tensor of its first
            request is
            not finite if the gradient is not, and what it did to the state can be undone. That
            saves the pass over memory that else looks for them.
        needs_weights: whether it is told the weights (`Info.parameter`).
        per_rank_state: keys of the state that are of use to this rank alone.
        contracts: whether what it keeps of x = error + gradient is always shorter than x by some
            factor, at least in expectation, and what it sends depends on that sum alone.
        topology_aware: whether it asks who shares a machine.
        fp16_reduction: whether it sends nothing but fp16, which some engines add better than
            others.
        sharded: whether its state is then that of a part of the tensor (`expand_residual`), and
            what other levels owe reaches it with the next gradient.
        private: whether only what it returns may become known of gradients. It then serves a whole
            model as one vector, alone: under no policy but `Fixed`, with nothing beside it. It
            counts what is not finite as nothing, since a flag would tell.
        several: whether a rank gives the gradients of several contributors, along a new first
            dimension, however many.
        budget: a `PrivacyBudget` that its exchanges are entered in, if there is any.
    """

    target: ClassVar[str] = "gradient"
    output: ClassVar[str] = "gradient"
    scope: ClassVar[str] = "tensor"
    batching: ClassVar[str] = ""
    detects_nonfinite: ClassVar[bool] = False
    needs_weights: ClassVar[bool] = False
    per_rank_state: ClassVar[tuple[str, ...]] = ("error",)
    contractive: ClassVar[bool] = False
    topology_aware: ClassVar[bool] = False
    fp16_reduction: ClassVar[bool] = False
    sharded: ClassVar[bool] = False
    private: ClassVar[bool] = False
    per_sample: ClassVar[bool] = False
    budget: Any = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Set up `repr`: the first argument and those that differ from their defaults."""
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):
            cls.__repr__ = _short  # type: ignore[method-assign]
        _renamed.members(cls, RENAMED)

    def accept(self, spec: Spec, name: str) -> None:
        """See that a tensor like `spec` can be served; asked before anything is exchanged.

        Raises:
            ValueError: `name` is not of real floating-point numbers, has no elements, or 2^31.
        """
        check.real(self, name, spec.dtype)
        check.elements(self, name, spec.shape)

    def init(self, spec: Spec, info: Info) -> State:
        """Return the state before the first exchange of a tensor like `spec`; it has every key.

        What subclasses return begins with `super().init(spec, info)`, which asks `accept`.
        """
        self.accept(spec, info.name)
        return {}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Average `grad` over the ranks.

        A generator: yields requests, is sent their results, returns `(mean, new_state)`. `mean`
        has the gradient's shape (any float dtype); `new_state` the keys that `init` named.

        In-place operations (`ops`) consume their first argument. Before the first `yield` only
        those of `ops` may be used on the state: they can be undone if a rank reports a
        non-finite gradient.
        """
        raise TypeError(f"{type(self).__name__} does not define exchange()")
        yield

    def variant(self, step: int) -> int:
        """Return a number that changes with the Python side of the algorithm (phases, warm-ups).

        `exchange` is told it as `info.phase`.

        Args:
            step: exchanges of the tensor that this level has served and that counted: neither
                those that a non-finite gradient has spoilt, nor those that other levels served.
        """
        return 0

    def synchronous(self, step: int) -> bool:
        """Return whether the ranks' weights are equal after `step` exchanges that counted.

        As `variant`, a pure function; methods whose ranks take steps of their own say when not.
        """
        return True

    @property
    def phases(self) -> bool:
        """Return whether `variant` ever changes."""
        return type(self).variant is not Compressor.variant

    @property
    def startup_steps(self) -> int:
        """Steps that it serves before it costs what it will cost; a `Gate` judges it after them."""
        return 0

    def plain(self) -> Compressor | None:
        """Return the compressor for tensors that are too small or exempt; None means `Dense`.

        A method that returns updates says how these get theirs.
        """
        return None

    def policy(self) -> Any:
        """Return the policy that the compressor means where it is named alone.

        None means that it always serves (`Fixed`).
        """
        return None

    def residual(self, state: State) -> Tensor | None:
        """Return this rank's residual, in units of the gradient; None without error feedback."""
        return state.get("error")

    def with_residual(self, state: State, residual: Tensor) -> State:
        """Return the state with this residual (any shape of the right size) in place of its own."""
        error = state["error"]
        return {**state, "error": namespace(error).reshape(residual, tuple(error.shape))}

    def expand_residual(self, residual: Tensor, spec: Spec, info: Info) -> Tensor:
        """Return the residual of a whole tensor like `spec` that stands for this `residual`."""
        return residual

    def report(self, state: State) -> dict[str, Tensor]:
        """Tensors of one element that say how the method fares; see `Exchange.stats`."""
        return {}

    def spend(self) -> None:
        """Enter the exchange that is about to begin in the budget, which may refuse it."""

    def affords(self) -> bool:
        """Return whether `spend` would not be refused."""
        return True

    def deactivate(self, state: State) -> State:
        """Return the state to keep while another level serves, which has taken the residual."""
        return {key: value for key, value in state.items() if key != "error"}

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Take over what the level that served before has learned; by default nothing."""
        return state

    def rescale(self, states: Sequence[State], spec: Spec, info: Info) -> State:
        """Return the state with which a rank goes on where there were other ranks before.

        By default each rank's `error` is an equal part of the sum of all residuals. Of the
        rest, what is equal on all ranks stays, and what is not, or is in `per_rank_state`, is
        their mean.

        Args:
            states: of all ranks that there were, in rank order; NumPy arrays.
            spec: the tensor.
            info: of this rank, now.

        Raises:
            ValueError: ranks have states of different shapes, of which there is no mean.
        """
        found = {}
        for key, first in states[0].items():
            all_ = [state[key] for state in states]
            if any(x.shape != first.shape for x in all_):
                shapes = [x.shape for x in all_]
                check.refuse(self, f"the shape of state {key!r} on ranks 0, 1, ...", shapes, "one")
            differ = key in self.per_rank_state or any((x != first).any() for x in all_)
            share = info.size if key == "error" else len(states)
            found[key] = (sum(all_) / share).astype(first.dtype) if differ else first
        return found

    def rescale_from_one(self, state: State, spec: Spec, info: Info) -> State:
        """Return the state with which every rank goes on where only one rank's state is known.

        By default keys in `per_rank_state` begin anew, on all ranks, but for the `error`.
        """
        own = [key for key in self.per_rank_state if key in state and key != "error"]
        fresh = self.init(spec, info) if own else {}
        return {**state, **{key: fresh[key] for key in own}}


__getattr__ = _renamed.module_attributes(
    __name__, {"Conversation": "ExchangeGenerator", "Machines": "Hosts"}
)


def _short(compressor: Any) -> str:
    """Return the constructor call, without arguments at their defaults."""
    found = fields(compressor) if is_dataclass(compressor) else ()
    values = [(field, getattr(compressor, field.name)) for field in found]
    shown = [f"{f.name}={x!r}" for i, (f, x) in enumerate(values) if i == 0 or x != f.default]
    return f"{type(compressor).__name__}({', '.join(shown)})"
