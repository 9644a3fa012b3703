"""CD-Adam: compressed distributed AMSGrad (Wang, Lin & Chen, AISTATS 2022)."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Allreduce, Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.core.codec import Codec, average
from accordion_hvd.ops import backend, namespace
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.adam import AMSGrad
from accordion_hvd.optimizers.base import shaped
from accordion_hvd.optimizers.onebit_adam import floored
from accordion_hvd.optimizers.signs import (
    Chunks,
    averaged,
    check_bits,
    chunk,
    joint_residual,
    speaks,
)

SIGNS, EXACT, NOTHING = range(3)
"""Phases: what travels in an exchange."""

FLOOR = 1e-6
"""Of vmax where it says what signs stand for, as a part of its tensor's mean."""

TINY = 1e-30
"""What is added to it, should all of it be zero."""

MOMENTS = ("m", "v", "vmax", "count")

OWN = ("error", "server")
"""What ranks have of their own."""

SLOW = ("replica", "behind")
"""What else they have with a pace below 1."""

RequestGenerator = Generator[Any, Any, tuple[Tensor, State, Tensor]]
"""A part of a conversation; of what it returns, the last is memory that nobody needs."""


@dataclass(frozen=True)
class ExactCDAdam(AMSGrad):
    """The dense stage of `CDAdam`: AMSGrad in the form that it has there.

    As `AMSGrad`; with `bias_correction` off, eps is inside the root: u = m / sqrt(vmax + eps), the
    paper's form. Coupled weight decay is added to the average, from the weights that all share.

    Sent: an allreduce of the gradient.

    Args:
        betas: b1 and b2, in [0, 1).
        eps: at least 0.
        bias_correction: whether moments that began at zero are scaled up.
    """

    needs_weights: ClassVar[bool] = True

    betas: tuple[float, float] = (0.9, 0.99)

    def decays(self, decoupled: bool) -> bool:
        """Coupled weight decay is seen to here."""
        return not decoupled

    def update(self, grad: Tensor, state: State, info: Info) -> tuple[Tensor, State]:
        """Return the direction and the new state for a gradient. Consumes all."""
        return self.stepped(grad, state, info, grad)

    def stepped(self, grad: Tensor, state: State, info: Info, room: Tensor) -> tuple[Tensor, State]:
        """Return the direction and the new state for a gradient, which stays as it is.

        Consumes the moments and then `room`, whose memory may hold the direction.
        """
        state = self.moments(self._decayed(grad, info), state, info)
        return self.direction(state, info, room), state

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Take over moments; vmax begins at v, for that of compressed gradients is far larger."""
        state = super().warm_start(state, other, other_state)
        if not isinstance(other, CDAdam):
            return state
        return {**state, "vmax": namespace(state["v"]).copy(state["v"])}

    def direction(self, state: State, info: Info, room: Tensor) -> Tensor:
        """In the code's form or the paper's."""
        if self.bias_correction:
            return super().direction(state, info, room)
        xp, eps = namespace(room), self.setting(info, "eps")
        return xp.preconditioned(state["m"], state["vmax"] + eps, [1.0, 1.0], 0.0, room)

    def _decayed(self, grad: Tensor, info: Info) -> Tensor:
        """Return the gradient with that of coupled weight decay."""
        decay = self.decay(info, decoupled=False)
        if not decay:
            return grad
        if info.parameter is None:
            check.refuse(self, "parameter of " + info.name, None, "told where weights decay")
        return grad + decay * shaped(info.parameter, grad)


@dataclass(frozen=True)
class CDAdam(ExactCDAdam):
    """AMSGrad on an estimate of the mean gradient, updated by compressed differences.

    CD-AMSGrad, Algorithm 1 of its paper. Each rank i and the server keep a replica h_i of rank i's
    gradient, and all ranks the same estimate G of the mean gradient. With a compressor C:

    1. rank i sends c_i = C(g_i - h_i), and h_i <- h_i + c_i;
    2. the server, which keeps h = mean of h_i, has h <- h + mean of c_i, sends c = C(h - G) to all;
    3. all have G <- G + c, and take an AMSGrad step on G: m <- b1 m + (1 - b1) G,
       v <- b2 v + (1 - b2) G^2, vmax <- max(vmax, v), u = m' / (sqrt(vmax') + eps).

    The paper's: all this, b2 = 0.99, and without `bias_correction` u = m / sqrt(vmax + eps). The
    authors' code, and the default: m' and vmax' are divided by 1 - b1^t and 1 - b2^t. Scaled signs
    (the default C) are |x|_1 / d sgn(x) with sgn(0) = 1; the server is spread over the ranks, each
    of which serves one chunk (ours). The arguments from `compressor` on are ours:
    docs/optimizer-details.md explains them, weight decay, and the behaviour under policies.

    Sent with signs, of a tensor with d elements on n ranks: an alltoall of d / 8 bytes, an
    allgather of d / (8 n), and two scales: a 32nd of fp32's, times `bits`. State: m, v, vmax, G,
    h_i, and a part 1 / n of h - G: 20 + 4 / n bytes an element in fp32; with
    `pace` 24 + 8 / n.

    Args:
        betas: b1 and b2, in [0, 1).
        eps: at least 0; the paper's nu, where it is inside the root.
        bias_correction: whether moments that began at zero are scaled up.
        compressor: C; None for scaled signs, or a `contractive` compressor, such as TopK(0.01),
            of which 100 messages tell all of a gradient that stays.
        exact_first: whether gradients travel as they are in the first exchange.
        refresh: after how many exchanges they do so again; 0: never.
        whitened: whether signs are in units of sqrt(vmax); not with a `compressor`.
        bits: of an element, in the mean; in [0.1, 2]; not with a `compressor`.
        pace: which part of each message replicas follow, in (0, 1]; not with a `compressor`.
    """

    rescale_note: ClassVar[str] = "all replicas are the ranks' mean"
    per_rank_state: ClassVar[tuple[str, ...]] = OWN

    compressor: Compressor | None = None
    exact_first: bool = False
    refresh: int = 0
    whitened: bool = False
    bits: float = 1
    pace: float = 1

    def __post_init__(self) -> None:
        """Raises: ValueError when an argument is not what it must be."""
        super().__post_init__()
        for key in ("exact_first", "whitened"):
            if not isinstance(getattr(self, key), bool):
                check.refuse(self, key, getattr(self, key), "True or False")
        check.integer(self, "refresh", self.refresh, least=0)
        check_bits(self, self.bits)
        check.ratio(self, "pace", self.pace)
        if self.compressor is None:
            object.__setattr__(self, "per_rank_state", OWN if self.pace == 1 else (*OWN, *SLOW))
            return
        why = _unfit(self.compressor)
        if why:
            allowed = "None (scaled signs), or one that contracts, such as TopK(0.01)"
            check.refuse(self, "compressor", self.compressor, f"{allowed}: this one {why}")
        if self.whitened:
            check.refuse(self, "whitened", True, "False with a compressor, which has its own units")
        if self.bits != 1:
            check.refuse(self, "bits", self.bits, "1 with a compressor, which has its own")
        if self.pace != 1:
            check.refuse(self, "pace", self.pace, "1 with a compressor, which has its own errors")
        object.__setattr__(self, "per_rank_state", self.compressor.per_rank_state)
        object.__setattr__(self, "batching", self.compressor.batching)

    def dense(self) -> ExactCDAdam:
        """Return the stage that averages exactly."""
        return ExactCDAdam(self.betas, self.eps, self.bias_correction)

    def variant(self, step: int) -> int:
        """Return whether this exchange sends gradients, signs, or nothing."""
        again = step > 0 and self.refresh > 0 and step % self.refresh == 0
        if again or (step == 0 and self.exact_first):
            return EXACT
        return SIGNS if speaks(self.bits, step) else NOTHING

    @property
    def phases(self) -> bool:
        """Return whether `variant` ever changes."""
        return self.exact_first or self.refresh > 0 or self.bits != math.ceil(self.bits)

    def init(self, spec: Spec, info: Info) -> State:
        """Return the state of `AMSGrad`; `estimate`: G; `error`: -h_i; `server`: h - G of a chunk.

        With a `compressor` its own state, in which -h_i is its residual, and no `server`. With a
        `pace` below 1 `estimate`: H; `error`: e_i; `server`: the residual of this rank's chunk;
        `replica`: h_i; `behind`: h - H of the chunk.
        """
        state = super().init(spec, info) | {"estimate": spec.zeros((spec.size,), spec.wide)}
        if self.compressor is not None:
            return state | self.compressor.init(spec, info)
        length = Chunks(spec.size, info.size).length
        sizes = {"error": spec.size, "server": length}
        if self.pace != 1:
            sizes |= {"replica": spec.size, "behind": length}
        return state | {key: spec.zeros((size,), spec.wide) for key, size in sizes.items()}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Signs to those who average them and back, or the compressor's rounds."""
        xp, shape = namespace(grad), namespace(grad).shape(grad)
        if info.size == 1:
            yield ()  # moments are consumed only once the gradient is known to be finite
            mean = room = xp.reshape(grad, xp.shape(state["m"]))
        else:
            mean, state, room = yield from self._estimated(grad, state, info)
        direction, state = self.stepped(mean, state, info, room)
        return xp.reshape(direction, shape), state

    def _estimated(self, grad: Tensor, state: State, info: Info) -> RequestGenerator:
        """Return the estimate for the step, the state with new replicas, and free memory."""
        xp = namespace(grad)
        if info.phase == NOTHING:
            yield ()  # moments are consumed once all ranks' gradients are known to be finite
            if self.pace != 1:
                state = self._waited(grad, state)
            return state["estimate"], state, xp.reshape(grad, xp.shape(state["m"]))
        if info.phase == EXACT:
            fresh = shaped(grad, state["m"])
            mean = yield Allreduce(fresh)
            state = self._exactly(state, xp.copy(mean), fresh)
            return state["estimate"], state, mean
        if self.pace != 1:
            return (yield from self._paced(grad, state, info))
        talk = self._signed if self.compressor is None else self._compressed
        news, state, room = yield from talk(grad, state, info)
        state = {**state, "estimate": xp.accumulate(state["estimate"], news)}
        return state["estimate"], state, room

    def _signed(self, grad: Tensor, state: State, info: Info) -> RequestGenerator:
        """Return the servers' messages for all chunks; new replicas; free memory.

        What the server lacks of its own h - G when it has sent C of that, is h - G then. So are
        errors that are fed back, but for what each rank adds: there a gradient, here what it has
        changed by. Thus `averaged`, with -h_i as error, has h_i <- h_i + c_i done when the
        gradient is taken off again.
        """
        xp = namespace(grad)
        fresh = xp.reshape(grad, xp.shape(state["error"]))
        total = xp.accumulate(state["error"], fresh)
        news, rest, server = yield from self._told(total, state["server"], state, info)
        return news, {**state, "error": xp.subtract(rest, fresh), "server": server}, fresh

    def _told(
        self, total: Tensor, server: Tensor, state: State, info: Info
    ) -> Generator[Any, Any, tuple[Tensor, Tensor, Tensor]]:
        """`averaged`, in units of sqrt(vmax) if `whitened`."""
        bits = math.ceil(self.bits)
        if not self.whitened:
            return (yield from averaged(total, server, info, "l1", bits=bits))
        unit, mine = _units(state["vmax"], info)
        residual = total / unit, server / mine
        news, rest, server = yield from averaged(*residual, info, "l1", bits=bits)
        return news * unit, rest * unit, server * mine

    def _paced(self, grad: Tensor, state: State, info: Info) -> RequestGenerator:
        """With a pace below 1: what steps go by, and the new state.

        As the server's h is H + `behind`, and c what the mean of c_i was with that and what it
        owed, less what it owes now, h - H changes by p times what the latter has grown by.
        """
        xp, pace = namespace(grad), self.pace
        fresh = shaped(grad, state["m"])
        ahead = fresh - state["replica"]
        wanted = ahead + state["error"], state["server"] + state["behind"]
        news, rest, server = yield from self._told(*wanted, state, info)
        sent = xp.subtract(xp.accumulate(ahead, state["error"]), rest)
        grown = server - state["server"] - state["behind"]
        new = {
            "replica": xp.accumulate(state["replica"], sent * pace),
            "behind": xp.accumulate(state["behind"], grown * pace),
            "estimate": state["estimate"] + news * pace,
        }
        mean = xp.accumulate(news, state["estimate"])
        return mean, {**state, **new, "error": rest, "server": server}, fresh

    def _waited(self, grad: Tensor, state: State) -> State:
        """Return the state after a step by H, whose missing part stays in the errors."""
        xp = namespace(grad)
        ahead = shaped(grad, state["m"]) - state["replica"]
        error = xp.accumulate(state["error"], ahead)
        server = xp.accumulate(state["server"], state["behind"])
        return {**state, "error": error, "server": server}

    def _compressed(self, grad: Tensor, state: State, info: Info) -> RequestGenerator:
        """Estimate by the compressor, whose residual is -h_i, so that it sends C(g_i - h_i)."""
        xp, inner = namespace(grad), self.compressor
        assert inner is not None
        if isinstance(inner, Codec):
            own = xp.cast(xp.reshape(grad, xp.shape(state["error"])), "float32")
            message, total = inner.encode_accumulating(state["error"], own, info)
            news, told = yield from average(inner, message, xp.copy(own), info)
            rest = xp.reshape(inner.remove(total, told, info), xp.shape(own))
            news, error = xp.reshape(news, xp.shape(state["m"])), xp.subtract(rest, own)
            return news, {**state, "error": error}, news
        mine = {key: x for key, x in state.items() if key not in (*MOMENTS, "estimate")}
        fresh = xp.cast(grad, xp.dtype(mine["error"]))
        own = xp.copy(fresh)
        news, mine = yield from inner.exchange(fresh, mine, info)
        rest = inner.residual(mine)
        mine = inner.with_residual(mine, xp.subtract(rest, xp.reshape(own, xp.shape(rest))))
        news = xp.reshape(news, xp.shape(state["m"]))
        return news, {**state, **mine}, news

    def _exactly(self, state: State, mean: Tensor, replica: Tensor) -> State:
        """Return the state where G = h = `mean`; this rank's gradient `replica` stays."""
        xp = namespace(mean)
        state = self._replaced({**state, "estimate": mean}, replica)
        if self.compressor is not None:
            return state
        shape = xp.shape(state["server"])
        return {**state, self._ahead: xp.zeros(shape, xp.dtype(mean), xp.device(mean))}

    @property
    def _ahead(self) -> str:
        """Return this rank's part of h - G, or of h - H."""
        return "server" if self.pace == 1 else "behind"

    def _replaced(self, state: State, replica: Tensor) -> State:
        """Return the state with another h_i, which stays as it is."""
        xp = namespace(replica)
        if self.pace != 1:
            return {**state, "replica": xp.copy(replica)}
        if self.compressor is None:
            return {**state, "error": -replica}
        residual = xp.cast(-replica, xp.dtype(state["error"]))
        return self.compressor.with_residual(state, residual)

    # ----------------------------------------------------------------------- stages and other ranks
    def deactivate(self, state: State) -> State:
        """G, replicas, and all that the compressor has learned."""
        return {key: value for key, value in state.items() if key not in MOMENTS}

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Moments of another CDAdam; and G with replicas, where these mean the same."""
        if not isinstance(other, CDAdam):
            return state
        state = {**state, **{key: other_state[key] for key in MOMENTS if key in other_state}}
        kinds = {(rule.compressor is None, rule.pace == 1) for rule in (self, other)}
        if len(kinds) > 1:
            return state
        copied = namespace(state["m"]).copy
        state["estimate"] = copied(other_state["estimate"])
        if self.compressor is None or other.compressor is None:
            return {**state, **{key: copied(other_state[key]) for key in self.per_rank_state}}
        state = self.compressor.warm_start(state, other.compressor, other_state)
        residual = copied(other.compressor.residual(other_state))
        return self.compressor.with_residual(state, residual)

    def rescale(self, states: Sequence[State], spec: Spec, info: Info) -> State:
        """Preserve equal tensors; set all replicas to the mean of the old ones."""
        if self.compressor is not None or "estimate" not in states[0]:
            return self.rescale_from_one(states[0], spec, info)
        state = super().rescale(states, spec, info)
        if self.pace == 1:
            mean = sum(-old["error"] for old in states) / len(states)
            return self._settled(state, mean, info)
        mean = sum(old["replica"] for old in states) / len(states)
        return self._settled(state, mean, info) | {"error": joint_residual(states, spec.size)}

    def rescale_from_one(self, state: State, spec: Spec, info: Info) -> State:
        """Preserve equal tensors; set all replicas to G (or H). Every rank must do so."""
        state = super().rescale([state], spec, info)
        return self._settled(state, state["estimate"], info)

    def _settled(self, state: State, replica: Tensor, info: Info) -> State:
        """Return the state where all ranks have this replica."""
        state = self._replaced(state, replica)
        if self.compressor is not None:
            return state
        mine = chunk(replica - state["estimate"], info)
        return {**state, self._ahead: namespace(mine).copy(mine)}


CDAMSGrad = CDAdam
"""Another name of it."""


def _units(vmax: Tensor, info: Info) -> tuple[Tensor, Tensor]:
    """sqrt(vmax), and the part of it that is this rank's chunk; nowhere quite zero."""
    least = floored(vmax, FLOOR)
    return (least + TINY) ** 0.5, (chunk(least, info) + TINY) ** 0.5


def _unfit(compressor: Any) -> str:
    """Why a compressor cannot serve; nothing if it can."""
    if not isinstance(compressor, Compressor):
        return "is no compressor"
    if compressor.output != "gradient" or compressor.target != "gradient":
        return "returns no averaged gradients"
    if compressor.scope != "tensor" or compressor.topology_aware:
        return "does not keep its residual tensor by tensor, rank by rank"
    state = compressor.init(Spec((8, 8), "float32", backend("numpy")), Info())
    if "error" not in state:
        return "keeps nothing of what it does not send"
    if not compressor.contractive:
        return "does not say that it contracts"
    if compressor.phases:
        return "changes with the step"
    taken = sorted({*MOMENTS, "estimate"} & set(state))
    return f"has {taken[0]!r} in its state, as CDAdam has" if taken else ""
