"""Averaging of the ranks' models after each step: the part that all frameworks share."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.agreement import require_agreement
from accordion_hvd.comm.collectives import Traffic
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.base import Allreduce, Info, Tensor
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.averages import HALF, Averages, ModelParameters, MPIAverages, choose
from accordion_hvd.engine.guard import Guard
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.engine.membership import Gather
from accordion_hvd.engine.saved_state import check_like
from accordion_hvd.ops import backend
from accordion_hvd.ops.spec import Spec
from accordion_hvd.policies.accordion import Alternation

logger = logging.getLogger(__name__)

_numbers: Counter[int] = Counter()  # averagers made so far, by process set; equal on its members


class ModelAverager(checkpoint.Keeper):
    """Averages the models of the ranks after each step.

    Args:
        connect: function that returns a communicator of the present ranks of a process set; a
            single rank averages nothing.
        guard: guard that compares models when they should be equal.
        process_set: the ranks that average; None: all ranks.
        alternation: policy that switches between averaging of models and of gradients; None:
            models are always averaged.

    Attributes:
        steps: number of steps since the start of training or the last `rest`; the method's groups
            depend on it.
        total_steps: number of steps that this process has averaged.
        equal: whether the models of all ranks are equal since the last average.
        ready: whether averages have begun and no other state was loaded since.
    """

    def __init__(
        self,
        method: Averaging,
        parameters: ModelParameters,
        connect: Callable[[Any], Communicator],
        guard: Guard,
        process_set: Any = None,
        alternation: Alternation | None = None,
    ) -> None:
        self.method, self.parameters, self.guard = method, parameters, guard
        self.alternation, self.process_set = alternation, process_set
        self._connect, self.communicator = connect, connect(process_set)
        self.xp = self.communicator.xp
        self.steps, self.total_steps, self.equal, self.ready = 0, 0, True, False
        self._next = self.guard.next_after(0)  # step of the next comparison
        self._traffic, self._seconds = Traffic(), 0.0
        self._averages: Averages | None = None  # what averages, once it is chosen
        self._agreed: Sequence[TensorInfo] = ()  # tensors on which all ranks have agreed
        self._saved: dict[str, Any] = {}  # state to continue from
        self._committed: dict[str, Any] = {}  # state of the last commit
        self._apart = False  # whether models differed before the last change of ranks
        self._number = getattr(process_set, "process_set_id", None) or 0  # 0 is that of all ranks
        self._name = f"accordion.averaging.{self._number}.{_numbers[self._number]}"
        _numbers[self._number] += 1

    @property
    def single_rank(self) -> bool:
        return self.communicator.size == 1

    @property
    def without_waiting(self) -> bool:
        return isinstance(self._averages, MPIAverages)

    # ------------------------------------------------------------------------------------- set-up
    def set_up_early(self) -> None:
        """Set up before the first step, except in elastic jobs, which ranks join at any time.

        Raises the errors of `set_up`.
        """
        if os.environ.get("HOROVOD_ELASTIC") != "1":
            self.set_up()

    def set_up(self) -> None:
        """Choose between wait-avoiding averages and averages that wait; register all groups.

        Raises:
            ValueError: if the method does not support this number of ranks, or if groups cannot be
                registered.
            RuntimeError: if wait-avoiding averaging was requested but is not possible, or if the
                set-ups of the ranks differ.
        """
        if self.single_rank or self._averages is not None:
            return
        self._agree()
        device, of_all = self.parameters.device, self._number == 0
        self._averages = choose(self.method, self.communicator, self._traffic, device, of_all)

    def _agree(self) -> None:
        rows = tuple(self.parameters.tensors())
        lines = [f"{row.name} {row.shape} {row.dtype}" for row in rows]
        every = self.guard.every if self.guard.compares else None
        text = "\n".join([f"averaging {self.method!r} guard_every={every}", *lines])
        require_agreement(self.communicator, text, self.parameters.device)
        self._agreed = rows

    # ---------------------------------------------------------------------------------- each step
    def follow_mode(self) -> bool:
        """Apply the policy's last switch between averaging of models and of gradients.

        Call it before each step.

        Returns:
            Whether model averaging has just ended. The caller must then average the optimizer's
            slots once (`level`), because they differ between ranks.
        """
        if self.alternation is None or not self.alternation.take_mode_change():
            return False
        self.rest()
        return not self.alternation.averaging_models

    def prepare(self, given: ModelParameters | None = None) -> None:
        """Set up averaging before the first step; the models of all ranks must be equal.

        Args:
            given: tensors to read in place of `parameters`: those that pass through a graph.
        """
        if self.single_rank or self.ready:
            return
        self.set_up()
        if len(self.parameters.tensors()) != len(self._agreed):  # Keras makes variables late
            self._agree()
        assert self._averages is not None
        values = (given or self.parameters).read()
        self._compare(values, 1, ())
        self._averages.begin(self._name, values, self._saved)
        self.steps, self._saved = self._saved.get("steps", 0), {}
        self._next = self.guard.next_after(self.steps)
        self.equal = self.ready = True

    def average(
        self, lr: float, given: ModelParameters | None = None, rates: Sequence[float] = ()
    ) -> None:
        """Average the models after an optimizer step.

        Args:
            given: tensors to average in place of `parameters`, as in `prepare`.
            rates: all learning rates of the optimizer, which the guard compares.

        Raises:
            ValueError: if parameter groups have learning rates of their own now, and the method
                needs the one that has produced the model.
        """
        if self.single_rank:
            return
        if self.method.inner == "sgd" and len(set(rates)) > 1:
            check.refuse(self.method, "the learning rates of groups", rates, "equal in all steps")
        assert self._averages is not None
        model, began = given or self.parameters, time.perf_counter()
        self.equal = self._averages.average(model, self.steps, lr)
        if self.alternation is not None and self.alternation.over and not self.method.synchronizes:
            self._averages.average_now(model, self.steps)
            self.equal = True
        self._inform()
        self.steps, self.total_steps = self.steps + 1, self.total_steps + 1
        self._seconds += time.perf_counter() - began
        if self.equal and self.steps >= self._next:  # delayed until models are equal
            self._next = self.guard.next_after(self.steps)
            self._compare(model.read(), self.steps, rates or [lr])

    def average_now(self, statistics: ModelParameters | None = None) -> None:
        """Replace the models of all ranks by their average; all ranks call it after the same step.

        Args:
            statistics: tensors to average besides the parameters. They are averaged over Horovod,
                also if averaging is wait-avoiding.
        """
        if self.single_rank:
            return
        self.prepare()
        assert self._averages is not None
        self._averages.average_now(self.parameters, self.steps)
        self.equal = True
        self._inform()
        if statistics is not None:
            self.level(statistics)

    def _inform(self) -> None:
        if self.alternation is not None:
            self.alternation.equal = self.equal

    def level(self, tensors: ModelParameters) -> None:
        """Average `tensors` over the ranks with Horovod; all ranks must pass the same tensors."""
        values = tensors.read()
        if values and not self.single_rank:
            tensors.write(self._means("statistics", values))

    def rest(self) -> None:
        """Stop averaging while models are equal, until the next `prepare`; collective.

        Averaging of gradients then preserves the equality of the models.
        """
        if self._averages is not None:
            self._averages.rest()
        self.load({})

    def close(self) -> None:
        """Average the models a last time and release all resources; ends the progress thread."""
        if self._averages is None:
            return
        # Wait-avoiding averages end with one of all ranks anyway.
        if not (self.equal or self.without_waiting):
            self.average_now()
        self._averages.close(self.parameters)

    def _means(self, what: str, values: Sequence[Tensor], factor: float = 1.0) -> list[Tensor]:
        xp = self.xp
        wide = [xp.cast(x, "float32") if xp.dtype(x) in HALF else x for x in values]
        pending = self.communicator.launch(f"{self._name}.{what}", [Allreduce(x) for x in wide])
        pairs = zip(pending.result(), values, strict=True)
        return [xp.cast(mean * factor, xp.dtype(old)) for mean, old in pairs]

    def _compare(self, values: Sequence[Tensor], step: int, rates: Sequence[float]) -> None:
        if self.guard.mode != "off":
            names = ["learning rates", *(row.name for row in self._agreed)]
            lr = self.xp.asarray(np.array([*rates, 0.0], np.float32), self.parameters.device)
            sums = self.xp.stack([self.xp.checksum(value) for value in (lr, *values)])
            self.guard.compare(self.communicator, step, names, sums)

    # -------------------------------------------------------------------------------- elastic jobs
    def commit(self) -> None:
        self._committed = {**self.state(), "apart": not self.equal}

    def committed_norm(self) -> float:
        """Return 0: local progress of models is lost with a rank that dies, but no residual."""
        return 0.0

    def roll_back(self) -> None:
        saved = dict(self._committed)
        self._apart = saved.pop("apart", False)
        self.load(saved)
        self.equal = not self._apart

    def hand_over(self, gather: Gather) -> None:
        """Average the models, so that the progress of ranks that leave is kept; collective."""
        if not self.equal:
            self.average_now()

    def ranks_changed(self) -> None:
        self._apart = not self.equal
        self.load(self._shared_state())
        self.communicator, self._averages = self._connect(self.process_set), None

    def prepare_regroup(self, gather: Gather, leader: int) -> None:
        """Set the models to the average over the ranks with models of the present step; collective.

        Ranks that join then receive this average from the leader.
        """
        rows = gather((self.steps, self._apart))
        present = [steps == rows[leader][0] for steps, _ in rows]
        if self.single_rank or not any(apart for _, apart in rows):
            return
        values = self.parameters.read()
        if not present[self.communicator.rank]:
            # A rank that joins contributes nothing, and `factor` leaves it out of the mean.
            values = [value * 0 for value in values]
        factor = len(present) / sum(present)
        self.parameters.write(self._means("regroup", values, factor))

    def regroup(self, gather: Gather, leader: int) -> None:
        leads = self.communicator.rank == leader
        self._name, saved = gather((self._name, self._shared_state()) if leads else None)[leader]
        self._apart = False
        self.load(saved)

    def _shared_state(self) -> dict[str, Any]:
        state = self.state()
        shared = [{k: v for k, v in row.items() if k in self.method.shared}
                  for row in state["states"]]  # fmt: skip
        return {**state, "states": shared} if self.steps else {}

    # --------------------------------------------------------------------------------- statistics
    def stats(self) -> dict[str, Any]:
        """Return this rank's counts since the start of this process.

        Returns:
            A dict with these keys:

            - "steps": number of steps.
            - "sent": bytes that this rank has sent (if averaging is wait-avoiding, over MPI).
            - "seconds": seconds spent in averages, waiting included.
            - "reports": reports of the method, one per kind of parameters (`Averaging.report`).
            - "on_time", "late": numbers of averages that contained this rank's newest model, or an
              older one; "lag": the largest age of an older one, in versions. Only if averaging is
              wait-avoiding.
        """
        own = self._averages
        counts = {"sent": self._traffic.sent} if own is None else own.counts()
        return {
            **counts, "steps": self.total_steps, "seconds": self._seconds,
            "reports": [] if own is None else own.reports(),
        }  # fmt: skip

    # -------------------------------------------------------------------------------- checkpoints
    @property
    def exchange(self) -> ModelAverager:
        """Return this object, which `save_state` saves."""
        return self

    def expect(self, names: Sequence[str]) -> None:
        """Do nothing: there is nothing to prepare before a restore."""

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints: the number of steps and the method's state.

        `save_state` saves it for all ranks. Without `save_state`, call `average_now` and save this
        state on each rank.
        """
        states = [] if self._averages is None else self._averages.states()
        return {"steps": self.steps, "version": self._version(), "states": states} | self._saved

    def _version(self) -> int:
        return self.steps if self._averages is None else self._averages.version(self.steps)

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from a result of `state` of the same rank, together with the model saved then.

        The state takes effect at the next step, before which the models of all ranks must be equal.
        """
        self._saved, self.ready = saved, False
        self.steps, self.equal = saved.get("steps", 0), True

    def describe(self) -> dict[str, Any]:
        rows = self.parameters.tensors()
        return {
            "averaging": repr(self.method),
            "steps": self.steps,
            "version": self._version(),
            "tensors": [row.name for row in rows],
            "shapes": [[row.dtype, *row.shape] for row in rows],
        }

    def export(self) -> dict[str, np.ndarray]:
        """Return this rank's states; ValueError if models differ, so that none could be saved."""
        if not self.equal:
            raise ValueError(
                f"after step {self.steps} of {self.method!r} the models of the ranks differ; call "
                "optimizer.average_now() before"
            )
        states = enumerate(self.state()["states"])
        return {f"{i}/{key}": value for i, state in states for key, value in state.items()}

    def restoring(
        self, row: dict[str, Any], load: checkpoint.Loader, ranks: int
    ) -> checkpoint.Restore:
        """Check a saved state, and return the function that restores it.

        On another number of ranks, it restores only the parts that are equal on all ranks.
        """
        self._check_fits(row)
        own = ranks == self.communicator.size
        arrays = load(self.communicator.rank if own else 0)
        states = self._checked(arrays, own)
        begun = {"steps": row["steps"], "version": row["version"]} if own else {}

        def restore() -> None:
            self.load({**begun, "states": states})
            if not own and self.communicator.rank == 0:
                self._report_changed_ranks(ranks, {name.partition("/")[2] for name in arrays})

        return restore

    def _checked(self, arrays: Mapping[str, np.ndarray], own: bool) -> list[dict[str, np.ndarray]]:
        sizes: Counter[tuple[str, str]] = Counter()
        for x in self.parameters.tensors():
            sizes["float32" if x.dtype in HALF else x.dtype, x.kind] += x.size
        info = Info(rank=self.communicator.rank, size=self.communicator.size)
        specs = [Spec((n,), dtype, backend("numpy")) for (dtype, _), n in sizes.items()]
        states: list[dict[str, np.ndarray]] = [{} for _ in specs]
        by_number = {str(i): state for i, state in enumerate(states)}
        for name, value in arrays.items():
            number, _, key = name.partition("/")
            check.has("state", "list of vectors", by_number, [number])
            by_number[number][key] = value
        for spec, state in zip(specs, states, strict=True):
            made = self.method.init(spec, info) if state else {}
            if state.keys() != made.keys():
                check.refuse("state", "list of tensors", sorted(state), f"{sorted(made)}")
            for key in [k for k in state if not (own or k in self.method.shared)]:
                del state[key]
            for key, value in state.items():
                check_like(key, value, made[key], spec)
        return states

    def _check_fits(self, row: dict[str, Any]) -> None:
        check.has("state", "saved state", row, ("steps", "tensors"))
        if row.get("averaging") != repr(self.method):
            saved = row.get("averaging") or row.get("compression")
            raise ValueError(f"models are averaged by {self.method!r}, but {saved} was saved")
        ours = self.describe()
        check.has("state", "saved state", row, ours)
        for key in ("steps", "version"):
            check.integer("state", key, row[key], least=0)
        names = zip(ours["tensors"], row["tensors"], strict=False)
        same = len(ours["tensors"]) == len(row["tensors"])
        same &= all(checkpoint.same_name(name, other) for name, other in names)
        if not same or ours["shapes"] != row["shapes"]:
            raise ValueError(
                f"the model's parameters {ours['tensors']} {ours['shapes']} were "
                f"{row['tensors']} {row['shapes']} when saved"
            )

    def _report_changed_ranks(self, ranks: int, keys: set[str]) -> None:
        parts = ["periods and groups start again"]
        lost = sorted(keys - set(self.method.shared))
        parts += [f"per-rank state ({', '.join(lost)}) is discarded"] if lost else []
        restored = sorted(keys & set(self.method.shared))
        parts += [f"shared state ({', '.join(restored)}) is restored"] if restored else []
        text = f"saved on {ranks} ranks, continues on {self.communicator.size}: "
        logger.info("%r: %s%s.", self.method, text, "; ".join(parts))
