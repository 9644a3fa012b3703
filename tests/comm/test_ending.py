"""A process that has given up waiting for a rank does not wait again when it exits."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
