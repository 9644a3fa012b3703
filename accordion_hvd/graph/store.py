"""A distributed store of node features: each rank stores its own nodes' rows and fetches others."""

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
from accordion_hvd.graph.rows import wire_of
from accordion_hvd.graph.structure import Array, Graph, checked_owners, digest

FRAMEWORKS = ("torch", "tensorflow")
COUNTED = ("fetches", "rows", "remote", "served", "sent", "received")
REFUSED = -1
"""Value that a rank with an error sends instead of node numbers, so that all ranks stop."""


class FeatureStore:
    """A table of node features, distributed over the ranks.

    A fetch takes two uneven alltoalls: the first sends the numbers of the requested nodes, without
    duplicates, to their owners; the second returns their rows. All ranks must fetch equally often,
    in the same order; a rank that needs no rows fetches an empty list of nodes. An error on one
    rank (such as a node that does not exist) raises on all ranks. Before the first fetch, the ranks
    check that they agree on the partition, the number of features, the compression and the graph.

    Args:
        rows: (owned, features), the rows of this rank's nodes, by ascending node; floating point,
            stored in fp32. May be empty, of shape (0, features).
        part: a `Partition`, or the owner of each node; equal on all ranks.
        communicator: "torch" or "tensorflow" (all ranks of `horovod.torch` or
            `horovod.tensorflow`), or a `Communicator`.
        graph: the graph, to be compared between ranks; None to skip this comparison.
        compression: format of the rows in messages: None, "fp16", "bf16" or "int8" (see
            `accordion_hvd.graph.rows`). Rows of this rank's own nodes are always exact.
        name: name of the store, unique among the stores in use at the same time.

    Attributes:
        features: number of features.
        width: bytes of a row in a message.
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
        except ValueError as error:  # reported to all ranks when they compare their stores
            self._problem = str(error)

    def _take(self, rows: Any, part: Any, graph: Graph | None) -> None:
        nodes = len(getattr(part, "owner", part))
        self.owner = checked_owners(self, part, nodes, self.size)
        if graph is not None and graph.nodes != nodes:
            check.refuse(self, "part", f"of {nodes} nodes", f"of the graph's {graph.nodes}")
        own = np.flatnonzero(self.owner == self.rank)
        given = np.asarray(rows)
        if given.ndim != 2 or given.dtype.kind != "f" or given.shape[1] < 1:
            kind = f"of shape {given.shape} and type {given.dtype}"
            check.refuse(self, "rows", kind, "floating point of shape (owned nodes, features)")
        if len(given) != len(own):
            allowed = f"{len(own)}, one per node of the rank"
            check.refuse(self, "rows", f"{len(given)} rows", allowed)
        self.rows = np.ascontiguousarray(given, np.float32)
        self.features = self.rows.shape[1]
        self.width = self.wire.width(self.features)
        bad = ~np.isfinite(self.rows).all(1)
        if bad.any():
            raise ValueError(
                f"{type(self).__name__}: the row of node {own[bad][0]} has NaN or infinity, but "
                "features must be finite."
            )
        with np.errstate(over="ignore"):
            self._coded = self.wire.encode(self.rows)
        self._check_range(own)
        self._row = np.zeros(nodes, np.int64)
        self._row[own] = np.arange(len(own))
        self._number = np.int32 if nodes < 2**31 else np.int64
        self._fingerprints = [nodes, self.features, sum(self.wire.name.encode())]
        self._fingerprints += [digest(self.owner), graph.fingerprint() if graph is not None else 0]

    def _check_range(self, own: Array) -> None:
        """Raise ValueError if a value overflows in fp16."""
        if self.wire.name == "fp16" and self.rows.size and np.abs(self.rows).max() > 65504:
            node = own[np.abs(self.rows).max(1).argmax()]
            raise ValueError(
                f"{type(self).__name__}: the row of node {node} has values beyond 65504, which "
                "fp16 cannot hold; choose compression 'bf16', 'int8' or None."
            )

    # ------------------------------------------------------------------------------ public methods
    def agree(self) -> None:
        """Check that all ranks agree on the store; otherwise the first fetch does. Collective.

        Raises:
            ValueError: on all ranks, if the features of a rank are invalid or two ranks differ.
        """
        self.communicator.run(f"{self.name}.agree", self.agreeing())

    def fetch(self, nodes: Any) -> Array:
        """Return the rows of some nodes, (nodes, features) fp32. Collective.

        Args:
            nodes: integers; duplicates are allowed.

        Raises:
            ValueError: on all ranks, if a rank requests a node that does not exist, or if the ranks
                do not agree (see `agree`).
            PayloadError: if another rank requests rows that this rank does not own, or sends a
                wrong number of rows.
        """
        if self._queue is None:
            return self._run_fetch(nodes)
        return self.result(self.prefetch(nodes))

    def prefetch(self, nodes: Any) -> Future[Array]:
        """Fetch rows in a background thread. Collective, in the order of the calls.

        `store.result(future)` waits for the rows and counts the time; `future.result()` only waits.
        """
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(self._queue,), daemon=True).start()
        future: Future[Array] = Future()
        self._queue.put((future, np.array(nodes)))
        return future

    def result(self, future: Future[Array]) -> Array:
        """Wait for the rows of a `prefetch` and return them."""
        began = time.perf_counter()
        try:
            return future.result()
        finally:
            self._counts["waited"] += time.perf_counter() - began

    def stats(self) -> dict[str, float]:
        """Return this rank's counters.

        - `fetches`: number of fetches.
        - `rows`: rows returned.
        - `remote`: rows received from other ranks, without duplicates within a fetch.
        - `served`: rows sent to other ranks.
        - `sent`, `received`: bytes of node numbers (4 bytes each below 2^31 nodes) and rows.
        - `seconds`: duration of all fetches.
        - `waited`: the part of `seconds` that prefetching has not hidden.
        """
        return dict(self._counts)

    def _serve(self, jobs: queue.SimpleQueue[tuple[Future[Array], Any]]) -> None:
        while True:
            future, nodes = jobs.get()
            try:
                future.set_result(self._run_fetch(nodes, background=True))
            except BaseException as error:  # raised when the caller asks for the result
                future.set_exception(error)

    def _run_fetch(self, nodes: Any, background: bool = False) -> Array:
        began = time.perf_counter()
        rows = self.communicator.run(f"{self.name}.fetch", self.fetching(nodes))
        seconds = time.perf_counter() - began
        self._counts["seconds"] += seconds
        self._counts["waited"] += 0.0 if background else seconds
        return rows

    # ------------------------------------------------------------------------- exchange generators
    def agreeing(self) -> Generator[Any, Any, None]:
        """Return the generator of `agree`, for `one_process.lockstep`."""
        xp = self.communicator.xp
        fingerprints = [0] * len(_COMPARED) if self._problem else self._fingerprints
        text = np.frombuffer(self._problem.encode(), np.uint8)
        tables, texts = yield (
            Allgather(xp.asarray(np.array(fingerprints, np.int64))),
            Allgather(xp.asarray(text.copy()), uneven=True),
        )
        for rank, received in enumerate(texts):
            if problem := xp.to_numpy(received).tobytes().decode():
                raise ValueError(f"rank {rank}: {problem}")
        table = np.stack([xp.to_numpy(row) for row in tables])
        for column, aspect in enumerate(_COMPARED):
            differ = np.flatnonzero(table[:, column] != table[0, column])
            if len(differ):
                raise ValueError(
                    f"{type(self).__name__}: rank {differ[0]} has another {aspect} than rank 0, "
                    "but all ranks must have the same."
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
        remote = np.flatnonzero(owner != self.rank)
        requested, first, place = np.unique(
            owner[remote] * len(self.owner) + wanted[remote], return_index=True, return_inverse=True
        )  # without duplicates, sorted by owner
        numbers = wanted[remote][first].astype(self._number)
        counts = np.bincount(owner[remote][first], minlength=self.size)
        if problem:
            numbers, counts = np.full(self.size, REFUSED, self._number), np.ones(self.size, int)
        received = yield Alltoall(xp.asarray(numbers), splits=tuple(counts.tolist()))
        requests = [xp.to_numpy(part) for part in received]
        _raise_together(requests, problem)
        parts = yield from self._exchange_rows(requests)
        wrong = [rank for rank, part in enumerate(parts) if len(part) != counts[rank]]
        if wrong:
            check.refuse_payload(wrong, "it sent another number of rows than requested")
        self._count(len(wanted), len(requested), sum(map(len, requests)))
        rows = np.empty((len(wanted), self.features), np.float32)
        local = np.flatnonzero(owner == self.rank)
        rows[local] = self.rows[self._row[wanted[local]]]
        rows[remote] = self.wire.decode(np.concatenate(parts), self.features)[place]
        return rows

    def _exchange_rows(self, requests: list[Array]) -> Generator[Any, Any, list[Array]]:
        """Send the rows that other ranks request, and return the rows that they send.

        A rank that requests rows of another owner gets none.
        """
        xp = self.communicator.xp
        invalid = [rank for rank, part in enumerate(requests) if not self._owns(part)]
        granted = [part[: 0 if i in invalid else None] for i, part in enumerate(requests)]
        payload = self._coded[self._row[np.concatenate(granted)]]
        parts = yield Alltoall(xp.asarray(payload), splits=tuple(map(len, granted)))
        if invalid:
            check.refuse_payload(invalid, "it requested rows of nodes that this rank does not own")
        return [xp.to_numpy(part) for part in parts]

    def _problem_with(self, nodes: Array) -> str:
        """Return an error message if the nodes cannot be fetched, else ""."""
        if nodes.ndim != 1 or (nodes.size and nodes.dtype.kind not in "iu"):
            given = f"of shape {nodes.shape} and type {nodes.dtype}"
            return f"{type(self).__name__}: nodes is {given}, but must be a list of integers."
        wrong = nodes[(nodes < 0) | (nodes >= len(self.owner))]
        if wrong.size:
            allowed = f"from 0 to {len(self.owner) - 1}"
            return f"{type(self).__name__}: a node is {wrong[0]}, but must be {allowed}."
        return ""

    def _owns(self, numbers: Array) -> bool:
        inside = (numbers >= 0) & (numbers < len(self.owner))
        return bool(inside.all()) and bool((self.owner[numbers] == self.rank).all())

    def _count(self, rows: int, remote: int, served: int) -> None:
        number, width = np.dtype(self._number).itemsize, self.width
        sent, received = number * remote + width * served, number * served + width * remote
        increments = 1, rows, remote, served, sent, received
        for key, value in zip(COUNTED, increments, strict=True):
            self._counts[key] += value


def communicator_of(wanted: str | Communicator) -> Communicator:
    """Return a communicator; for the name of a framework, that of all its ranks."""
    if isinstance(wanted, Communicator):
        return wanted
    check.one_of("FeatureStore", "communicator", wanted, FRAMEWORKS)
    module = importlib.import_module(f"accordion_hvd.comm.horovod.{wanted}")
    return module.HorovodCommunicator()


_COMPARED = ("number of nodes", "number of features", "compression", "partition", "graph")


def _raise_together(requests: list[Array], problem: str) -> None:
    """Raise ValueError if this rank has a problem, or another rank has sent `REFUSED`."""
    if problem:
        raise ValueError(problem)
    refusing = [rank for rank, part in enumerate(requests) if len(part) and part[0] == REFUSED]
    if refusing:
        ranks = ", ".join(map(str, refusing))
        raise ValueError(f"FeatureStore: rank {ranks} asked for nodes that do not exist.")
