"""Tests of exits: a process that has given up waiting for a rank does not wait again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accordion_hvd.comm import timeouts

WAITING = """
import logging, logging.handlers, sys, time
file = logging.FileHandler(sys.argv[1])
logging.basicConfig(handlers=[logging.handlers.MemoryHandler(1000, 60, target=file)])
from accordion_hvd.comm import timeouts
timeouts.watch(3, lambda: 7.0)
time.sleep(600)
"""


def test_the_message_at_the_end_is_written_even_if_a_handler_holds_messages_back(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", WAITING, str(tmp_path / "log")]
    environment = {**os.environ, "ACCORDION_HVD_TIMEOUT": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    text = (tmp_path / "log").read_text()
    assert done.returncode == 1 and not done.stderr
    assert "rank 3 has waited for" in text and text.endswith("and this process ends.\n")


SCRIPT = """
import atexit, time
from accordion_hvd.comm import timeouts
atexit.register(time.sleep, {waits})  # as Horovod's end does, for other ranks
timeouts.register()
atexit.register(print, "the script's own end")
{gives_up}
raise RuntimeError("a rank does not answer")
"""


@pytest.mark.parametrize("gives_up", [True, False])
def test_only_a_process_that_has_given_up_ends_alone(gives_up: bool) -> None:
    waits, call = (600, "timeouts.give_up()") if gives_up else (0, "")
    script = SCRIPT.format(waits=waits, gives_up=call)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "the script's own end" in done.stdout and "a rank does not answer" in done.stderr


def run(script: str, timeout: int, stop: float = 0.0) -> subprocess.CompletedProcess[str]:
    """Run a script with this ACCORDION_HVD_TIMEOUT; stop it for some seconds once it prints."""
    environment = {**os.environ, "ACCORDION_HVD_TIMEOUT": str(timeout)}
    process = subprocess.Popen(
        [sys.executable, "-uc", script], env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    said = b""
    while stop and not said.endswith(b"\n") and (byte := os.read(process.stdout.fileno(), 1)):
        said += byte
    if stop:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(stop)
        os.kill(process.pid, signal.SIGCONT)
    output, error = process.communicate(timeout=60)
    return subprocess.CompletedProcess(
        [], process.returncode, (said + output).decode(), error.decode()
    )


WAITS = """
import time
from accordion_hvd.comm import timeouts
timeouts.watch(3, lambda: began)
began = 1.0
print("waits", flush=True)
{meanwhile}
time.sleep({seconds})
began = 0.0
time.sleep(0.3)
print("goes on")
"""


@pytest.mark.parametrize(
    ("meanwhile", "seconds", "stop", "ends"),
    [
        ("", 600, 0.0, True),
        ("right = time.time; time.time = lambda: right() + 3600", 0.5, 0.0, False),
        ("right = time.time; time.time = lambda: right() - 3600", 600, 0.0, True),
        ("", 0.5, 3.0, False),
        ("time.sleep(0.6); began = 2.0", 0.6, 0.0, False),  # another wait
    ],
)
def test_only_time_in_which_a_process_waits_and_runs_counts(
    meanwhile: str, seconds: float, stop: float, ends: bool
) -> None:
    done = run(WAITS.format(meanwhile=meanwhile, seconds=seconds), 1, stop)
    assert ("goes on" in done.stdout) != ends, done
    assert done.returncode == int(ends) and ("rank 3 has waited for 1 s" in done.stderr) == ends


LOCKED = """
import ctypes, time
from accordion_hvd.comm import timeouts
timeouts.guard_lock(3)
time.sleep(1)
print("waits", flush=True)
{call}
print("goes on")
"""


FOR_EVER = """
mutex, lock = ctypes.create_string_buffer(256), ctypes.PyDLL(None).pthread_mutex_lock
lock(mutex), lock(mutex)  # keeps Python's lock
"""


@pytest.mark.parametrize("stop", [0.0, 4.0])
def test_a_process_that_does_not_release_the_lock_is_ended(stop: float) -> None:
    done = run(LOCKED.format(call=FOR_EVER), 1, stop)
    assert done.returncode == -signal.SIGKILL and "goes on" not in done.stdout
    assert "most recent call first" in done.stderr
    assert "rank 3 has waited for 2 s: Horovod does not return" in done.stderr


def test_a_process_that_keeps_the_lock_for_long_goes_on() -> None:
    done = run(LOCKED.format(call="ctypes.PyDLL(None).usleep(800_000)"), 1, 4.0)
    assert done.stdout.endswith("goes on\n") and done.returncode == 0 and not done.stderr


def test_a_stopped_process_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    wait = timeouts.Wait()
    for step, counted in ((0.25, 0.25), (0.5, 0.75), (3600.0, 1.75), (0.25, 2.0)):
        now += step
        assert wait.seconds() == counted


FORKS = """
import os, sys
from accordion_hvd.comm import timeouts
timeouts.at_exit(lambda: print("ends", os.getpid() == owner, flush=True))
owner = os.getpid()
child = os.fork()
if not child:
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_exit_handlers_belong_to_the_process_that_made_them() -> None:
    assert run(FORKS, 2).stdout.split() == ["5", "ends", "True"]
