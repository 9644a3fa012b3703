"""torch.distributed as an engine."""

from __future__ import annotations

import torch.distributed as dist

from accordion_hvd.comm.agreement import has_horovod, started_by_mpi
from accordion_hvd.comm.communicator import Engine
from accordion_hvd.comm.torch_distributed import interface, process_sets, start
from accordion_hvd.comm.torch_distributed.communicator import TorchCommunicator


def _launched() -> bool:
    if dist.is_initialized() or dist.is_torchelastic_launched():
        return True
    # Jobs of MPI may set torchrun's variables for other libraries. Ranks of torchrun, which
    # the lines above find, may inherit those of MPI.
    return start.launched() and not (started_by_mpi() and has_horovod())


TORCH_DISTRIBUTED = Engine(
    name="torch",
    launched=_launched,
    installed=lambda: True,
    interface=lambda: interface,
    init=interface.init,
    connect=TorchCommunicator,
    process_set_of=process_sets.of_ranks,
    join=start.start_under,
)
