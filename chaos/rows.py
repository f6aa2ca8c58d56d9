"""Rows of the table: the faults, and the number of trials in the full run."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from chaos import points
from chaos.corruption import KINDS, corruption
from chaos.endings import end_in_a_save
from chaos.failing import failing_write, full_disk_run
from chaos.flips import CALM, bit_flip, calm
from chaos.kills import KILLS, sigkill
from chaos.layouts import PAIRS, layouts
from chaos.numbers import injected
from chaos.points import crash_point
from chaos.power import STATES, power_cut
from chaos.processes import (
    MINUTES,
    hang,
    no_alarm,
    signal_at_random,
    worker_exception,
    worker_kill,
)
from chaos.servers import KILLS as SERVER_KILLS
from chaos.servers import server_kill, server_run_kill, server_worker_kill
from chaos.slurm.trials import slurm_kill, slurm_stop
from chaos.threads import SPLITS, threads
from chaos.trial import Trial
from chaos.writers import no_place, two_writers


@dataclasses.dataclass(frozen=True)
class Row:
    """A fault, the promise, and the number of trials."""

    promise: str
    """The promise that holds after each trial."""
    plain: str
    """The result of plain Orbax and JAX, from section E of the table's sources; empty: unknown."""
    trial: Callable[[int, Path], Trial]
    """Function that runs a trial, by a seed, in a folder shared by all trials of the row."""
    trials: int | Callable[[Path], int]
    """Trials in the full run, or a function that counts them."""
    faults: int = 1
    """Faults per trial."""

    def count(self, folder: Path) -> int:
        """Return the number of trials in the full run."""
        return self.trials if isinstance(self.trials, int) else self.trials(folder)


ROWS: Mapping[str, Row] = {
    "sigkill": Row(
        "SIGKILL at random moments: final state, data position, metrics bitwise; no file left over",
        "151 of 151 for the state",
        sigkill,
        trials=100,
        faults=KILLS,
    ),
    "crash_point": Row(
        "a kill before every file operation of a save and a deletion: every listed step restores",
        "95 of 112",
        crash_point,
        trials=points.operations,
    ),
    "power_cut": Row(
        "unsynced writes dropped, torn, zeroed, reordered: the announced step restores",
        "3 of 7 files break it",
        power_cut,
        trials=50,
        faults=STATES,
    ),
    "corruption": Row(
        "bits flipped, files cut, zeroed, swapped, missing, added: all damage is found",
        "1 %",
        corruption,
        trials=100,
        faults=len(KINDS),
    ),
    "two_writers": Row(
        "two writers for 25 s: no files mixed or broken, the second refused within a second",
        "2 mixed, 5 broken of 31",
        two_writers,
        trials=4,
    ),
    "no_place": Row(
        "a directory that cannot be written: refused within 2 s, before data is read",
        "reported at the first wait",
        no_place,
        trials=20,
    ),
    "end_in_a_save": Row(
        "a program that ends in a save: the checkpoint is there, or the exit code is not 0",
        "0 of 24 there, 21 exit 0, 3 hang",
        end_in_a_save,
        trials=50,
    ),
    "failing_write": Row(
        "the n-th write fails (ENOSPC, EIO, EDQUOT), once or always: nothing lost, reported in 5 s",
        "reported a period late",
        failing_write,
        trials=lambda folder: 3 * points.operations(folder),
    ),
    "full_disk_run": Row(
        "a run whose disk fails for a while or for good: it continues, or can be resumed",
        "",
        full_disk_run,
        trials=50,
    ),
    "worker_kill": Row(
        "a worker killed: all stopped in 2 s, a new step in 20 s, the same final bits",
        "9 to 99 s, no restart",
        worker_kill,
        trials=50,
    ),
    "worker_exception": Row(
        "an exception in one worker: all down in 2 s, with its traceback last",
        "301 s",
        worker_exception,
        trials=20,
    ),
    "hang": Row(
        "a stuck worker: found and named within its deadline and 2 s, the same final bits",
        "never",
        hang,
        trials=20,
    ),
    "no_alarm": Row(
        "minutes of waits just below the limits of a stuck process, one a compilation: no alarm",
        "",
        no_alarm,
        trials=1,
        faults=MINUTES,
    ),
    "signal_at_random": Row(
        "a signal at a random moment: checkpoint, exit 75, resumed to the same bits",
        "0",
        signal_at_random,
        trials=200,
    ),
    "slurm_kill": Row(
        "a task of Slurm killed at random, requeued by the published script: the same final bits",
        "-",
        slurm_kill,
        trials=30,
    ),
    "slurm_stop": Row(
        "scancel or a time limit while a Slurm job saves: sealed, both tasks exit 75, requeued",
        "-",
        slurm_stop,
        trials=20,
    ),
    "server_worker_kill": Row(
        "workers of parameter servers killed at random: each update once, sync and local bitwise",
        "-",
        server_worker_kill,
        trials=5,
        faults=SERVER_KILLS,
    ),
    "server_kill": Row(
        "parameter servers killed at random: lost updates counted, sync and local bitwise",
        "-",
        server_kill,
        trials=5,
        faults=SERVER_KILLS,
    ),
    "server_run_kill": Row(
        "the process of a run on parameter servers killed at random: resumed, each update once",
        "-",
        server_run_kill,
        trials=5,
        faults=SERVER_KILLS,
    ),
    "injected": Row(
        "NaN or infinity at a random step and leaf: not applied; ends as a run without that batch",
        "-",
        injected,
        trials=50,
    ),
    "bit_flip": Row(
        "one bit of a device's copy, of a step or of a gradient flips: found, with step and leaf",
        "not looked for",
        bit_flip,
        trials=300,
    ),
    "calm": Row(
        "every step computed twice, no bit flipped: no alarm",
        "",
        calm,
        trials=100,
        faults=CALM,
    ),
    "layouts": Row(
        "saved on 1 to 8 devices (data, fsdp, tensor) of 1 to 4 processes, restored on others: "
        "bitwise, the same batches, the losses of one device to 1e-5",
        "",
        layouts,
        trials=len(PAIRS),
    ),
    "threads": Row(
        "2, 4 and 8 CPU devices on one core and on all, every split of a batch: no deadlock",
        "10 of 10 runs of fsdp over 4 devices with 2 microbatches are aborted",
        threads,
        trials=len(SPLITS),
    ),
}
