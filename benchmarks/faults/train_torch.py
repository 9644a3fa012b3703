"""A small training in PyTorch in which one rank meets a fault; started by `launch.run`."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import accordion_hvd
import accordion_hvd.torch as hvd
from accordion_hvd import ddp, fsdp
from accordion_hvd.torch import engines
from benchmarks.faults import training
from benchmarks.faults.cases import SAVED
from benchmarks.faults.rank import Rank


def main(rank: Rank) -> None:
    """Train, save twice, and resume in a second launch."""
    if rank.differs("version"):
        accordion_hvd.__version__ = "0.0.1"
    rank.at("start")
    hvd.init()
    rank.install()
    kind = type(engines.connect(hvd.global_process_set))
    rank.install_sending(kind, lambda place, tensor: _altered(rank, place, tensor))
    model = network(rank)
    rate = 0.5 if rank.differs("rate") else 0.1
    scaler = torch.amp.GradScaler("cpu", 1024.0) if "scaler" in rank.case.options else None
    averages = rank.case.method in ("local", "wagma")
    optimizer: Any = torch.optim.SGD(model.parameters(), rate)
    if "ddp" in rank.case.options:
        model = torch.nn.parallel.DistributedDataParallel(model)
        ddp.register(model, training.method(rank), optimizer=optimizer)
    elif "fsdp" in rank.case.options:
        mesh = init_device_mesh("cpu", (rank.case.ranks, 1), mesh_dim_names=("between", "within"))
        fully_shard(model, mesh=mesh["within"])
        optimizer = torch.optim.SGD(model.parameters(), rate)
        fsdp.between(model, mesh["between"], training.method(rank), optimizer=optimizer)
    elif "optimizer" in rank.case.options:
        optimizer = hvd.OnebitAdam(model.parameters(), lr=rate)
    else:
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            training.method(rank),
            grad_scaler=None if averages else scaler,
            ledger=training.ledger(rank),
        )
        hvd.broadcast_parameters(model.state_dict(), 0)
    if rank.differs("weights"):
        torch.nn.init.normal_(model[0].weight)
    if rank.resumed:
        resume(rank, model)
    train(rank, model, optimizer, scaler, training.steps(rank))
    if not averages and hasattr(optimizer, "exchange"):
        rank.skipped = optimizer.exchange.skipped
    if "join" in rank.case.options:
        hvd.join()


def network(rank: Rank) -> torch.nn.Sequential:
    """Return the model, whose forward and backward passes are places of faults."""
    torch.manual_seed(0)
    hidden = training.HIDDEN * (2 if rank.differs("width") else 1)
    layers = [torch.nn.Linear(training.FEATURES, hidden), torch.nn.ReLU()]
    if rank.differs("layers"):
        layers += [torch.nn.Linear(hidden, hidden)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(hidden, training.CLASSES))
    model[1].register_forward_pre_hook(lambda *_: rank.at("forward"))
    model[0].weight.register_hook(lambda grad: _altered(rank, "gradient", grad))
    return model


def train(rank: Rank, model: Any, optimizer: Any, scaler: Any, steps: int) -> None:
    """Take the remaining steps."""
    for step in range(rank.step, steps):
        rank.at("step")
        if rank.case.action == "level":
            _switch(rank, optimizer)
        if rank.case.action == "collective":
            _run_own(rank)
        images, labels = (torch.from_numpy(x) for x in training.batch(rank.number, step))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        local = [getattr(x, "to_local", lambda x=x: x)() for x in model.parameters()]
        rank.stepped([x.detach().numpy() for x in local])
        if rank.step in SAVED:
            save(rank, model, optimizer)


def save(rank: Rank, model: Any, optimizer: Any) -> None:
    """Save the model on rank 0, and the state of compression on all ranks."""
    if rank.case.method in ("local", "wagma"):
        optimizer.average_now()
    if rank.number == 0:
        torch.save(model.state_dict(), rank.folder / f"model-{rank.step}.pt")
    hvd.save_state(training.checkpoints(rank), step=rank.step)
    rank.tell("saved", step=rank.step)


def resume(rank: Rank, model: Any) -> None:
    """Load the last complete checkpoint and the model of the same step."""
    rank.step = hvd.load_state(training.checkpoints(rank))
    model.load_state_dict(torch.load(rank.folder / f"model-{rank.step}.pt", weights_only=True))
    rank.tell("resumed", step=rank.step)


def _altered(rank: Rank, place: str, tensor: torch.Tensor) -> torch.Tensor:
    before = tensor.detach().numpy()
    after = rank.at(place, before)
    return tensor if after is before else torch.from_numpy(after)


def _run_own(rank: Rank) -> None:
    """Let one rank run a collective that the others do not run, at the step of its case."""
    if rank.number == rank.case.rank and rank.step == rank.case.step:
        rank.tell("fault")
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(torch.ones(3))
        else:
            hvd.allreduce(torch.ones(3), name="own")


def _switch(rank: Rank, optimizer: Any) -> None:
    """Give one rank another level, without a decision, at the step of its case."""
    if rank.number == rank.case.rank and rank.step == rank.case.step:
        rank.tell("fault")
        for entry in optimizer.exchange.bucket_states:
            if len(entry.levels) > 1:
                optimizer.exchange.switch(entry, 1 - entry.level)


if __name__ == "__main__":
    this = Rank()
    with this.recorded():
        main(this)
