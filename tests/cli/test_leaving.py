"""Exit of the command: one of several processes that failed does not wait for the others."""

import pkgutil
import signal
import sys
import tomllib
from pathlib import Path

import jax
import pytest

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


class AloneError(Exception):
    """Raised in place of an exit without the others."""


def ends_alone(code: int) -> None:
    raise AloneError(code)


@pytest.mark.parametrize(("several", "how"), [(True, AloneError), (False, SystemExit)])
def test_the_installed_command_ends_by_itself_where_it_is_one_of_several(
    several: bool, how: type[BaseException], monkeypatch: pytest.MonkeyPatch
):
    script = tomllib.loads(PROJECT.read_text())["project"]["scripts"]["jtrain"]
    monkeypatch.setattr(sys, "argv", ["jtrain", "rum"])
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: several)
    monkeypatch.setattr("jtrain.cli.exit_alone", ends_alone)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(how, match="2"):
        pkgutil.resolve_name(script)()
