"""Workers that come and go: every row once, whose shares are whose, the state of those who stay."""

import contextlib
import random
import threading

import numpy as np
import pytest
from comparison import bitwise
from quick_study import write_study
from server_runs import Losses, host, server_setup, train_on_servers

from jtrain.cli import main
from jtrain.errors import ConfigError, PeerError
from jtrain.io.jsonl import JsonlWriter
from jtrain.server.engines import Attached
from jtrain.server.listener import Registry
from jtrain.server.members import FILE, Members
from jtrain.server.plan import Plan
from jtrain.server.process import work
from jtrain.server.server_loop import coordinator_of
from jtrain.server.shares import Shares
from jtrain.server.wire import Message
from jtrain.train.processes import code_facts

ROWS, BATCH = 96, 16
CADENCE = ("evaluate.every=0", "checkpoint.every=0", "parallel.snapshot_every=8")
SLOW = "0.01," * 8  # seconds a step, so that others come and go while one is computed


# The parameters count how often each row was trained on: the gradient of a row's loss is 1 for its
# parameter, and 0 for the others.
COUNTING = """\
import jax.numpy as jnp
import numpy as np

import jtrain as jt
from jtrain.data import Arrays, InOrder, Shuffled


@jt.configclass
class Config(jt.RunConfig):
    \"\"\"Counts.\"\"\"

    rows: int = 96

    def build(self, place):
        one_hot = Arrays(x=np.eye(self.rows, dtype=np.float32))

        def loss(params, batch, rng):
            del rng
            return jt.Mean.of(-batch["x"] @ params["count"], batch["mask"])

        return jt.Experiment(
            init=lambda key: ({"count": jnp.zeros(self.rows)}, ()),
            loss=loss,
            train=Shuffled(one_hot, size=self.batch, seed=self.seed),
            valid=InOrder(one_hot, size=self.evaluate.batch or self.batch),
            optimizer=self.optimizer.build(self.steps),
        )
"""


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("counting"), COUNTING)


class Crowd:
    """Workers that come and go, as a seed draws it; those of the run leave at once but for one.

    Args:
        crash: share of those that go without a word.
    """

    def __init__(self, seed: int, *, crash: float = 0.0):
        self._draw, self._crash = random.Random(seed), crash
        self._over = threading.Event()
        self.came = self.went = self.guests_leases = 0

    def meddle(self, coordinator, supervisor):
        self._coordinator, self._supervisor = coordinator, supervisor
        coordinator.members._record = self._note
        for worker in (1, 2, 3):
            supervisor.processes["worker", worker].leaving.set()
        self._guests: list[threading.Event] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _note(self, row) -> None:
        if row["event"] == "left" and row["started_by"] == "itself":
            self.guests_leases += row["leases"]

    def end(self) -> None:
        self._over.set()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while not self._over.wait(self._draw.uniform(0.01, 0.1)):
            if len(self._guests) < 5 and (len(self._guests) < 1 or self._draw.random() < 0.5):
                leaving = threading.Event()
                threading.Thread(target=self._work, args=(leaving,), daemon=True).start()
                self._guests.append(leaving)
                self.came += 1
            elif self._draw.random() < self._crash:
                self._take_one_out()
            else:
                self._guests.pop(self._draw.randrange(len(self._guests))).set()
                self.went += 1

    def _work(self, leaving: threading.Event) -> None:
        environ = {"JTRAIN_SERVER_SLOW": SLOW, **self._supervisor.environ}
        with contextlib.suppress(PeerError, ConfigError):  # the run has ended
            work(self._coordinator.plan, None, environ, leaving=leaving)

    def _take_one_out(self) -> None:
        """Treat a worker as dead; it is not, and comes again, as after a broken network."""
        coordinator = self._coordinator
        with coordinator._changed:
            guests = [w for w in coordinator.members if coordinator.members[w].process is None]
            if guests:
                member = coordinator.members[self._draw.choice(guests)]
                coordinator._remove(member, "its connection broke")
                self.went += 1


def train_with_a_crowd(program, seed, *, crash=0.0, hooks=(), log=print):
    crowd = Crowd(seed, crash=crash)
    try:
        found = train_on_servers(
            program, hooks=hooks, meddle=crowd.meddle, log=log, environ={"JTRAIN_SERVER_SLOW": SLOW}
        )
    finally:
        crowd.end()
    assert crowd.came >= 2, "workers came"
    assert crowd.guests_leases, "and worked"
    assert crowd.went >= 1, "workers went"
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        "{kind: async}",
        "{kind: ssp, bound: 1}",
        "{kind: local_sgd, inner_steps: 4}",
        "{kind: diloco, inner_steps: 4, lr: 1.0, momentum: 0.0}",
        "{kind: async_diloco, inner_steps: 4, lr: 1.0, momentum: 0.0}",
    ],
)
def test_every_row_of_an_epoch_is_trained_on_once(counting, mode):
    local = "inner_steps" in mode
    steps, epochs = (48, 8) if local else (240, 40)
    most = f"parallel.max_workers={0 if local else 6}"
    values = f"steps={steps}", f"batch={BATCH}", most, "optimizer={kind: sgd, lr: 1.0}", *CADENCE
    program = server_setup(counting, mode, *values, workers=4, shards=2)
    numbers = Losses()
    found = train_with_a_crowd(program, 1, crash=0.4, hooks=[numbers])
    assert [step for step, _ in numbers.numbers] == list(range(1, steps + 1))
    counts = np.round(np.asarray(found.state.params["count"]) * BATCH)
    assert counts.tolist() == [epochs] * ROWS, "each row once in each epoch"


DILOCO = "{kind: diloco, inner_steps: 4, lr: 0.5}"
HALVES = "steps=32", "parallel.snapshot_every=16", "evaluate.every=0", "checkpoint.every=0"


@pytest.mark.parametrize(
    "compress",
    [
        pytest.param("none", marks=pytest.mark.thorough),
        pytest.param("int4", marks=pytest.mark.slow),
    ],
)
def test_diloco_has_the_state_of_workers_that_stay_to_the_bit(study, compress):
    more = f"parallel.compress.kind={compress}"
    program = server_setup(study, DILOCO, *HALVES, more, workers=4, shards=2)
    calm, changing = Losses(), Losses()
    want = train_on_servers(program, hooks=[calm])
    got = train_with_a_crowd(program, 3, hooks=[changing])
    assert bitwise(host(got.state), host(want.state)), "inner optimizer states included"
    assert changing.numbers == calm.numbers


class Drop(Losses):
    """Hook that treats a worker as dead after a step."""

    def __init__(self, step: int):
        super().__init__()
        self._step = step

    def meddle(self, coordinator, supervisor):
        del supervisor
        self._coordinator = coordinator

    def on_numbers(self, step, numbers):
        super().on_numbers(step, numbers)
        if step == self._step:
            self._coordinator.process_left(1, "SIGKILL")


STREAMING = "{kind: streaming_diloco, inner_steps: 4, fragments: 2, overlap: 1}"


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "compress"), [(DILOCO, "none"), (STREAMING, "e3m0")])
def test_an_optimizer_state_that_died_is_computed_again(study, mode, compress):
    more = f"parallel.compress.kind={compress}"
    program = server_setup(study, mode, *HALVES, more, workers=4, shards=2)
    calm, drop, lines = Losses(), Drop(24), []
    want = train_on_servers(program, hooks=[calm])
    got = train_on_servers(program, hooks=[drop], meddle=drop.meddle, log=lines.append)
    assert bitwise(host(got.state), host(want.state))
    assert drop.numbers == calm.numbers, "no step twice"
    said = "the optimizer state of share 1 is restored from step 16: the steps since then are taken"
    assert any(said in line for line in lines)


def test_a_worker_with_other_packages_is_refused(study):
    plan = Plan(server_setup(study, "{kind: async}", workers=2))
    coordinator = coordinator_of(plan)(plan, [])
    facts = code_facts(plan.program.resolved.config)
    assert coordinator.handle(Message("join", {"facts": facts, "key": "a1"})).name == "joined"
    other = {**facts, "package jax": "0.1.0"}
    with pytest.raises(ConfigError, match=r"this worker differs .*\n  package jax: .* in the run"):
        coordinator.handle(Message("join", {"facts": other, "key": "b2"}))


def test_a_worker_that_asks_to_join_again_is_one_and_known_where_it_says_no_more(study):
    """The reply was late; or the worker is killed before its first request for a lease."""
    plan = Plan(server_setup(study, "{kind: async}", workers=2))
    coordinator = coordinator_of(plan)(plan, [])
    join = Message("join", {"process": None, "host": "spot7", "pid": 77, "key": "a1"})
    assert coordinator.handle(join) == coordinator.handle(join)
    assert len(coordinator.members) == 1
    coordinator.connection_lost(join)
    (worker,) = coordinator.members
    assert coordinator.members[worker].broken


def test_a_state_is_lost_with_its_worker_unless_it_was_handed_over():
    shares = Shares(1, stateful=True, step=0)
    shares.lease(0, [])
    assert shares.leave(0) == set(), "the snapshot has the state"
    shares.lease(0, [])
    shares.report(0, 4)
    assert shares.unsaved() == [0]
    shares.take_over(0, 1, 4)  # another worker's
    shares.take_over(0, 0, 3)  # an older one
    assert shares.unsaved() == [0]
    shares.take_over(0, 0, 4)
    assert shares.unsaved() == []
    assert shares.leave(0) == set()
    shares.end_leases()
    shares.lease(1, [])
    shares.report(0, 8)
    assert shares.leave(1) == {0}


def test_a_share_whose_worker_leaves_in_the_middle_of_a_round_is_computed_again():
    shares = Shares(1, stateful=True, step=0)
    shares.lease(0, [])
    shares.report(0, 4)
    shares.end_leases()
    shares.lease(0, [])
    assert shares.to_hand_over(0, True) == [], "it computes"
    shares.end_leases(0)
    assert shares.to_hand_over(0, True) == [0]
    shares.take_over(0, 0, 4)
    assert shares.leave(0) == set()
    assert shares.lease(3, []) == 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("stateful", [True, False])
def test_every_share_is_computed_once_a_round_whoever_comes_and_goes(seed, stateful):
    draw = random.Random(seed)
    shares, step = Shares(4, stateful=stateful, step=0), 0
    present: set[int] = set(range(4))
    for _ in range(30):
        reported: dict[int, int] = {}
        for _ in range(10_000):
            if len(reported) == 4:
                break
            if draw.random() < 0.2:
                present.add(draw.randrange(7))
            if draw.random() < 0.2 and len(present) > (1 if stateful else 4):
                worker = draw.choice(sorted(present))
                shares.end_leases(worker)
                for share in shares.to_hand_over(worker, True):
                    shares.take_over(share, worker, shares.all[share].step)
                assert shares.leave(worker) == set()
                present.discard(worker)
            worker = draw.choice(sorted(present))
            for share in shares.to_hand_over(worker, False, present):
                shares.take_over(share, worker, shares.all[share].step)
            share = shares.lease(worker, reported)
            if share is not None and draw.random() < 0.8:
                assert share not in reported
                reported[share] = worker
                shares.report(share, step + 5)
        assert len(reported) == 4
        shares.end_leases()
        step += 5


def test_each_stay_of_a_worker_is_a_row_and_a_number_is_used_again(tmp_path, monkeypatch, capsys):
    path = write_study(tmp_path)
    directory = tmp_path / "runs" / "quick"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(path.read_text())
    monkeypatch.chdir(tmp_path)
    rows = JsonlWriter(directory / FILE)
    members = Members(rows.append)
    members.join({"process": 0, "host": "node1", "pid": 11, "key": "a"}, 0)
    guest = members.join({"process": None, "host": "spot7", "pid": 77, "key": "b"}, 5)
    guest.leases = 3
    members.leave(guest, "was asked to", 9)
    again = members.join({"process": None, "host": "spot8", "pid": 88, "key": "c"}, 12)
    rows.close()
    assert (guest.worker, again.worker) == (1, 1)
    assert members.find({"key": guest.key}) is None
    assert main(["show", "quick", "--workers"]) == 0
    _, own, left, there = map(str.split, capsys.readouterr().out.splitlines())
    assert own[:3] == ["0", "node1", "11"]
    assert left[:3] + left[5:] == ["1", "spot7", "77", "5..9", "3", "was", "asked", "to"]
    assert there[5:] == ["12.."]


def test_a_worker_with_a_new_connection_is_not_lost_with_the_old_one():
    """The end of the old one may be noticed while it computes for longer than it may be away."""
    members = Members()
    old, new = {"key": "a1"}, {"key": "a1"}
    member = members.join(old, 0)
    member.hear(new)
    members.lose(old)
    assert not member.broken
    members.lose(new)
    assert member.broken
    assert members.find(old) is member


def test_a_process_that_stands_by_takes_a_number_that_computes():
    members = Members(most=2)
    first, second, third = (members.join({"process": p, "key": f"{p}"}, 0) for p in range(3))
    assert [first.worker, second.worker, third.worker] == [0, 1, 2]
    members.leave(second, "was asked to", 3)
    members.leave(third, "takes a place that is free", 3)
    assert members.join({"process": 2, "key": "2b"}, 3).worker == 1
    assert members.join({"process": 1, "key": "1b"}, 4).worker == 2, "the number is taken"


def ask(registry: Registry, name: str, port: int) -> str:
    reply = registry.handle(Message(name, {"shard": 0, "host": "node1", "port": port}))
    assert reply is not None
    return reply.name


def test_a_server_that_is_started_again_takes_the_place_of_the_one_before():
    registry = Registry(1)
    server = Attached(registry, 0)
    assert ask(registry, "register", 1) == "registered"
    assert ask(registry, "register", 1) == "registered", "asked again"
    assert server.end == ""
    assert ask(registry, "register", 2) == "registered"
    assert ask(registry, "watch", 1) == "end"
    assert server.end == "its place was taken"
    assert registry.locate(0) == ("node1", 2)
    again = Attached(registry, 0)
    assert again.end == ""
    again.kill()
    assert ask(registry, "watch", 2) == "end"
    assert again.end == "its place was taken"
