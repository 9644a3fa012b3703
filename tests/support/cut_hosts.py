"""A job on three hosts, of which the last is cut off; used by tests/test_cut_networks.py.

    python cut_hosts.py KIND SCRIPT [words]

runs a script of tests/ranks on hosts that are network namespaces. KIND is "elastic" (horovodrun
with discovery), "elastic-first" (the same, with rank 0 on the host that is cut off), "torchft" (a
process a host, whose last argument is the host's number) or a backend of `netbench.launch`. When
the script writes the file "cut" to CHECK_FOLDER, the link of the last host goes down. The file
"rig.json" then tells after how many seconds each process ended.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.netbench import sandbox  # noqa: E402
from benchmarks.netbench.launch import Job  # noqa: E402
from benchmarks.netbench.network import Network, call, port  # noqa: E402

HOSTS, START, LIMIT = 3, 90.0, 90.0
TIMEOUT = 15
"""Seconds of ACCORDION_HVD_TIMEOUT and of Gloo's limit."""

SETTINGS = {
    "ACCORDION_HVD_TIMEOUT": str(TIMEOUT), "HOROVOD_GLOO_TIMEOUT_SECONDS": str(TIMEOUT),
    "GLOO_SOCKET_IFNAME": "eth0",
}  # fmt: skip
ANSWERS = 'answers() { timeout 2 bash -c "echo > /dev/tcp/$1/9" 2>/dev/null; [ $? != 124 ]; }'
"""A host without a server refuses the connection at once; one that is cut off does not answer."""

SSH = """#!/bin/bash
{answers}
while [ "${{1#-}}" != "$1" ]; do case $1 in -o|-p|-i) shift 2;; *) shift;; esac; done
host=$1; shift
case $host in
{hosts}
esac
eval "$enter"' bash -c "$*" &'
silent=0
while [ $silent -lt 3 ]; do
    sleep 1
    if answers "$host"; then silent=0; else silent=$((silent + 1)); fi
    if [ $silent = 0 ] && ! kill -0 $! 2>/dev/null; then wait $!; exit $?; fi
done
exit 255
"""
"""What ssh does with ServerAliveInterval 1: it sees the end of a command, or of the connection."""


FIND = """#!/bin/bash
{answers}
[ -e {told} ] || {{ touch {told}; echo {first}:1; exit; }}
for h in {names}; do answers $h && echo $h:1; done; true
"""
"""Discovery that asks the hosts. It begins with one, which gets rank 0: of hosts that are found at
the same time, Horovod takes any."""


def elastic(
    network: Network, folder: Path, command: Sequence[str], first: int = 0
) -> list[subprocess.Popen[str]]:
    """Start horovodrun on the first host, with a stand-in for ssh and a discovery that asks.

    Rank 0 is on host `first`.
    """
    tools = folder / "tools"
    tools.mkdir()
    places = zip(network.names, network.addresses, strict=True)
    hosts = "\n".join(
        f"{name}|{address}) enter='{' '.join(network.enter(i))}';;"
        for i, (name, address) in enumerate(places)
    )
    find = FIND.format(answers=ANSWERS, first=network.names[first], told=folder / "told",
                       names=" ".join(network.names))  # fmt: skip
    texts = {"ssh": SSH.format(answers=ANSWERS, hosts=hosts), "discover": find}
    for name, text in texts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o700)
    words = ["horovodrun", "--gloo", "--network-interface", "eth0", "-np", str(HOSTS)]
    words += ["--min-np", "1", "--max-np", str(HOSTS)]
    words += ["--host-discovery-script", str(tools / "discover")]
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    return [_start(network, 0, [*words, *command], {"PATH": path})]


def torchft(network: Network, folder: Path, command: Sequence[str]) -> list[subprocess.Popen[str]]:
    return [_start(network, host, [*command, str(host)]) for host in range(HOSTS)]


def _start(
    network: Network, host: int, command: Sequence[str], more: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    environment = {**os.environ, **SETTINGS, **(more or {})}
    return subprocess.Popen([*network.enter(host), *command], env=environment, text=True,
                            stdin=subprocess.DEVNULL)  # fmt: skip


def job(network: Network, folder: Path, kind: str, command: Sequence[str]) -> Job:
    """Start a rank a host; mpirun does not pass variables on."""
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    settings += [f"CHECK_FOLDER={os.environ['CHECK_FOLDER']}"]
    return Job(["env", *settings, *command], network, folder / "out", kind, show=False)


STARTS = {
    "elastic": elastic,
    "elastic-first": functools.partial(elastic, first=-1),
    "torchft": torchft,
}


def work(folder: Path, tag: str) -> int:
    kind, script, *words = sys.argv[1:]
    network, told = Network(HOSTS, tag, folder), Path(os.environ["CHECK_FOLDER"])
    command = [sys.executable, str(ROOT / "tests" / "ranks" / script), *words]
    ranks = None
    if kind in STARTS:
        STARTS[kind](network, folder, command)
    else:
        ranks = job(network, folder, kind, command)
    began = time.monotonic()
    while not (told / "cut").exists() and time.monotonic() - began < START:
        time.sleep(0.1)
    call("ip", "link", "set", port(HOSTS - 1), "down")
    cut = time.monotonic()
    ended: list[float | None] = [None] * HOSTS
    while None in ended and time.monotonic() - cut < LIMIT:
        time.sleep(0.1)
        left = hosts_of(network, command[1])
        for host in range(HOSTS):
            if ended[host] is None and host not in left:
                ended[host] = time.monotonic() - cut
    output = ranks.output() if ranks is not None else ""  # others write to this process's output
    (told / "told-rig").write_text(json.dumps({"ended": ended, "output": output}))
    return 0


def hosts_of(network: Network, script: str) -> set[int]:
    """Return the hosts on which a rank runs the script."""
    spaces = {os.readlink(f"/proc/{x.pid}/ns/net"): i for i, x in enumerate(network.holders)}
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if script.encode() in words[1:2]:
                found.add(spaces[os.readlink(entry / "ns" / "net")])
        except OSError:
            continue  # ended meanwhile
    return found


if __name__ == "__main__":
    if sandbox.inside():
        sys.exit(sandbox.run(work))
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.exit(sandbox.enter(sys.argv[1:], Path(__file__).stem))
