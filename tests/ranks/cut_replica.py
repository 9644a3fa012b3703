"""A replica of a torchft job on a host that may be cut off; replica 0 has the lighthouse, too.

Arguments: the compression and the number of the replica, which is that of its host.
"""

import datetime
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torchft
from torchft.coordination import LighthouseServer

from accordion_hvd import parse
from accordion_hvd.torch import torchft as compressed

number, limit = int(sys.argv[2]), datetime.timedelta(seconds=15)
folder, host = Path(os.environ["CHECK_FOLDER"]), socket.gethostname()
if number == 0:
    server = LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=1000, heartbeat_timeout_ms=2000
    )
    folder.joinpath("new").write_text(server.address())
    folder.joinpath("new").rename(folder / "lighthouse")
while not (folder / "lighthouse").exists():
    time.sleep(0.05)

torch.manual_seed(number)  # the first quorum makes the weights equal
model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)


def load(state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


manager = torchft.Manager(
    torchft.ProcessGroupGloo(timeout=limit), load,
    lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    min_replica_size=2, timeout=limit, quorum_timeout=limit, connect_timeout=limit,
    replica_id=f"replica_{number}", store_addr=host, store_port=store.port, rank=0, world_size=1,
    lighthouse_addr=(folder / "lighthouse").read_text(), hostname=host,
)  # fmt: skip
averager = compressed.average(manager, model, parse(sys.argv[1]), optimizer=optimizer)
commits: list[tuple[float, int]] = []
while (step := manager.current_step()) < 60:
    averager.start_quorum()
    optimizer.zero_grad()
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(1000 * step + number))
    (model(x) - x[:, :4]).square().mean().backward()
    if averager.should_commit():
        optimizer.step()
        commits.append((time.time(), manager.num_participants()))
    if number == 0 and len(commits) > 20 and commits[-1][1] == 3:
        (folder / "cut").touch()
    time.sleep(0.05)
harness.tell(
    number=number, commits=commits, steps=averager.exchange.steps,
    weights=[float(p.detach().double().sum()) for p in model.parameters()],
)  # fmt: skip
time.sleep(2)  # the lighthouse serves the others to their end
os._exit(0)  # without waiting for the manager's threads
