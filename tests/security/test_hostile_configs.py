"""A config runs nothing, whatever it says: 60 that try, under Python's audit hook.

Most of the targets are those that a blocklist of another project let through: files opened,
written, copied, downloaded by nothing but the name of a function in a value.
"""
# ruff: noqa: E501  (a case reads best on a line)

import contextlib
import importlib
import os
import sys
from pathlib import Path

import pytest
from audit import Event, unwanted, watched
from cases import by_name
from toy_study import YAML, write_study

from jtrain.cli import main
from jtrain.config.resolve import resolve
from jtrain.errors import ConfigError

TARGETS = [
    "os.system", "subprocess.call", "subprocess.Popen", "builtins.exec", "builtins.eval", "runpy.run_path",
    "importlib.import_module", "shutil.rmtree", "os.remove", "timeit.timeit", "builtins.open", "io.open",
    "shutil.copyfile", "urllib.request.urlopen", "numpy.savetxt", "logging.FileHandler", "zipfile.ZipFile",
    "jax.numpy.save", "numpy.load", "pathlib.Path.unlink",
]  # fmt: skip
MODEL = "model:\n  "
BOMB = "\n".join(
    ["x0: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    + [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 9)]
)


def config(text: str) -> tuple[str, tuple[str, ...]]:
    return text, ()


def setting(text: str) -> tuple[str, tuple[str, ...]]:
    return YAML, (text,)


# Each would create the file OWNED beside it, read SECRET, or reveal where it ran.
CASES = {
    **{f"_target_ {name}": config(YAML + MODEL + f"_target_: {name}\n  args: [OWNED, w]\n") for name in TARGETS[:10]},
    **{f"a tag {name}": config(YAML + MODEL + f"title: !!python/object/apply:{name} ['touch OWNED']\n") for name in TARGETS[10:]},
    **{f"an experiment {name}": config(YAML.replace("toy", name, 1)) for name in ("os:system", "os.system", "../owned", "owned.py", "/etc/passwd", "experiments.owned", "__main__", "_owned", "os", "builtins")},
    "a name of Python": config(YAML + MODEL + "title: !!python/name:os.system x\n"),
    "a module of Python": config(YAML + MODEL + "title: !!python/module:owned x\n"),
    "an object of Python": config(YAML + MODEL + "title: !!python/object:owned.Owned {}\n"),
    "an object made anew": config(YAML + MODEL + "title: !!python/object/new:os.system [touch OWNED]\n"),
    "a tag of one's own": config(YAML + MODEL + "title: !Owned {}\n"),
    "a directive": config("%TAG ! tag:yaml.org,2002:python/\n---\n" + YAML + MODEL + "title: !name:os.system x\n"),
    "a variable": config(YAML + MODEL + "title: ${oc.env:JTRAIN_SECRET}\n"),
    "an expression": config(YAML + MODEL + "title: ${eval:'open(\"OWNED\", \"w\")'}\n"),
    "a template": config(YAML + MODEL + "title: '{{ self.__init__.__globals__ }}'\n"),
    "a format": config(YAML + MODEL + "title: '{0.__class__.__init__.__globals__}'\n"),
    "a shell": config(YAML + MODEL + "title: $(touch OWNED)`touch OWNED`;touch OWNED|touch OWNED\n"),
    "dunders": config(YAML + MODEL + "__class__: Owned\n  __init__: {}\n"),
    "a dunder at the top": config(YAML + "__builtins__: {open: OWNED}\n"),
    "an alias bomb": config(YAML + BOMB + "\n"),
    "an alias of itself": config(YAML + MODEL + "layers: &a [*a, *a]\n"),
    "ten megabytes": config(YAML + MODEL + f"title: {'x' * 10_000_000}\n"),
    "a thousand brackets": config(YAML + MODEL + f"layers: {'[' * 1000}\n"),
    "a base elsewhere": config("base: /etc/passwd\n"),
    "a base above": config("base: ../../../../../../etc/passwd\n"),
    "a base from the network": config("base: http://127.0.0.1:9/x.yaml\n"),
    "a base of a file address": config("base: file:///etc/passwd\n"),
    "a base that is a device": config("base: /dev/zero\n"),
    "a base that is a pipe": config("base: pipe.yaml\n"),
    "a base that is a link to a secret": config("base: link.yaml\n"),
    "a name above": config(YAML + "name: ../../owned\n"),
    "a name from the top": config(YAML + "name: /tmp/owned\n"),
    "a setting of a dunder": setting("__class__.__init__.__globals__=1"),
    "a setting of a class": setting("model.__class__.__name__=Owned"),
    "a setting with a tag": setting("model.title=!!python/object/apply:os.system ['touch OWNED']"),
    "a setting of the experiment": setting("experiment=os:system"),
    "a setting of the base": setting("base=/etc/passwd"),
    "an option in a setting": setting("--config=/etc/passwd"),
    "merge keys": config(YAML + "<<: !!python/object/apply:os.system ['touch OWNED']\n"),
    "a key with a tag": config(YAML + "? !!python/object/apply:os.system ['touch OWNED']\n: 1\n"),
    "a nought": config(YAML + MODEL + 'title: "\\0; touch OWNED"\n'),
}  # fmt: skip
LONG = {f"an experiment {name}" for name in ("_owned", "os", "builtins")}  # "__main__" is alike
OWNED_CODE = "open('OWNED', 'w').close()\nclass Owned:\n    def __init__(self, *a, **k): open('OWNED', 'w').close()\n"


# Read to find experiments of packages; never run.
INSTALLED = [Path(place) for place in sys.path if place]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a config beside modules that leave a trace when they are imported."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sys.modules.pop("owned", None)
    monkeypatch.setenv("JTRAIN_SECRET", "hunter2")
    monkeypatch.chdir(tmp_path)
    path = write_study(tmp_path)
    for place in (tmp_path / "owned.py", tmp_path / "experiments" / "_owned.py"):
        place.write_text(OWNED_CODE)
    secret = tmp_path.parent / f"{tmp_path.name}-secret.yaml"
    secret.write_text("user: me\npassword: hunter2\n")
    (path.parent / "link.yaml").symlink_to(secret)
    os.mkfifo(path.parent / "pipe.yaml")
    resolve(path)  # imports everything that a config needs
    with contextlib.suppress(ConfigError):
        resolve(path, ["steps=none", "optimzer=1"])
    return path


def files(directory: Path) -> dict[str, int]:
    return {
        str(p): p.lstat().st_mtime_ns for p in directory.rglob("*") if "__pycache__" not in p.parts
    }


def events_of(path: Path, settings: tuple[str, ...]) -> tuple[list[Event], str]:
    told = ""
    with watched() as events:
        try:
            resolve(path, settings)
        except ConfigError as error:
            told = str(error)
    return events, told


@pytest.mark.parametrize("case", by_name(CASES, CASES.keys() - LONG, pytest.mark.thorough))
def test_hostile_configs(case, path: Path):
    text, settings = case
    path.write_text(text)
    before, variables = files(path.parents[1]), dict(os.environ)
    events, told = events_of(path, settings)
    assert not unwanted(events, path.parents[1], *INSTALLED), told
    assert files(path.parents[1]) == before
    assert dict(os.environ) == variables
    assert "owned" not in sys.modules
    assert "hunter2" not in told


def test_hostile_configs_are_60():
    assert len(CASES) >= 60


@pytest.mark.parametrize("case", by_name(CASES, CASES.keys() - LONG, pytest.mark.thorough))
def test_hostile_configs_are_refused_without_a_traceback(case, path: Path, capsys):
    text, settings = case
    path.write_text(text)
    code = main(["show", str(path), *settings])
    told = capsys.readouterr()
    assert code in {0, 2}
    assert "Traceback" not in told.err
    assert "hunter2" not in told.out + told.err


def test_the_audit_hook_sees_every_kind_of_event(path: Path):
    """Check the hook: no case may pass for lack of detection."""
    seen = {
        "import": lambda: __import__("owned"),
        "exec": lambda: importlib.import_module("experiments._owned"),
        "open": lambda: (path.parent / "x").write_text("x"),
        "os.system": lambda: os.system("true"),
        "compile": lambda: compile("1", "x", "eval"),
    }
    for name, does in seen.items():
        with watched() as events:
            does()
        assert any(line.startswith(f"{name}(") for line in unwanted(events, path.parents[1])), name
    with watched() as events:
        Path("/etc/hostname").exists()
        Path("/etc/passwd").read_bytes()
    assert len(unwanted(events, path.parents[1])) == 1


def test_only_the_named_experiment_is_imported(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = write_study(tmp_path)
    for name in ("other", "another"):
        (tmp_path / "experiments" / f"{name}.py").write_text("raise AssertionError('imported')")
    with watched() as events:
        resolve(path)
    ran = {Path(event.args[0].co_filename) for event in events if event.name == "exec"}
    assert {file.name for file in ran if file.is_relative_to(tmp_path)} == {"toy.py"}
