"""Features that lie with their owners, fetched when a batch needs them."""

from __future__ import annotations

import importlib
import queue
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.base import Allgather, Alltoall
from accordion_hvd.graph.partition import checked_owners
from accordion_hvd.graph.rows import wire_of
from accordion_hvd.graph.structure import Array, Graph, digest

FRAMEWORKS = ("torch", "tensorflow")
COUNTED = ("fetches", "rows", "remote", "served", "sent", "received")
REFUSED = -1
"""Sent instead of nodes' numbers by a rank that cannot go on, so that nobody waits for it."""


class FeatureStore:
    """Rows of features by node, most of which other ranks hold.

    A fetch is two alltoalls of uneven shares: the numbers of the nodes that are wanted, each once,
    to their owners, and their rows back. All ranks must fetch equally often, in the same order;
    a rank that needs nothing fetches no nodes. An error on one rank (a node that does not exist,
    say) raises on all ranks. Before the first fetch ranks compare their graphs.

    Args:
        rows: (owned, features), the rows of this rank's nodes by ascending node; floating point,
            kept in fp32. May be empty (of shape (0, features)).
        part: a `Partition`, or the owner of each node; alike on all ranks.
        communicator: "torch" or "tensorflow" (all ranks of `horovod.torch`, `horovod.tensorflow`),
            or a `Communicator`.
        graph: if given, ranks also compare their graphs.
        compression: None, "fp16", "bf16" or "int8" (`accordion_hvd.graph.rows`): how rows travel.
            Rows of this rank are exact.
        name: distinguishes stores that are in use at the same time.

    Attributes:
        features: of a row.
        width: bytes of a row on the wire.
    """

    def __init__(
        self,
        rows: Any,
        part: Any,
        communicator: str | Communicator,
        *,
        graph: Graph | None = None,
        compression: Any = None,
        name: str = "features",
    ) -> None:
        self.communicator = communicator_of(communicator)
        self.name, self.rank, self.size = name, self.communicator.rank, self.communicator.size
        self.wire = wire_of(compression)
        self._agreed, self._problem = False, ""
        self._counts = dict.fromkeys(COUNTED, 0) | {"seconds": 0.0, "waited": 0.0}
        self._queue: queue.SimpleQueue[tuple[Future[Array], Any]] | None = None
        try:
            self._take(rows, part, graph)
        except ValueError as error:  # told to all ranks when they meet
            self._problem = str(error)

    def _take(self, rows: Any, part: Any, graph: Graph | None) -> None:
        nodes = len(getattr(part, "owner", part))
        self.owner = checked_owners(self, part, nodes, self.size)
        if graph is not None and graph.nodes != nodes:
            check.refuse(self, "part", f"of {nodes} nodes", f"of the graph's {graph.nodes}")
        mine = np.flatnonzero(self.owner == self.rank)
        given = np.asarray(rows)
        if given.ndim != 2 or given.dtype.kind != "f" or given.shape[1] < 1:
            kind = f"of shape {given.shape} and type {given.dtype}"
            check.refuse(self, "rows", kind, "floating point of shape (owned nodes, features)")
        if len(given) != len(mine):
            check.refuse(self, "rows", f"{len(given)} rows", f"{len(mine)}, as this rank owns")
        self.rows = np.ascontiguousarray(given, np.float32)
        self.features = self.rows.shape[1]
        self.width = self.wire.width(self.features)
        bad = ~np.isfinite(self.rows).all(1)
        if bad.any():
            raise ValueError(
                f"{type(self).__name__}: the row of node {mine[bad][0]} has NaN or infinity, but "
                "features must be finite."
            )
        with np.errstate(over="ignore"):
            self._coded = self.wire.encode(self.rows)
        self._check_coded(mine)
        self._row = np.zeros(nodes, np.int64)
        self._row[mine] = np.arange(len(mine))
        self._number = np.int32 if nodes < 2**31 else np.int64
        self._prints = [nodes, self.features, sum(self.wire.name.encode())]
        self._prints += [digest(self.owner), graph.fingerprint() if graph is not None else 0]

    def _check_coded(self, mine: Array) -> None:
        """16 bits may overflow."""
        if self.wire.name == "fp16" and self.rows.size and np.abs(self.rows).max() > 65504:
            node = mine[np.abs(self.rows).max(1).argmax()]
            raise ValueError(
                f"{type(self).__name__}: the row of node {node} has values beyond 65504, which "
                "fp16 cannot hold; choose compression 'bf16', 'int8' or None."
            )

    # ------------------------------------------------------------------------------- for callers
    def agree(self) -> None:
        """Compare with all ranks what they hold; the first fetch does so otherwise. Collective.

        Raises:
            ValueError: on all ranks, one has bad features, or they hold different things.
        """
        self.communicator.run(f"{self.name}.agree", self.agreeing())

    def fetch(self, nodes: Any) -> Array:
        """Return the rows of some nodes, (nodes, features) fp32; a node may come twice. Collective.

        Raises:
            ValueError: on all ranks, one asks for a node that does not exist, or see `agree`.
            PayloadError: a rank asks for rows of somebody else, or sent what it was not asked for.
        """
        if self._queue is None:
            return self._fetched(nodes)
        return self.result(self.prefetch(nodes))

    def prefetch(self, nodes: Any) -> Future[Array]:
        """Fetch in the background; `.result()` waits. Collective, in the order of the calls.

        Use `store.result(future)` to have the waiting counted.
        """
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(self._queue,), daemon=True).start()
        future: Future[Array] = Future()
        self._queue.put((future, np.array(nodes)))
        return future

    def result(self, future: Future[Array]) -> Array:
        """Return the rows that `prefetch` has fetched."""
        began = time.perf_counter()
        try:
            return future.result()
        finally:
            self._counts["waited"] += time.perf_counter() - began

    def stats(self) -> dict[str, float]:
        """Counts since the beginning, of this rank.

        `fetches`; `rows` returned; `remote`: rows that came from other ranks (each once a fetch);
        `served`: rows sent to others; bytes `sent` and `received`, numbers of nodes (4 bytes each
        below 2^31 nodes) and rows together; `seconds` that fetches took, and `waited`: of them,
        what prefetching has not hidden.
        """
        return dict(self._counts)

    def _serve(self, jobs: queue.SimpleQueue[tuple[Future[Array], Any]]) -> None:
        while True:
            future, nodes = jobs.get()
            try:
                future.set_result(self._fetched(nodes, behind=True))
            except BaseException as error:  # it is raised where the result is asked for
                future.set_exception(error)

    def _fetched(self, nodes: Any, behind: bool = False) -> Array:
        began = time.perf_counter()
        found = self.communicator.run(f"{self.name}.fetch", self.fetching(nodes))
        seconds = time.perf_counter() - began
        self._counts["seconds"] += seconds
        self._counts["waited"] += 0.0 if behind else seconds
        return found

    # ----------------------------------------------------------------------------- conversations
    def agreeing(self) -> Generator[Any, Any, None]:
        """Return the generator of `agree`, for `one_process.lockstep`."""
        xp = self.communicator.xp
        prints = [0] * len(_WHAT) if self._problem else self._prints
        text = np.frombuffer(self._problem.encode(), np.uint8)
        tables, texts = yield (
            Allgather(xp.asarray(np.array(prints, np.int64))),
            Allgather(xp.asarray(text.copy()), uneven=True),
        )
        for rank, said in enumerate(texts):
            if problem := xp.to_numpy(said).tobytes().decode():
                raise ValueError(f"rank {rank}: {problem}")
        table = np.stack([xp.to_numpy(row) for row in tables])
        for column, what in enumerate(_WHAT):
            differ = np.flatnonzero(table[:, column] != table[0, column])
            if len(differ):
                raise ValueError(
                    f"{type(self).__name__}: rank {differ[0]} has another {what} than rank 0, but "
                    "all must have the same."
                )
        self._agreed = True

    def fetching(self, nodes: Any) -> Generator[Any, Any, Array]:
        """Return the generator of `fetch`, for `one_process.lockstep`."""
        if not self._agreed:
            yield from self.agreeing()
        xp, wanted = self.communicator.xp, np.asarray(nodes)
        problem = self._problem_with(wanted)
        wanted = np.zeros(0, np.int64) if problem else wanted.astype(np.int64)
        owner = self.owner[wanted]
        far = np.flatnonzero(owner != self.rank)
        asked, first, place = np.unique(
            owner[far] * len(self.owner) + wanted[far], return_index=True, return_inverse=True
        )  # each once, by owner
        numbers = wanted[far][first].astype(self._number)
        counts = np.bincount(owner[far][first], minlength=self.size)
        if problem:
            numbers, counts = np.full(self.size, REFUSED, self._number), np.ones(self.size, int)
        came = yield Alltoall(xp.asarray(numbers), splits=tuple(counts.tolist()))
        requests = [xp.to_numpy(part) for part in came]
        _stop_together(requests, problem)
        parts = yield from self._served(requests)
        short = [rank for rank, part in enumerate(parts) if len(part) != counts[rank]]
        if short:
            check.refuse_payload(short, "it sent another number of rows than it was asked for")
        self._count(len(wanted), len(asked), sum(map(len, requests)))
        found = np.empty((len(wanted), self.features), np.float32)
        near = np.flatnonzero(owner == self.rank)
        found[near] = self.rows[self._row[wanted[near]]]
        found[far] = self.wire.decode(np.concatenate(parts), self.features)[place]
        return found

    def _served(self, requests: list[Array]) -> Generator[Any, Any, list[Array]]:
        """Send the rows that others ask for; what they send. Who asks amiss gets nothing."""
        xp = self.communicator.xp
        doubtful = [rank for rank, part in enumerate(requests) if not self._mine(part)]
        granted = [part[: 0 if i in doubtful else None] for i, part in enumerate(requests)]
        payload = self._coded[self._row[np.concatenate(granted)]]
        parts = yield Alltoall(xp.asarray(payload), splits=tuple(map(len, granted)))
        if doubtful:
            check.refuse_payload(doubtful, "it asks for rows of nodes that this rank does not own")
        return [xp.to_numpy(part) for part in parts]

    def _problem_with(self, nodes: Array) -> str:
        """Why these cannot be fetched; "" if they can."""
        if nodes.ndim != 1 or (nodes.size and nodes.dtype.kind not in "iu"):
            given = f"of shape {nodes.shape} and type {nodes.dtype}"
            return f"{type(self).__name__}: nodes is {given}, but must be a list of integers."
        wrong = nodes[(nodes < 0) | (nodes >= len(self.owner))]
        if wrong.size:
            allowed = f"from 0 to {len(self.owner) - 1}"
            return f"{type(self).__name__}: a node is {wrong[0]}, but must be {allowed}."
        return ""

    def _mine(self, numbers: Array) -> bool:
        inside = (numbers >= 0) & (numbers < len(self.owner))
        return bool(inside.all()) and bool((self.owner[numbers] == self.rank).all())

    def _count(self, rows: int, remote: int, served: int) -> None:
        number, width = np.dtype(self._number).itemsize, self.width
        sent, received = number * remote + width * served, number * served + width * remote
        news = 1, rows, remote, served, sent, received
        for key, value in zip(COUNTED, news, strict=True):
            self._counts[key] += value


def communicator_of(wanted: str | Communicator) -> Communicator:
    """Return the communicator itself, or that of all ranks of a framework."""
    if isinstance(wanted, Communicator):
        return wanted
    check.one_of("FeatureStore", "communicator", wanted, FRAMEWORKS)
    module = importlib.import_module(f"accordion_hvd.{wanted}.communicator")
    return module.HorovodCommunicator()


_WHAT = ("number of nodes", "number of features", "compression", "partition", "graph")


def _stop_together(requests: list[Array], problem: str) -> None:
    """Raise ValueError if some rank has refused to go on."""
    if problem:
        raise ValueError(problem)
    refusing = [rank for rank, part in enumerate(requests) if len(part) and part[0] == REFUSED]
    if refusing:
        who = ", ".join(map(str, refusing))
        raise ValueError(f"FeatureStore: rank {who} asked for nodes that do not exist.")
