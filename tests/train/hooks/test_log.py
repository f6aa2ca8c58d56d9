import counting

from jtrain.optim import Cosine
from jtrain.train.hooks import LogHook, LogLines, Speed
from jtrain.train.hooks.speed import StepWork

# Written down in two halves, as the lines are longer than ours.
LEFT = """\
step   50/1000  loss   4.1234  valid        -  lr 1.00e-03
step  100/1000  loss   2.5000  valid   2.7500  lr 9.02e-04
step  150/1000  loss      nan  valid   2.7500  lr 8.08e-04
"""
RIGHT = """\
     - tokens/s         - left  waiting      -
 10.2k tokens/s      0:45 left  waiting  25.0%
 10.2k tokens/s      0:42 left  waiting  25.0%  skipped 3
"""


def test_the_lines_are_in_columns():
    now, said, losses = [0.0], [], []
    clock = lambda: now[0]
    waited = lambda: now[0] / 4
    speed = Speed(None, every=50, stop=1000, rows=8, tokens=512, clock=clock, waited=waited)
    log = LogHook(
        every=50,
        stop=1000,
        log=said.append,
        speed=speed,
        valid=lambda: losses[-1] if losses else None,
        learning_rate=lambda updates: 1.1e-3 - 2e-6 * updates,
    )
    for step, loss, skipped in ((50, 4.1234, 0), (100, 2.5, 0), (150, float("nan"), 3)):
        now[0] += 2.5
        speed.on_numbers(step, {})
        log.on_numbers(step, {"loss": loss, "skipped": float(skipped)})
        losses.append(2.75)
    halves = zip(LEFT.splitlines(), RIGHT.splitlines(), strict=True)
    assert said == [f"{left}  {right}" for left, right in halves]


def test_the_rate_of_a_line_is_that_of_its_update():
    said = []
    rate = Cosine(warmup=3).build(1.0, 10)
    log = LogHook(every=1, stop=10, log=said.append, learning_rate=rate)
    for step, skipped in ((1, 0), (2, 0), (3, 1), (4, 1)):  # the third is skipped
        log.on_numbers(step, {"loss": 1.0, "skipped": float(skipped)})
    rates = [line.partition("lr ")[2].split()[0] for line in said]
    assert [rates[i] for i in (0, 1, 3)] == ["2.50e-01", "5.00e-01", "7.50e-01"]


def test_a_line_has_the_utilization_where_the_peak_is_known():
    now, said = [0.0], []
    for hardware in (3e12, 4e12):
        work = StepWork(model=3e12, hardware=hardware, peak=1e14)
        speed = Speed(None, every=50, stop=200, rows=8, clock=lambda: now[0], work=work)
        log = LogHook(every=50, stop=200, log=said.append, speed=speed)
        for step in (50, 100):
            now[0] += 2.5
            speed.on_numbers(step, {})
            log.on_numbers(step, {"loss": 1.0})
    assert ["mfu" in line for line in said] == [False, True, False, True]
    assert "rows/s  mfu 60.0%      0:05 left" in said[1]
    assert "rows/s  mfu 60.0%  hfu 80.0%      0:05 left" in said[3]


def test_a_line_has_the_median_and_the_ninth_decile_of_a_step():
    now, said = [0.0], []
    speed = Speed(None, every=5, stop=20, rows=8, clock=lambda: now[0])
    log = LogHook(every=5, stop=20, log=said.append, speed=speed)
    for step in range(1, 21):
        now[0] += 0.012 if step % 5 else 0.03
        speed.on_done(step)
        if step % 5 == 0:
            speed.on_numbers(step, {})
            log.on_numbers(step, {"loss": 1.0})
    assert "p50 12.0 ms  p90 30.0 ms" in said[-1]


def test_a_line_has_only_what_is_known():
    said = []
    counting.run([LogHook(every=4, stop=8, log=said.append)], stop=8)
    assert said == ["step 4/8  loss   0.2500", "step 8/8  loss   0.1250"]


def test_lines_go_to_the_file_and_to_plain_stdout(tmp_path, capsys):
    lines = LogLines(tmp_path / "log.txt")
    lines.note("step 1")
    lines.print("careful")
    assert (tmp_path / "log.txt").read_text() == "step 1\ncareful\n"
    assert capsys.readouterr().out == "step 1\ncareful\n"


def test_what_a_live_line_shows_is_not_printed_as_well(tmp_path):
    shown = []
    lines = LogLines(tmp_path / "log.txt", screen=shown.append, live=True)
    lines.note("step 1")
    lines.print("careful")
    assert (tmp_path / "log.txt").read_text() == "step 1\ncareful\n"
    assert shown == ["careful"]


def test_a_resumed_run_appends_to_the_log(tmp_path):
    for life in ("one", "two"):
        LogLines(tmp_path / "log.txt", screen=lambda _: None).print(life)
    assert (tmp_path / "log.txt").read_text() == "one\ntwo\n"
