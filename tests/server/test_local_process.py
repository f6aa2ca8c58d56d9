"""A process of this machine, as the engines start it: its end and its last output."""

import os
import sys
import time

from jtrain.distributed.launcher.worker import WorkerProcess
from jtrain.server.engines.engine import LocalProcess


def test_the_last_output_of_a_process_is_read_also_where_its_end_is_noticed_before(monkeypatch):
    read = WorkerProcess._read
    late = lambda self, pipe, echo: (time.sleep(0.5), read(self, pipe, echo))
    monkeypatch.setattr(WorkerProcess, "_read", late)
    command = [sys.executable, "-S", "-c", "print('no such data'); raise SystemExit(70)"]
    process = LocalProcess(command, os.environ)
    try:
        while not process.end:
            time.sleep(0.001)
        assert (process.end, process.output()) == ("exit code 70", "no such data\n")
    finally:
        process.kill()
