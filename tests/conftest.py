"""What holds in every test: eight devices, quick compiles, no silent promotion, no warnings."""

import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# LLVM at -O0 compiles in 0.6 of the time, and fuses no multiply-add: .ci/weekly takes -O1, .ci/run
# runs some tests of each area with what users have (TEST_FLAGS=users). XLA's own passes, fusion
# among them, are always those that users have; benchmarks/exactness.py measures with everything on.
# Flags that are set outside come last and win: those of another processor's instructions, say
# (docs/exactness.md). A worker of pytest-xdist has all.
os.environ["XLA_FLAGS"] = " ".join(
    dict.fromkeys(
        (
            "--xla_force_host_platform_device_count=8",
            *(
                []
                if os.environ.get("TEST_FLAGS") == "users"
                else ["--xla_backend_optimization_level=0"]
            ),
            *os.environ.get("XLA_FLAGS", "").split(),
        )
    )
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests/models/pretrained/test_hub.py has its own Hub

import collections
import gc
import ipaddress
import itertools
import shutil
import signal
import sys
from typing import Any

import jax
import pytest

from jtrain.checkpoint.storage import UNAWAITED
from jtrain.distributed.cpu_threads import release_pool_variable

jax.devices()  # with the threads that `import jtrain` asks for
release_pool_variable()  # a child process asks for its own, as a user's does

jax.config.update("jax_numpy_rank_promotion", "raise")

# A shell that starts the tests in the background, or by nohup, ignores these for all processes.
for ignored, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, handler)


def pytest_configure(config: pytest.Config) -> None:
    """Ignore what another test, or another process, may have left to a test that is not at fault.

    Coroutines of a failed save may be collected in a later test, where pytest has forgotten the
    filter that the save has set. JAX writes a program to the user's
    compile cache in place, so that the other worker may read half of it, and a process that is
    killed or whose disk is full leaves half of it for good: JAX compiles anew then.
    """
    config.addinivalue_line("filterwarnings", f"ignore:{UNAWAITED}:RuntimeWarning")
    half = "Error (reading|writing) persistent compilation cache entry"
    config.addinivalue_line("filterwarnings", f"ignore:{half}:UserWarning")


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of garbage collection: a tenth of the time.

    Collections are rarer too, so a file that is left open may be reported in a later test.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(tryfirst=True)  # before pytest goes by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `sampled(n)` keep every n-th case; the others move a tier down: thorough, then slow."""
    found = collections.Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is None or item.get_closest_marker("slow"):
            continue
        lower = "slow" if item.get_closest_marker("thorough") else "thorough"
        kind = item.nodeid.partition("[")[0], lower
        if found[kind] % sampled.args[0]:
            item.add_marker(lower)
        found[kind] += 1


MOST_MAPS = 10_000
"""Memory maps of a process above which compiled programs are dropped; Linux allows 65,530."""
_tests = itertools.count(1)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Drop the programs that JAX keeps, some seven memory maps each, before they are too many.

    At 65,530 maps of a process, the limit of Linux, XLA's compiler crashes.
    """
    maps = Path("/proc/self/maps")  # of Linux
    if next(_tests) % 16 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


def _refuse_network(event: str, args: tuple[Any, ...]) -> None:
    """Raises where a test would reach another machine, or be reached by one."""
    if event not in ("socket.connect", "socket.bind", "socket.sendto"):
        return
    address = args[1]
    if isinstance(address, tuple) and not _of_this_machine(str(address[0])):
        raise AssertionError(f"{event} {address}: no test needs a network; listen on 127.0.0.1")


def _of_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


sys.addaudithook(_refuse_network)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Restore the search path of modules, to which a config adds the folder of its experiment."""
    path = list(sys.path)
    try:
        return (yield)
    finally:
        sys.path[:] = path


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skips what needs float16 where `XLA_FLAGS` ask for instructions without conversions to it.

    XLA:CPU calls a function for them then that jaxlib does not have.
    """
    try:
        return (yield)
    except jax.errors.JaxRuntimeError as error:
        missing = "Failed to materialize symbols" in str(error)
        if missing and "--xla_cpu_max_isa=" in os.environ["XLA_FLAGS"]:
            pytest.skip("XLA:CPU has no float16 with these instructions")
        raise


@pytest.fixture
def strict_dtypes():
    """No silent dtype promotion: for tests of models and losses."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def from_the_top(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """The project's folder is the current one, as where a person types `jtrain run configs/...`."""
    monkeypatch.chdir(pytestconfig.rootpath)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the runs of all files keep what they compiled, for one another."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def study_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> Path:
    """Work in a folder with the study that trains in a moment, and return its config's path."""
    from quick_study import at_home, write_study  # jtrain, which jaxtyping's hook imports

    path = write_study(tmp_path)
    at_home(tmp_path, monkeypatch, compiled)
    return path


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory, compiled: Path):
    """Train the study with some settings, the first time that a test asks for them.

    The run and its home, which no test changes, are those of all tests with these settings.
    """
    from quick_study import at_home, trained, write_study

    found: dict[tuple[str, ...], tuple[Path, Any]] = {}

    def train(*settings: str):
        if settings not in found:
            with pytest.MonkeyPatch.context() as patch:
                home = tmp_path_factory.mktemp("trained")
                path = write_study(home).relative_to(home)
                at_home(home, patch, compiled)
                found[settings] = home, trained(path, *settings)
        return found[settings]

    return train


@pytest.fixture
def copy_of(run_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    """Work in a copy of the home of a run with some settings, which a test may change."""
    from quick_study import at_home

    def work(*settings: str):
        home, outcome = run_of(*settings)
        shutil.copytree(home, tmp_path / "home")
        at_home(tmp_path / "home", monkeypatch, compiled)
        return outcome

    return work
