"""The contract of algorithms: requests, `Info`, `Spec` and `Compressor`.

An algorithm is written as an *exchange generator*: a Python generator that yields requests for
collectives and receives their results. It never calls a network and never names a framework, so
the same few lines run in PyTorch hooks, in Keras' `fit`, in a TensorFlow graph and in a NumPy
simulation.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

from accordion_hvd import check
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec, Tensor

if TYPE_CHECKING:
    from accordion_hvd.core.observer import Observer


State = dict[str, Tensor]
"""The state of a compressor for one bucket: tensors by name."""

ResidualDtype: TypeAlias = Literal["float32", "bfloat16"]
RESIDUAL_DTYPES = get_args(ResidualDtype)

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of each host."""


@dataclass(frozen=True, eq=False)
class Request:
    """One collective that an exchange generator requests.

    Attributes:
        tensor: this rank's contribution.
        group: the ranks that take part; None for all ranks.
        decode: decodes a received tensor, or each rank's tensor for an `Allgather` and each rank's
            row for an `Alltoall`, whose result is then a tuple. It returns `(value, invalid)`: the
            generator receives `value`, and a nonzero element in the vector `invalid` marks the
            payload as corrupt. Outside graphs, `decode` may raise ValueError instead. A corrupt
            payload raises `PayloadError`, which names the sender, before any exchange generator
            resumes from its first request. All changes to states are then undone.
    """

    tensor: Tensor
    group: tuple[int, ...] | None = field(default=None, kw_only=True)
    decode: Callable[[Tensor], tuple[Any, Tensor]] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, eq=False)
class Allreduce(Request):
    """Element-wise reduction over the ranks; the result has the tensor's shape and dtype.

    Every dtype is allowed: the communicator emulates additions that the engine lacks.

    Attributes:
        op: "mean" (floating point only), "sum" or "max".
        wire: for "mean", the dtype in which values travel ("float16" or "bfloat16"); None for the
            tensor's own. Values are added in fp32 or better where the engine allows it.
        reuse: whether the result may overwrite `tensor`, which the generator does not read again.
        sender: for a "sum" with `decode`, the only rank whose tensor is not all zeros: an integer,
            or a scalar tensor in a graph. `PayloadError` names this rank.
    """

    op: str = field(default="mean", kw_only=True)
    wire: str | None = field(default=None, kw_only=True)
    reuse: bool = field(default=False, kw_only=True)
    sender: Any = field(default=None, kw_only=True)


@dataclass(frozen=True, eq=False)
class Allgather(Request):
    """Collection of all ranks' tensors; the result is a tuple of one tensor per rank, in order.

    Attributes:
        uneven: whether the first dimension may differ between ranks, which costs one more
            allgather, of the sizes.
        rows: whether `decode` also takes the ranks' tensors as rows of one, and returns a tuple of
            tensors and the flags of all ranks. On an accelerator, one call then serves all ranks.
    """

    uneven: bool = field(default=False, kw_only=True)
    rows: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, eq=False)
class Broadcast(Request):
    """Copy of one rank's tensor to all ranks; every rank passes the same shape and dtype.

    Attributes:
        root: the rank whose tensor is copied.
    """

    root: int = field(default=0, kw_only=True)


@dataclass(frozen=True, eq=False)
class Alltoall(Request):
    """Transfer of row `r` of each tensor to rank `r`; the result stacks the rows in rank order.

    The first dimension must be the number of ranks that take part, unless `splits` is given.

    Attributes:
        splits: number of rows for each rank, in rank order, which sum to the first dimension. The
            result is then a tuple of the tensors received from each rank. The other dimensions
            must be equal on all ranks. Not supported in graphs.
        rows: whether `decode` also takes the whole result; see `Allgather`.
    """

    splits: tuple[int, ...] | None = field(default=None, kw_only=True)
    rows: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, eq=False)
class Neighbours(Request):
    """Transfer of the tensor to some ranks; the result is a tuple of the tensors received.

    All ranks make this request together, with tensors of one size, and their `to` and `of` match.

    Attributes:
        to: ranks that receive this rank's tensor.
        of: ranks from which this rank receives tensors, in the order of the result.
    """

    to: tuple[int, ...] = field(default=(), kw_only=True)
    of: tuple[int, ...] = field(default=(), kw_only=True)


Requests = Request | tuple[Request, ...]
"""One request, or several that are launched together and whose results arrive together."""

ExchangeGenerator = Generator[Requests, Any, tuple[Tensor, State]]
"""A generator that yields requests, receives their results and returns `(mean, new_state)`."""


@dataclass(frozen=True)
class Info:
    """Facts about an exchange that an algorithm may use besides the tensor.

    Attributes:
        step: number of exchanges so far, skipped ones included; an integer, or a scalar tensor in
            a graph.
        rank: number of this process among those that exchange.
        size: number of processes that exchange.
        name: name of the bucket, equal on all ranks; random seeds derive from it.
        lr: current learning rate; a scalar tensor in a graph, or if the optimizer holds it on an
            accelerator and nothing needs its value on the host.
        hosts: ranks of each host; () if the hosts are not known. They are known only if a
            compressor is `topology_aware`.
        phase: current value of `Compressor.variant`; an integer, in a graph too.
        sizes: number of elements of each tensor, if the vector given to `exchange` holds several
            tensors side by side; () if not known.
        shape: shape of the tensor, or of each tensor of a stack (`Compressor.batching`); () if not
            known. For a slice of `TwoLevel`, the shape of the full tensor.
        parameter: the weights, in the gradient's shape; only if an `UpdateRule` `needs_weights`.
        hyper: settings of the tensor's parameter group, by name.
        loss_scale: loss scale by which the gradient was divided, equal on all ranks; None: none.
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
    shape: tuple[int, ...] = ()
    loss_scale: Any = None


class NotForStockHorovod:
    """Base class of objects that Horovod's own wrapper cannot use; `compress` explains the fix.

    Horovod's compression protocol, `compress(tensor) -> (tensor, context)`, cannot run an exchange
    generator: it passes no name and allows one tensor and one allreduce. Under Keras 3, Horovod's
    optimizer averages nothing and calls nothing, so that only a warning in advance is possible.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        stock, ours = "horovod.tensorflow.keras", "accordion_hvd.tensorflow"
        own = {ours, "accordion_hvd.comm.horovod.keras"}
        if stock in sys.modules and own.isdisjoint(sys.modules):
            warnings.warn(
                f"{stock} is imported, whose optimizer averages nothing under Keras 3, with or "
                f"without compression; write `import {ours}.keras as hvd` instead.",
                stacklevel=1,  # always this line, so that it is shown once
            )
        return super().__new__(cls)

    def compress(self, tensor: Tensor) -> Any:
        """Raise TypeError; the message has the import line to use instead."""
        framework = "torch" if type(tensor).__module__.startswith("torch") else "tensorflow"
        raise TypeError(
            f"{self!r} was given to Horovod's own wrapper, which cannot run it. Write "
            f"`import accordion_hvd.{framework} as hvd` instead of "
            f"`import horovod.{framework} as hvd` (and the same for horovod.tensorflow.keras)."
        )

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        return self.compress(tensor)


Output: TypeAlias = Literal["gradient", "update", "model"]
Scope: TypeAlias = Literal["tensor", "flat", "joint", "model", "samples", "each"]
Batching: TypeAlias = Literal["", "alike", "any"]
ASPECTS = {"output": get_args(Output), "scope": get_args(Scope), "batching": get_args(Batching)}
"""The values of these attributes of a `Compressor`, which policies check."""


class Compressor(NotForStockHorovod):
    """One algorithm and its hyper-parameters, without mutable state.

    A subclass is a frozen dataclass that defines `init` and `exchange`. Between steps, each rank
    stores the state of each bucket: a dict whose keys `init` names. State is fp32 for gradients
    of every dtype.

    Attributes:
        summary: its row in docs/methods.md, whose second cell is the docstring's first sentence: a
            usual setting, the bytes of a message for an fp32 matrix of n by m, when to use it.
        output: "gradient", "update" for algorithms that return a finished update (an inner
            optimizer with momentum is then refused), or "model" for `Averaging`.
        scope: the tensors of one call of `exchange`: "tensor" (one tensor in its own shape),
            "flat" (a vector that may hold several tensors side by side), "joint" (one vector of
            all tensors that are large enough and not exempt), "model" (one vector of the whole
            model) or "samples" (such vectors of any number of contributors, stacked along a new
            first dimension).
        batching: the small tensors that may share one call of `exchange`, so that many cost
            little more than one: "alike" (tensors of one shape, which are stacked along a new
            first dimension, as is their state), "any" (all tensors, flattened into one vector; for
            methods without state) or "" (none). `info.name` is then the name of the first tensor,
            and `info.lr` need not be the learning rate of all.
        detects_nonfinite: whether the tensor of the first request is non-finite whenever the
            gradient is, and the changes to the state until then can be undone. This saves a
            separate pass over the gradient.
        per_rank_state: keys of the state that are useful to this rank only.
        contractive: True if C is contractive, E||x - C(x)||^2 <= (1 - delta) ||x||^2 for
            x = error + gradient and some delta > 0, and if the message depends on x only.
        topology_aware: whether `Info.hosts` holds the hosts.
        fp16_reduction: whether it sends fp16 values only. The ranks then choose once whether the
            engine or the communicator adds them (`comm.fp16_reduction`).
        sharded: whether the state covers only a part of the tensor, on known hosts if it is
            `topology_aware` (see `expand_residual`). It takes over the residual only of levels
            that cover the `same_part`.
    """

    summary: ClassVar[tuple[str, str, str]]
    output: ClassVar[Output] = "gradient"
    scope: ClassVar[Scope] = "tensor"
    batching: ClassVar[Batching] = ""
    detects_nonfinite: ClassVar[bool] = False
    per_rank_state: ClassVar[tuple[str, ...]] = ("error",)
    contractive: ClassVar[bool] = False
    topology_aware: ClassVar[bool] = False
    fp16_reduction: ClassVar[bool] = False
    sharded: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):
            cls.__repr__ = _short  # type: ignore[method-assign]

    def accept(self, spec: Spec, name: str) -> None:
        """Check that a tensor like `spec` can be served; called before the first exchange.

        Raises:
            ValueError: if tensor `name` is not real floating point, has no elements, or has 2^31
                or more.
        """
        check.real(self, name, spec.dtype)
        check.elements(self, name, spec.shape)

    def init(self, spec: Spec, info: Info) -> State:
        """Return the state before the first exchange of a tensor like `spec`, with all its keys.

        Subclasses extend the dict that `super().init(spec, info)` returns. That call also refuses
        unsuitable tensors through `accept`.
        """
        self.accept(spec, info.name)
        return {}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Average `grad` over the ranks.

        This is a generator: it yields requests, receives their results and returns
        `(mean, new_state)`. In-place operations of `ops` consume their first argument. Before the
        first `yield`, change the state with operations of `ops` only: these can be undone if a
        rank reports a non-finite gradient.

        Args:
            grad: this rank's gradient.
            state: the state that `init` or the previous exchange returned.
            info: facts about this exchange.

        Returns:
            The mean, in the gradient's shape and any float dtype, and the new state, with the
            keys that `init` named.
        """
        raise TypeError(f"{type(self).__name__} does not define exchange()")
        yield

    def variant(self, step: int) -> int:
        """Return the phase of the algorithm, such as 0 in a warm-up and 1 after it.

        `exchange` receives the phase as `info.phase`, and graphs are traced anew when it changes
        (but see `period`).

        Args:
            step: number of exchanges that this level has served for the tensor, without those
                that were skipped because a gradient was not finite.
        """
        return 0

    def synchronous(self, step: int) -> bool:
        """Return whether the ranks' weights are equal after `step` exchanges that were not skipped.

        This is a pure function of `step`, as `variant` is. Methods whose ranks take local steps
        override it.
        """
        return True

    @property
    def period(self) -> int:
        """Return the number of steps after which the phases repeat; 0: never; 1: no phases.

        If it is positive, `variant(step)` must equal `variant(step % period)`. Graphs then contain
        all phases, and are not traced anew when the phase changes.
        """
        return int(type(self).variant is Compressor.variant)

    @property
    def startup_steps(self) -> int:
        """Return the number of initial steps whose cost is not typical; a `Gate` ignores them."""
        return 0

    def plain(self) -> Compressor | None:
        """Return the compressor for tensors that are too small or exempt; None means `Dense`.

        A method that returns updates must also define the updates of these tensors.
        """
        return None

    @property
    def additive(self) -> bool:
        """Return whether what is added to one gradient is applied once, at once or later.

        If so, a residual of other levels that the state has no room for is added to the next
        gradient. Otherwise, since momentum would multiply it, or shifts or signs forget it, it is
        sent whole beside the next message.
        """
        return self.output == "gradient"

    def residual(self, state: State) -> Tensor | None:
        """Return this rank's residual, in units of the gradient; None without feedback or state."""
        return state.get("error")

    def with_residual(self, state: State, residual: Tensor) -> State:
        """Return the state with its residual replaced by `residual`, of any shape of that size."""
        error = state["error"]
        return {**state, "error": namespace(error).reshape(residual, tuple(error.shape))}

    def settled(self, state: State) -> State:
        """Return the state with the full residual in one tensor. May overwrite that of `state`."""
        residual = self.residual(state)
        return state if residual is None else self.with_residual(state, residual)

    def expand_residual(self, residual: Tensor, spec: Spec, info: Info) -> Tensor:
        """Return the residual of a full tensor like `spec`, given that of this rank's part."""
        return residual

    def same_part(self, other: Compressor) -> bool:
        """Return whether the states of both cover the same part of a tensor (`sharded`)."""
        return not (self.sharded or other.sharded)

    def report(self, state: State) -> dict[str, Tensor]:
        """Return diagnostics of the method, as tensors of one element; see `Exchange.stats`."""
        return {}

    def deactivate(self, state: State) -> State:
        """Return the state to store while another level serves, which has taken the residual."""
        return {key: value for key, value in state.items() if key != "error"}

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Return the state with which this level takes over from another level.

        By default it is `state` unchanged. The residual is passed on separately.

        Args:
            state: new state of this level, with the values that `deactivate` stored, if any.
            other: the compressor that served before.
            other_state: its state.
        """
        return state

    def rescale(self, states: Sequence[State], spec: Spec, info: Info) -> State:
        """Return this rank's state after a change of the number of ranks.

        By default a key becomes the mean of the ranks' values if these differ or if the key is in
        `per_rank_state`; otherwise it is unchanged. So the mean residual stays the same: it is what
        is owed to the mean gradient.

        Args:
            states: states of all previous ranks, in rank order; NumPy arrays.
            spec: shape, dtype and device of the tensor.
            info: facts about this rank after the change.

        Raises:
            ValueError: if the ranks' states have different shapes and thus no mean.
        """
        merged = {}
        for key, first in states[0].items():
            values = [state[key] for state in states]
            if any(x.shape != first.shape for x in values):
                shapes = [x.shape for x in values]
                label = f"the shape of state {key!r} on ranks 0, 1, ..."
                check.refuse(self, label, shapes, "the same on all ranks")
            differ = key in self.per_rank_state or any((x != first).any() for x in values)
            merged[key] = (sum(values) / len(states)).astype(first.dtype) if differ else first
        return merged

    def rescale_from_one(self, state: State, spec: Spec, info: Info) -> State:
        """Return every rank's state after a change of their number, given one rank's state only.

        By default the keys in `per_rank_state`, except `error`, start from `init` on all ranks.
        """
        own = [key for key in self.per_rank_state if key in state and key != "error"]
        fresh = self.init(spec, info) if own else {}
        return {**state, **{key: fresh[key] for key in own}}


def narrowed(compressor: Compressor, state: State, names: Sequence[str], seed: Any) -> State:
    """Return a state whose residual is in `error` alone, as words of bfloat16 (`ops.narrow`).

    Args:
        names: names of the tensors whose states are stacked.
        seed: from `random.key`.
    """
    state = compressor.settled(state)
    if "error" not in state:
        return state
    return {**state, "error": namespace(state["error"]).narrow(state["error"], names, seed)}


def check_narrow(compressor: Compressor, spec: Spec, info: Info) -> None:
    """Raise ValueError if `narrowed` would leave the residual of a tensor in fp32."""
    state = compressor.init(spec, info)
    state = state if "error" in state else compressor.settled(state)
    if "error" not in state and compressor.residual(state) is not None:
        allowed = "'float32', because its residual is not stored as 'error'"
        check.refuse(compressor, "residual_dtype", "bfloat16", allowed)


def widened(state: State) -> State:
    """Return a state with its residual in fp32, a copy of words of bfloat16."""
    error = state.get("error")
    if error is None or namespace(error).dtype(error) != "int16":
        return state
    return {**state, "error": namespace(error).widen(error)}


def _short(compressor: Any) -> str:
    """Return the constructor call with the first argument and those not at their defaults."""
    arguments = fields(compressor) if is_dataclass(compressor) else ()
    values = [(field, getattr(compressor, field.name)) for field in arguments]
    shown = [f"{f.name}={x!r}" for i, (f, x) in enumerate(values) if i == 0 or x != f.default]
    return f"{type(compressor).__name__}({', '.join(shown)})"


class Private(Compressor):
    """A compressor of which only the result of `exchange` may reveal anything about gradients.

    It serves the whole model as one vector, under `Fixed` only, with no other tensor beside it. It
    treats non-finite gradients as zeros, because a flag for them would reveal information.
    """

    scope: ClassVar[Scope] = "model"
    batching: ClassVar[Batching] = "any"

    def accountant(self, policy: Any) -> Observer:
        """Return the `private` observer that accounts for the exchanges of `policy`."""
        raise TypeError(f"{type(self).__name__} does not define accountant()")


# ---------------------------------------------------------------------------------------- placement
# Ranks on hosts, for methods that exchange within hosts and between hosts.


@dataclass(frozen=True)
class Placement:
    """Host of a rank, and the rank's number there.

    Attributes:
        intra: ranks of the same host, this rank included.
        inter: ranks with the same `local_rank`, one per host, this rank included.
        local_rank: position of the rank in `intra`.
        host: number of the host, which is the position of the rank in `inter`.
    """

    intra: tuple[int, ...]
    inter: tuple[int, ...]
    local_rank: int
    host: int


@functools.cache
def place(hosts: Hosts, rank: int, size: int) -> Placement:
    """Return the placement of `rank`. If the hosts are not known, each rank has its own host."""
    hosts = hosts or consecutive(size, 1)
    require_equal(hosts)
    number = next(i for i, members in enumerate(hosts) if rank in members)
    intra = hosts[number]
    local = intra.index(rank)
    # Engines number the ranks of a group in ascending order, whatever the order of the hosts.
    inter = tuple(sorted(members[local] for members in hosts))
    return Placement(intra, inter, local, inter.index(rank))


def require_equal(hosts: Hosts) -> None:
    """Raise ValueError unless all hosts have equally many ranks."""
    counts = [len(members) for members in hosts]
    if len(set(counts)) > 1:
        raise ValueError(
            f"the hosts have {', '.join(map(str, counts))} ranks, but to exchange host by host "
            "they must have equally many: a mean of the hosts' means would give some ranks more "
            "weight than others."
        )


def consecutive(ranks: int, local_size: int) -> Hosts:
    """Return hosts of `local_size` consecutive ranks each; the last host may have fewer."""
    numbers = tuple(range(ranks))
    return tuple(numbers[first : first + local_size] for first in range(0, ranks, local_size))


def groups(hosts: Hosts) -> list[tuple[int, ...]]:
    """Return the groups for exchanges within hosts, then those for exchanges between hosts.

    No groups are needed if there is only one host or only one rank per host.
    """
    if len(hosts) == 1 or len(hosts[0]) == 1:
        return []
    return [*hosts, *(tuple(sorted(ranks)) for ranks in zip(*hosts, strict=True))]
