"""A communicator over `horovod.tensorflow`, for eager execution and graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from accordion_hvd.comm import timeouts
from accordion_hvd.comm.collectives import Group, Sizes
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.comm.horovod.process_sets import Members, addable
from accordion_hvd.core.base import Tensor
from accordion_hvd.ops import tensorflow as xp

_OPS = {"mean": hvd.Average, "sum": hvd.Sum, "max": hvd.Max}
_functions: dict[Hashable, Any] = {}


class HorovodCommunicator(Communicator):
    """A communicator that connects the ranks of a Horovod process set, numbered from 0 within it.

    A handle is the result itself: no operation waits while a graph is traced, and Horovod's eager
    operations block. Eager operations run as small functions, because Horovod matches the
    operations of all ranks by name, and TensorFlow names operations in graphs only.

    Attributes:
        directly: whether eager operations run without such functions, which needs no thread of
            TensorFlow's. Horovod then matches operations by their order.
    """

    def __init__(self, process_set: Any = None) -> None:
        self.members = Members(process_set)
        self.rank, self.size, self.xp = self.members.rank, self.members.size, xp
        self.extensible = addable()
        nccl = hvd.nccl_built() and tf.config.list_physical_devices("GPU")
        self.native_fp16_allreduce = True if nccl else None
        self.directly = False
        timeouts.watch(hvd.rank())

    def watch(self, began: Callable[[], float]) -> None:
        timeouts.watch(hvd.rank(), lambda: began() if _executes() else 0.0)

    def allreduce(self, name: str, tensors: list[Tensor], op: str, group: Group) -> Any:
        key = ("allreduce", name, op, group)
        options = self._options(name, group) | {"op": _OPS[op]}
        return self._call(key, lambda *parts: hvd.grouped_allreduce([*parts], **options), tensors)

    def allgather(self, name: str, tensor: Tensor, group: Group, lengths: Sizes = None) -> Any:
        key, options = ("allgather", name, group), self._options(name, group)
        return self._call(key, lambda part: hvd.allgather(part, **options), [tensor])

    def broadcast(self, name: str, tensor: Tensor, root: int, group: Group) -> Any:
        key = ("broadcast", name, root, group)
        options = self._options(name, group) | {"root_rank": self.members.globally(root)}
        return self._call(key, lambda part: hvd.broadcast(part, **options), [tensor])

    def alltoall(self, name: str, tensor: Tensor, group: Group, splits: Sizes = None) -> Any:
        options = self._options(name, group)
        if splits is not None:
            received, counts = self._call(
                ("shares", name, group),
                lambda part, parts: hvd.alltoall(part, parts, **options),
                [tensor, tf.constant(splits, tf.int32)],
            )
            # In a graph, the counts are unknown while it is traced.
            return received, counts.numpy().tolist() if tf.executing_eagerly() else counts
        key = ("alltoall", name, group)
        return self._call(key, lambda part: hvd.alltoall(part, **options), [tensor])

    def register(self, groups: Sequence[tuple[int, ...]]) -> None:
        self.members.register(groups, self.extensible)

    def poll(self, handle: Any) -> bool:
        return True

    def wait(self, handle: Any) -> Any:
        return handle

    def _call(self, key: Hashable, operation: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        if not tf.executing_eagerly():
            return operation(*tensors)
        with timeouts.waiting():
            if self.directly:
                return operation(*tensors)
            specs = [tf.TensorSpec([None] * x.shape.rank, x.dtype) for x in tensors]  # of any size
            key = (self.members.process_set.process_set_id, key, *specs)
            if key not in _functions:
                function = tf.function(operation, autograph=False)
                _functions[key] = function.get_concrete_function(*specs)
            return _functions[key](*tensors)

    def _options(self, name: str, group: Group) -> dict[str, Any]:
        return {
            "name": name,
            "ignore_name_scope": True,  # name scopes differ between callers
            "process_set": self.members.subset(group),
        }


def _executes() -> bool:
    # A graph that fails does not say that it ends: then no thread is within TensorFlow.
    frames = sys._current_frames().values()
    return any("tensorflow/python/eager/" in frame.f_code.co_filename for frame in frames)
