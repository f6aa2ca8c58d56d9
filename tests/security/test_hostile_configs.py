"""A config runs nothing and names no place outside, whatever it says.

Python's audit hook watches. Most of the targets are those that a blocklist of another project let
through: files opened, written, copied, downloaded by nothing but the name of a function in a value.
"""
# ruff: noqa: E501  (a case reads best on a line)

import ast
import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from audit import unwanted, watched
from toy_study import YAML, write_study

from jtrain.cli import main
from jtrain.config.configclass import WRITABLE
from jtrain.config.resolve import resolve
from jtrain.config.sections import XlaConfig, flag_problems
from jtrain.errors import ConfigError
from jtrain.train.trackers import TensorBoard

ROOT = Path(__file__).parents[2]
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
    **{f"a kind {name}": config(YAML.replace("kind: adamw", f"kind: '{name}'")) for name in ("os:system", "subprocess:call", "builtins:exec", "/etc/passwd:x", "..owned:Owned")},
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
    found = (p for p in directory.rglob("*") if "__pycache__" not in p.parts)
    return {str(p): p.lstat().st_mtime_ns for p in found}


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(4))
def test_hostile_configs(part: int, path: Path, capsys):
    for name, (text, settings) in list(CASES.items())[part::4]:
        path.write_text(text)
        before, variables, told = files(path.parents[1]), dict(os.environ), ""
        with watched() as events:
            try:
                resolve(path, settings)
            except ConfigError as error:
                told = str(error)
        assert not unwanted(events, path.parents[1], *INSTALLED), (name, told)
        assert files(path.parents[1]) == before, name
        assert dict(os.environ) == variables, name
        assert main(["show", str(path), *settings]) in {0, 2}, name
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err, name
        assert "hunter2" not in told + shown.out + shown.err, name
        assert "owned" not in sys.modules, name


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


def test_only_the_named_experiment_is_imported(tmp_path: Path):
    path = write_study(tmp_path)
    for name in ("other", "another"):
        (tmp_path / "experiments" / f"{name}.py").write_text("raise AssertionError('imported')")
    with watched() as events:
        resolve(path)
    ran = {Path(event.args[0].co_filename) for event in events if event.name == "exec"}
    assert {file.name for file in ran if file.is_relative_to(tmp_path)} == {"toy.py"}


# Keys of text that name no place: metrics, patterns of leaves, fields of a row, words of a text.
PLAIN = {
    "Stage.set", "Stage.lr", "Task.answer", "Task.choices", "Task.context", "Task.match", "Task.until", "FP8.products", "FP8.exclude", "EvaluateConfig.sets", "CheckpointConfig.best",
    "Chat.day", "Chat.field", "Chat.ignore", "TextLines.field", "HubTexts.config", "HubTexts.split", "HubTexts.column", "HubImages.config", "HubImages.split", "HubImages.image", "HubImages.label", "TextPairs.marks", "Mixture.tokenizer", "Tokens.tokenizer", "CharacterTokens.alphabet",
    "PretrainedTokenizer.end", "Lora.on", "ParamGroup.match", "Muon.adamw", "Muon.stacks", "Optax.args", "OptimizerConfig.decay",
    "Prompt.text", "SampleConfig.prompt", "ImageClassifier.preset", "CustomOptimizer.kind", "Published.kind", "Config.optimizer", "Mixture.parts", "BaseConfig.experiment",
}  # fmt: skip


def keys_of_text() -> Iterator[tuple[str, str]]:
    """Yield each field of a config class that takes text: its class and name, and its key."""
    for folder in ("jtrain", "experiments"):
        for file in (ROOT / folder).rglob("*.py"):
            if "configclass" not in (text := file.read_text()):
                continue
            for cls in ast.walk(ast.parse(text)):
                if isinstance(cls, ast.ClassDef) and any(
                    "configclass" in ast.unparse(each) for each in cls.decorator_list
                ):
                    for field in cls.body:
                        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                            kind = ast.unparse(field.annotation).replace("jt.Registry", "")
                            words = ("str", "Path", "Uri", "Address", "Any", "Name")
                            if any(word in kind for word in words) and kind.split("[")[0] not in (
                                "ClassVar",
                                "Literal",
                            ):
                                key = "from" if "'from'" in ast.unparse(field) else field.target.id
                                yield f"{cls.name}.{field.target.id}", key


def test_each_key_of_text_is_in_the_table_or_names_no_place():
    table = (ROOT / "SECURITY.md").read_text().partition("## Keys of a config")[2]
    rows = [row.split("|")[1] for row in table.partition("## What is promised")[0].splitlines() if row.startswith("| `")]  # fmt: skip
    listed = {word.strip(" `").split(".")[-1] for row in rows for word in row.split(",")}
    found = dict(keys_of_text())
    assert {"TensorBoard.directory", "MLflow.uri", "ResizedImages.cache"} <= found.keys()
    assert {name for name, key in found.items() if key not in listed} - PLAIN == set()


HOSTILE_TRACKERS = [
    "kind: tensorboard, directory: {out}", "kind: tensorboard, directory: ../out",
    "kind: tensorboard, directory: a/../../out", "kind: tensorboard, directory: link/out",
    "kind: tensorboard, directory: .git/hooks", "kind: mlflow, uri: 'file:{out}'",
    "kind: mlflow, uri: 'file://{out}'", "kind: mlflow, uri: 'file:../out'",
    "kind: mlflow, uri: 'file:%2e%2e/out'", "kind: mlflow, uri: '{out}'",
    "kind: mlflow, uri: 'sqlite:///../out.db'",
    "kind: mlflow, uri: 'sqlite:///file:out.db?uri=true'",
    "kind: mlflow, uri: 'sqlite+pysqlcipher://:x@/{out}'",
    "kind: mlflow, uri: 'mssql+pyodbc:///?odbc_connect=Driver=/tmp/evil.so'",
    "kind: mlflow, uri: 'postgresql://evil/x?sslkey=/etc/passwd'",
]  # fmt: skip
HOSTILE_STORES = [
    "file://{out}", "local://{out}", "file://../out", "ssh://host/x", "ftp://host/x", "http://host/x",
    "s3://bucket/x::file://{out}", "simplecache://x", "github://a:b@c/x", "dask://x", "reference://x",
]  # fmt: skip
ALLOWED = [
    "trackers=[{kind: tensorboard, directory: logs/tb}]",
    "trackers=[{kind: mlflow, uri: 'file:mlruns'}]",
    "trackers=[{kind: mlflow, uri: 'sqlite:///mlflow.db'}]",
    "trackers=[{kind: mlflow, uri: 'https://user@mlflow.example:5000/x'}]",
    "trackers=[{kind: mlflow, uri: databricks}]", "checkpoint.store=s3://bucket/runs",
    "checkpoint.store=file://{here}/copies",
]  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv(WRITABLE, raising=False)
    Path("link").symlink_to(tmp_path)
    path = Path("digits.yaml")
    path.write_text("experiment: digits\nsteps: 3\nbatch: 8\noptimizer: {kind: adam, lr: 1e-3}\n")
    return path


def test_a_config_names_no_place_outside(config: Path, tmp_path: Path, monkeypatch):
    trackers = [f"trackers=[{{{{{t}}}}}]" for t in HOSTILE_TRACKERS]
    for setting in [*trackers, *(f"checkpoint.store={s}" for s in HOSTILE_STORES)]:
        monkeypatch.delenv(WRITABLE, raising=False)
        setting = setting.format(out=tmp_path / "out")
        with pytest.raises(ConfigError) as caught:
            resolve(config, [setting])
        if f"set {WRITABLE}=" in (text := str(caught.value)):
            advice = text.partition(f"set {WRITABLE}=")[2].split(" to allow")[0]
            monkeypatch.setenv(WRITABLE, f"/nowhere{os.pathsep}{advice}")
            resolve(config, [setting])


def test_a_config_names_places_inside(config: Path, tmp_path: Path):
    for setting in ALLOWED:
        resolve(config, [setting.replace("{here}", str(Path.cwd()))])
    assert TensorBoard(directory=str(tmp_path)).directory == str(tmp_path), "Python code may"


def test_an_image_cache_lies_inside(config: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"data\.cache.*not below the current directory"):
        resolve("image_folder", [f"data.cache={tmp_path}/cache"])
    resolve("image_folder", ["data.cache=cache"])
    resolve("image_folder", ["data.cache=memory"])


HOSTILE_FLAGS = [
    "xla_dump_to=out", "xla_dump_hlo_as_text=true", "xla_dump_to=/out", "xla_enable_dumping=1",
    "xla_backend_extra_options=-load=evil", "xla_gpu_cuda_data_dir=cuda", "xla_gpu_ptx_compiler_extra_flags=-o",
    "xla_gpu_kernel_cache_file=out", "xla_gpu_dump_autotune_results_to=1", "xla_gpu_load_autotune_results_from=a",
    "xla_gpu_pgle_profile_file_or_directory_path=a", "xla_gpu_per_fusion_autotune_cache_dir=a",
    "xla_gpu_target_config_filename=a", "xla_gpu_ptx_file=a", "flagfile=flags", "undefok=a", "log_dir=a", "v=3",
    "xla_cpu_unknown_name=/etc/passwd", "xla_cpu_unknown_name=~/x", "xla_gpu_gemm_autotuner_override_file=a", "xla_cpu_a=$(touch${IFS}OWNED)",
]  # fmt: skip
TPU_FLAGS = ["xla_jf_dump_to=a", "megascale_coordinator_address=evil:1", "tpu_log_dir=a", "flagfile=a", "xla_tpu_a=/b"]  # fmt: skip


def test_no_flag_of_a_compiler_writes_or_runs():
    for flag in HOSTILE_FLAGS:
        ((key, words),) = flag_problems(XlaConfig(flags=(f"--{flag}",)))
        assert key == "xla.flags"
        command = words.partition("if you want that: ")[2]
    shown = subprocess.run(f"{command}; echo $XLA_FLAGS", shell=True, capture_output=True, text=True)  # fmt: skip
    assert shown.stdout.strip() == f"--{flag}", "the last one has a dollar sign"
    for flag in TPU_FLAGS:
        ((key, words),) = flag_problems(XlaConfig(tpu_flags=(flag,)))
        assert key == "xla.tpu_flags"
        assert f"export LIBTPU_INIT_ARGS=--{flag}" in words


def test_flags_that_only_compile_are_allowed():
    flags = ("--xla_gpu_enable_triton_gemm=false", "xla_cpu_a=-1", "--xla_gpu_enable_command_buffer=FUSION,CUBLAS", "--xla_gpu_all_to_all_size=8")  # fmt: skip
    tpu = ("--xla_tpu_scoped_vmem_limit_kib=65536", "--megascale_graph_hang_threshold=10m")
    assert not [*flag_problems(XlaConfig(flags=flags, tpu_flags=tpu))]
