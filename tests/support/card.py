"""A GPU without a GPU: tensors that take its branches, and a watch of what the host waits for.

A `Card` holds a tensor on the CPU and says that it is on another device ("meta"), so that code
takes the branches of a GPU and everything is computed. `Watch` counts the operations on cards, and
records those that would make the host wait for a GPU: reads, copies from the host, and operations
that are one call on a CPU and hundreds on a GPU.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from accordion_hvd.comm.torch_distributed.communicator import Handle, TorchCommunicator

DEVICE = torch.device("meta")

VIEWS = (
    "view", "transpose", "detach", "alias", "slice", "select", "unsqueeze", "squeeze", "expand",
    "unbind", "split", "as_strided", "t.default", "permute", "is_set_to",
)  # fmt: skip
"""Parts of the names of operations without a kernel."""

READS = (
    "_local_scalar_dense", "nonzero", "equal.default", "masked_select", "unique", "bincount",
    "is_nonzero",
)  # fmt: skip
"""Parts of the names of operations whose result the host must know."""

SLOW = ("linalg_qr", "linalg_svd", "linalg_eigh", "linalg_eig", "lstsq")
"""Parts of the names of operations that take hundreds of kernels, or wait, on a GPU."""


class Card(torch.Tensor):
    """A tensor with the data of `inner`."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Card:
        card = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=DEVICE,
        )  # fmt: skip
        card.inner = inner
        return card

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, call: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _serve(call, args, kwargs or {}, None)


class Watch(TorchDispatchMode):
    """A context in which new tensors for `DEVICE` are cards; `recording` says what happens to them.

    Attributes:
        operations: number of calls by operation, without views.
        waits: what the host would wait for: the kind, the operation and the line of the package.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.waits: list[tuple[str, str, str]] = []
        self._on = False
        self._values = _Values(self)

    def __enter__(self) -> Watch:
        self._synchronize, torch.cuda.synchronize = torch.cuda.synchronize, self._wait
        self._values.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._values.__exit__(*error)
        torch.cuda.synchronize = self._synchronize

    def _wait(self, *device: Any) -> None:
        if self._on:
            self.waits.append(("read", "torch.cuda.synchronize", _place()))

    @contextmanager
    def recording(self, on: bool = True) -> Iterator[None]:
        """Record what happens in this context, or do not."""
        before, self._on = self._on, on
        try:
            yield
        finally:
            self._on = before

    def __torch_dispatch__(
        self, call: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _serve(call, args, kwargs or {}, self if self._on else None)

    def note(self, call: Any, args: Any, kwargs: Any) -> None:
        """Record an operation."""
        name = str(call)
        if not any(part in name for part in VIEWS):
            self.operations[name] += 1
        kind = _kind(name, args, kwargs)
        if kind:
            self.waits.append((kind, name, _place()))


class _Values(TorchFunctionMode):
    """Sees values that become tensors, for which PyTorch asks no dispatch mode on this device.

    These are `torch.tensor(1)`, and `x[index] = 1` with a tensor as index.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, call: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if call is torch.Tensor.__setitem__ and self._watch._on:
            x, index, value = args
            by_tensor = any(isinstance(i, torch.Tensor) for i in tree_leaves(index))
            if isinstance(x, Card) and by_tensor and not isinstance(value, torch.Tensor):
                self._watch.waits.append(("copy", "x[index] = value", _place()))
        if call is not torch.tensor or device is None or torch.device(device) != DEVICE:
            return call(*args, **kwargs)
        if self._watch._on:
            self._watch.waits.append(("copy", "torch.tensor", _place()))
        return Card(torch.tensor(*args, **{**kwargs, "device": "cpu"}))


def _serve(call: Any, args: Any, kwargs: dict[str, Any], watch: Watch | None) -> Any:
    """Call an operation with the cards' tensors; results are cards if they are on their device."""
    leaves = tree_leaves((args, kwargs))
    cards = {id(x.inner): x for x in leaves if isinstance(x, Card)}
    device = kwargs.get("device")
    lands = bool(cards) if device is None else torch.device(device) == DEVICE
    if not cards and not lands:
        return call(*args, **kwargs)
    if watch is not None:
        watch.note(call, args, kwargs)
    if device is not None and lands:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map(_inner, (args, kwargs))
    result = call(*args, **kwargs)

    def on_device(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not lands:
            return x
        return cards[id(x)] if id(x) in cards else Card(x)

    return tree_map(on_device, result)


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, Card) else x


def _kind(name: str, args: Any, kwargs: dict[str, Any]) -> str:
    """Return what the host waits for in an operation: "read", "copy", "slow", or ""."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    host = [x for x in tensors if not isinstance(x, Card)]
    device = kwargs.get("device")
    leaves_card = device is not None and torch.device(device) != DEVICE and len(host) < len(tensors)
    masks = name.startswith("aten.index") and any(x.dtype == torch.bool for x in tensors[1:])
    if leaves_card or masks or any(part in name for part in READS):
        return "read"
    takes = ("copy", "index_put", "where")  # other kernels take a scalar as an argument
    copies = any(part in name for part in takes)
    if any(x.dim() or copies for x in host):
        return "copy"
    return "slow" if any(part in name for part in SLOW) else ""


def _place() -> str:
    """Return the innermost function of the package, if possible not of `ops`, on the stack."""
    found = ""
    for frame in reversed(traceback.extract_stack()):
        _, inside, path = frame.filename.rpartition("/accordion_hvd/")
        if inside:
            found = found or f"{path}:{frame.name}"
            if not path.startswith("ops/"):
                return f"{path}:{frame.name}"
    return found


class Mirror(TorchCommunicator):
    """A communicator of several ranks, all of which send what this rank sends.

    Attributes:
        watch: records nothing of the operations that stand for the engine's.
    """

    watch: Watch

    def __init__(self, process_set: Any = None) -> None:
        super().__init__(process_set)
        self.native_fp16_allreduce = self.native_bf16_allreduce = self._nccl = True

    def _answer(self, name: str, call: Callable[[], Any]) -> Handle:
        with self.watch.recording(False):
            result = call()
        return Handle([], lambda: result, name)

    def allreduce(self, name: str, tensors: list[torch.Tensor], op: str, group: Any) -> Any:
        factor = self.ranks(group) if op == "sum" else 1
        return self._answer(name, lambda: [x.mul_(factor) for x in tensors])

    def allgather(self, name: str, tensor: torch.Tensor, group: Any, lengths: Any = None) -> Any:
        return self._answer(name, lambda: torch.cat([tensor] * self.ranks(group)))

    def broadcast(self, name: str, tensor: torch.Tensor, root: int, group: Any) -> Any:
        return self._answer(name, tensor.clone)

    def alltoall(self, name: str, tensor: torch.Tensor, group: Any, splits: Any = None) -> Any:
        ranks = self.ranks(group)
        part = tensor[: tensor.shape[0] // ranks]
        received = self._answer(name, lambda: torch.cat([part] * ranks))
        if splits is not None:
            return Handle([], lambda: (received.result(), list(splits)), name)
        return received
