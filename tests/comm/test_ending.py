"""Tests of exits: a process that has given up waiting for a rank does not wait again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WAITING = """
import logging, logging.handlers, sys, time
file = logging.FileHandler(sys.argv[1])
logging.basicConfig(handlers=[logging.handlers.MemoryHandler(1000, 60, target=file)])
from accordion_hvd.comm.horovod import ending
ending.watch(3, lambda: began)
began = time.time() - 9
time.sleep(600)
"""


def test_the_message_at_the_end_is_written_even_if_a_handler_holds_messages_back(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", WAITING, str(tmp_path / "log")]
    environment = {**os.environ, "ACCORDION_HVD_TIMEOUT": "5"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    text = (tmp_path / "log").read_text()
    assert done.returncode == 1 and not done.stderr
    assert "rank 3 has waited for" in text and text.endswith("and this process ends.\n")


SCRIPT = """
import atexit, time
from accordion_hvd.comm.horovod import ending
atexit.register(time.sleep, {waits})  # as Horovod's end does, for other ranks
ending.register()
atexit.register(print, "the script's own end")
{gives_up}
raise RuntimeError("a rank does not answer")
"""


@pytest.mark.parametrize("gives_up", [True, False])
def test_only_a_process_that_has_given_up_ends_alone(gives_up: bool) -> None:
    waits, call = (600, "ending.give_up()") if gives_up else (0, "")
    script = SCRIPT.format(waits=waits, gives_up=call)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "the script's own end" in done.stdout and "a rank does not answer" in done.stderr
