"""CD-Adam: compressed distributed AMSGrad (Wang, Lin & Chen, AISTATS 2022)."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.core.codec import Codec, average
from accordion_hvd.ops import backend, namespace
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.base import AMSGrad, shaped
from accordion_hvd.optimizers.onebit_adam import floored
from accordion_hvd.optimizers.signs import (
    Chunks,
    averaged,
    check_bits,
    chunk,
    joint_residual,
    speaks,
)

SENDS, SILENT = range(2)
"""Phases: whether an exchange sends anything."""

FLOOR = 1e-6
"""With `preconditioned`: least vmax of an element, as a multiple of its tensor's mean."""

TINY = 1e-30
"""With `preconditioned`: constant added to vmax, in case all of it is zero."""

MOMENTS = ("m", "v", "vmax", "count")

ReplicaGenerator = Generator[Any, Any, tuple[Tensor, State, Tensor]]
"""A part of an exchange that returns a gradient, the new state, and scratch memory."""


@dataclass(frozen=True)
class ExactCDAdam(AMSGrad):
    """Dense stage of `CDAdam`: AMSGrad on the mean of the gradients, in the same form.

    The update of `AMSGrad`; without `bias_correction` eps is inside the root, as in the paper:
    u = m / sqrt(vmax + eps). Coupled weight decay is added to the mean gradient, from the weights
    that all ranks share.
    """

    needs_weights: ClassVar[bool] = True

    betas: tuple[float, float] = (0.9, 0.99)

    def decays(self, decoupled: bool) -> bool:
        """Return whether the weight decay is coupled: the rule itself applies that form."""
        return not decoupled

    def update(self, grad: Tensor, state: State, info: Info) -> tuple[Tensor, State]:
        return self.stepped(grad, state, info, grad)

    def stepped(self, grad: Tensor, state: State, info: Info, room: Tensor) -> tuple[Tensor, State]:
        """Return the direction and the new state for a gradient, which is not modified.

        Consumes the moments and then `room`, whose memory may hold the direction.
        """
        state = self.moments(self._decayed(grad, info), state, info)
        return self.direction(state, info, room), state

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Copy the moments; vmax restarts at v, as compressed gradients made it far larger."""
        state = super().warm_start(state, other, other_state)
        if not isinstance(other, CDAdam):
            return state
        return {**state, "vmax": namespace(state["v"]).copy(state["v"])}

    def direction(self, state: State, info: Info, room: Tensor) -> Tensor:
        """Return the direction, in the form of the authors' code or of the paper."""
        if self.bias_correction:
            return super().direction(state, info, room)
        xp, eps = namespace(room), self.setting(info, "eps")
        return xp.preconditioned(state["m"], state["vmax"] + eps, [1.0, 1.0], 0.0, room)

    def _decayed(self, grad: Tensor, info: Info) -> Tensor:
        decay = self.decay(info, decoupled=False)
        if not decay:
            return grad
        if info.parameter is None:
            check.refuse(self, "parameter of " + info.name, None, "a tensor where weights decay")
        return grad + decay * shaped(info.parameter, grad)


@dataclass(frozen=True)
class CDAdam(ExactCDAdam):
    """CD-Adam: AMSGrad on an estimate of the mean gradient, updated by compressed differences.

    CD-AMSGrad, Algorithm 1 of the paper. Each rank i and the server store a replica h_i of rank i's
    gradient g_i, and all ranks store the same estimate G of the mean gradient. With a compressor C:

    1. Rank i sends c_i = C(g_i - h_i); h_i <- h_i + c_i
    2. The server updates h = mean of h_i by h <- h + mean of c_i, and sends c = C(h - G) to all
    3. All ranks update G <- G + c and take an AMSGrad step on G:
       m <- b1 m + (1 - b1) G, v <- b2 v + (1 - b2) G^2, vmax <- max(vmax, v),
       u = m' / (sqrt(vmax') + eps)

    The paper's: all of the above, b2 = 0.99, and u = m / sqrt(vmax + eps)
    (`bias_correction=False`). The authors' code, and the default: m' = m / (1 - b1^t) and
    vmax' = vmax / (1 - b2^t). The default C is scaled signs, C(x) = |x|_1 / d sgn(x) with
    sgn(0) = 1; the code also has top-k. Ours: the server is distributed, so that each rank serves
    one chunk, and the arguments after `compressor`. docs/optimizer-details.md explains them, weight
    decay, and the behaviour under a policy.

    Sent with scaled signs, of a tensor with d elements on n ranks: an alltoall of d / 8 bytes, an
    allgather of d / (8 n), and two scales; together 1/32 of an fp32 allreduce, times `bits`. State:
    m, v, vmax, G, h_i, and 1 / n of h - G: 20 + 4 / n bytes an element in fp32, or 24 + 8 / n with
    a `replica_lr` below 1.

    Args:
        betas: decay rates b1 and b2, in [0, 1).
        eps: constant added to the root, at least 0; without `bias_correction`, the paper's nu.
        bias_correction: whether to correct the moments for their start at zero.
        compressor: C, a `contractive` compressor such as TopK(0.01); None: scaled signs.
        preconditioned: whether signs are in units of sqrt(vmax); not with a `compressor`.
        bits: mean number of bits an element, in [0.1, 2]; not with a `compressor`.
        replica_lr: learning rate of the replicas (DIANA's alpha), in (0, 1]: the fraction of each
            message that is added to them. Below 1, the error of a message is added to the next
            message. Not with a `compressor`.
    """

    rescale_note: ClassVar[str] = "all replicas are the ranks' mean"
    compressor: Compressor | None = None
    _: KW_ONLY
    preconditioned: bool = False
    bits: float = 1
    replica_lr: float = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.preconditioned, bool):
            check.refuse(self, "preconditioned", self.preconditioned, "True or False")
        check_bits(self, self.bits)
        check.ratio(self, "replica_lr", self.replica_lr)
        if self.compressor is None:
            return
        why = _unfit(self.compressor)
        if why:
            allowed = "None (scaled signs), or a contractive compressor, such as TopK(0.01)"
            check.refuse(self, "compressor", self.compressor, f"{allowed}: this one {why}")
        for key, only, own in (
            ("preconditioned", False, "units"),
            ("bits", 1, "code"),
            ("replica_lr", 1, "residual"),
        ):
            if getattr(self, key) != only:
                allowed = f"{only} with a compressor, which has its own {own}"
                check.refuse(self, key, getattr(self, key), allowed)

    @property
    def per_rank_state(self) -> tuple[str, ...]:  # type: ignore[override]
        if self.compressor is not None:
            return self.compressor.per_rank_state
        return ("error", "server") + (() if self.replica_lr == 1 else ("replica", "behind"))

    @property
    def owed(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("server",) if self.replica_lr == 1 else ("error", "server")  # else, a replica

    @property
    def batching(self) -> str:  # type: ignore[override]
        return "alike" if self.compressor is None else self.compressor.batching

    def dense(self) -> ExactCDAdam:
        return ExactCDAdam(self.betas, self.eps, self.bias_correction)

    def variant(self, step: int) -> int:
        return SENDS if speaks(self.bits, step) else SILENT

    @property
    def period(self) -> int:
        return int(self.bits == math.ceil(self.bits))

    def init(self, spec: Spec, info: Info) -> State:
        """Return the state of `AMSGrad`; `estimate`: G; `error`: -h_i; `server`: h - G of a chunk.

        With a `compressor`, the compressor's state, whose residual is -h_i, replaces `error` and
        `server`. With a `replica_lr` below 1, `estimate`: H; `error`: e_i; `server`: residual of
        this rank's chunk; `replica`: h_i; `behind`: h - H of the chunk.
        """
        state = super().init(spec, info) | {"estimate": spec.zeros((spec.size,), spec.wide)}
        if self.compressor is not None:
            return state | self.compressor.init(spec, info)
        length = Chunks(spec.size, info.size).length
        sizes = {"error": spec.size, "server": length}
        if self.replica_lr != 1:
            sizes |= {"replica": spec.size, "behind": length}
        return state | {key: spec.zeros((size,), spec.wide) for key, size in sizes.items()}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Update the estimate by signs or the compressor's exchange, and return the direction."""
        xp, shape = namespace(grad), namespace(grad).shape(grad)
        if info.size == 1:
            yield ()  # the moments may be consumed once the gradient is known to be finite
            mean = room = xp.reshape(grad, xp.shape(state["m"]))
        else:
            mean, state, room = yield from self._estimated(grad, state, info)
        direction, state = self.stepped(mean, state, info, room)
        return xp.reshape(direction, shape), state

    def _estimated(self, grad: Tensor, state: State, info: Info) -> ReplicaGenerator:
        """Return the gradient estimate, the state with new replicas, and scratch memory."""
        xp = namespace(grad)
        if info.phase == SILENT:
            yield ()  # the moments may be consumed once all gradients are known to be finite
            if self.replica_lr != 1:
                state = self._skipped(grad, state)
            return state["estimate"], state, xp.reshape(grad, xp.shape(state["m"]))
        if self.replica_lr != 1:
            return (yield from self._slow(grad, state, info))
        exchange = self._signed if self.compressor is None else self._compressed
        delta, state, room = yield from exchange(grad, state, info)
        state = {**state, "estimate": xp.accumulate(state["estimate"], delta)}
        return state["estimate"], state, room

    def _signed(self, grad: Tensor, state: State, info: Info) -> ReplicaGenerator:
        """Return the servers' messages for all chunks, the state with new replicas, scratch memory.

        The exchange is `averaged` with other residuals. With `error` = -h_i, each rank's total is
        g_i - h_i and the new residual is g_i - h_i - c_i, so that subtracting g_i gives the new
        -h_i. The server's residual of its chunk is h - G before and after the exchange.
        """
        xp = namespace(grad)
        fresh = xp.reshape(grad, xp.shape(state["error"]))
        total = xp.accumulate(state["error"], fresh)
        delta, error, server = yield from self._averaged(total, state["server"], state, info)
        return delta, {**state, "error": xp.subtract(error, fresh), "server": server}, fresh

    def _averaged(
        self, total: Tensor, server: Tensor, state: State, info: Info
    ) -> Generator[Any, Any, tuple[Tensor, Tensor, Tensor]]:
        """Run `averaged`, in units of sqrt(vmax) if `preconditioned`."""
        bits = math.ceil(self.bits)
        if not self.preconditioned:
            return (yield from averaged(total, server, info, "l1", bits=bits))
        unit, chunk_unit = _units(state["vmax"], info)
        scaled = total / unit, server / chunk_unit
        delta, error, server = yield from averaged(*scaled, info, "l1", bits=bits)
        return delta * unit, error * unit, server * chunk_unit

    def _slow(self, grad: Tensor, state: State, info: Info) -> ReplicaGenerator:
        """Return the estimate G = H + c, the new state and scratch memory; p = `replica_lr` < 1.

        The server sends c = mean of c_i + (h - H) + s - s', where s and s' are its residuals before
        and after. As h grows by p times the mean of c_i and H by p c, h - H (`behind`) grows by
        p (s' - s - (h - H)).
        """
        xp, lr = namespace(grad), self.replica_lr
        fresh = shaped(grad, state["m"])
        delta = fresh - state["replica"]
        totals = delta + state["error"], state["server"] + state["behind"]
        received, error, server = yield from self._averaged(*totals, state, info)
        sent = xp.subtract(xp.accumulate(delta, state["error"]), error)
        growth = server - state["server"] - state["behind"]
        new = {
            "replica": xp.accumulate(state["replica"], sent * lr),
            "behind": xp.accumulate(state["behind"], growth * lr),
            "estimate": state["estimate"] + received * lr,
        }
        mean = xp.accumulate(received, state["estimate"])
        return mean, {**state, **new, "error": error, "server": server}, fresh

    def _skipped(self, grad: Tensor, state: State) -> State:
        """Return the state after a skipped exchange: the residuals take up g_i - h_i and h - H."""
        xp = namespace(grad)
        delta = shaped(grad, state["m"]) - state["replica"]
        error = xp.accumulate(state["error"], delta)
        server = xp.accumulate(state["server"], state["behind"])
        return {**state, "error": error, "server": server}

    def _compressed(self, grad: Tensor, state: State, info: Info) -> ReplicaGenerator:
        """Run the compressor's exchange; its residual is -h_i, so that it sends C(g_i - h_i)."""
        xp, inner = namespace(grad), self.compressor
        assert inner is not None
        if isinstance(inner, Codec):
            inner = inner.specialize(info)
            own = xp.cast(xp.reshape(grad, xp.shape(state["error"])), "float32")
            message, total = inner.encode_accumulating(state["error"], own, info)
            delta, sent = yield from average(inner, message, xp.copy(own), info)
            error = xp.reshape(inner.remove(total, sent, info), xp.shape(own))
            delta, error = xp.reshape(delta, xp.shape(state["m"])), xp.subtract(error, own)
            return delta, {**state, "error": error}, delta
        inner_state = {key: x for key, x in state.items() if key not in (*MOMENTS, "estimate")}
        fresh = xp.cast(grad, xp.dtype(inner_state["error"]))
        own = xp.copy(fresh)
        delta, inner_state = yield from inner.exchange(fresh, inner_state, info)
        error = inner.residual(inner_state)
        error = xp.subtract(error, xp.reshape(own, xp.shape(error)))
        inner_state = inner.with_residual(inner_state, error)
        delta = xp.reshape(delta, xp.shape(state["m"]))
        return delta, {**state, **inner_state}, delta

    def _with_replica(self, state: State, replica: Tensor) -> State:
        """Return the state with h_i = `replica`, which is not modified."""
        xp = namespace(replica)
        if self.replica_lr != 1:
            return {**state, "replica": xp.copy(replica)}
        if self.compressor is None:
            return {**state, "error": -replica}
        return self.compressor.with_residual(state, xp.cast(-replica, xp.dtype(state["error"])))

    # ----------------------------------------------------------------------- stages and other ranks
    def deactivate(self, state: State) -> State:
        """Return G, the replicas and the compressor's state: everything except the moments."""
        return {key: value for key, value in state.items() if key not in MOMENTS}

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Copy the moments of another CDAdam, and G and the replicas if their form is the same."""
        if not isinstance(other, CDAdam):
            return state
        state = {**state, **{key: other_state[key] for key in MOMENTS if key in other_state}}
        kinds = {(rule.compressor is None, rule.replica_lr == 1) for rule in (self, other)}
        if len(kinds) > 1:
            return state
        copied = namespace(state["m"]).copy
        state["estimate"] = copied(other_state["estimate"])
        if self.compressor is None or other.compressor is None:
            return {**state, **{key: copied(other_state[key]) for key in self.per_rank_state}}
        state = self.compressor.warm_start(state, other.compressor, other_state)
        return self.compressor.with_residual(state, copied(other.compressor.residual(other_state)))

    def rescale(self, states: Sequence[State], spec: Spec, info: Info) -> State:
        """Preserve equal tensors; set all replicas to the mean of the old replicas."""
        if self.compressor is not None or "estimate" not in states[0]:
            return self.rescale_from_one(states[0], spec, info)
        state = super().rescale(states, spec, info)
        if self.replica_lr == 1:
            mean = sum(-old["error"] for old in states) / len(states)
            return self._with_equal_replicas(state, mean, info)
        mean = sum(old["replica"] for old in states) / len(states)
        error = joint_residual(states, spec.size)
        return self._with_equal_replicas(state, mean, info) | {"error": error}

    def rescale_from_one(self, state: State, spec: Spec, info: Info) -> State:
        """Preserve equal tensors; set all replicas to G (or H). All ranks must do the same."""
        state = super().rescale([state], spec, info)
        return self._with_equal_replicas(state, state["estimate"], info)

    def _with_equal_replicas(self, state: State, replica: Tensor, info: Info) -> State:
        """Return the state in which the replicas of all ranks are `replica`."""
        state = self._with_replica(state, replica)
        if self.compressor is not None:
            return state
        lag = chunk(replica - state["estimate"], info)  # h - G, or h - H
        key = "server" if self.replica_lr == 1 else "behind"
        return {**state, key: namespace(lag).copy(lag)}


CDAMSGrad = CDAdam
"""Alias of `CDAdam`."""


def _units(vmax: Tensor, info: Info) -> tuple[Tensor, Tensor]:
    """Return sqrt(vmax) and this rank's chunk of it, both positive everywhere."""
    least = floored(vmax, FLOOR)
    return (least + TINY) ** 0.5, (chunk(least, info) + TINY) ** 0.5


def _unfit(compressor: Any) -> str:
    """Return why CDAdam cannot use a compressor, or "" if it can."""
    if not isinstance(compressor, Compressor):
        return "is no compressor"
    if compressor.output != "gradient":
        return "returns no averaged gradients"
    if compressor.scope != "tensor" or compressor.topology_aware:
        return "has no residual of its own for each tensor and rank"
    state = compressor.init(Spec((8, 8), "float32", backend("numpy")), Info())
    if "error" not in state:
        return "has no residual"
    if not compressor.contractive:
        return "is not marked as contractive"
    if compressor.period != 1:
        return "has phases that depend on the step"
    taken = sorted({*MOMENTS, "estimate"} & set(state))
    return f"has {taken[0]!r} in its state, as CDAdam does" if taken else ""
