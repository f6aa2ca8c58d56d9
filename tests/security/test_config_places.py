"""What a config names is written and run only inside: each key of text, and what it refuses."""

# ruff: noqa: E501  (a list reads best on a line)

import ast
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jtrain.config.resolve import resolve
from jtrain.config.write_paths import WRITABLE
from jtrain.config.xla import XlaConfig, misfitting_flags
from jtrain.errors import ConfigError
from jtrain.train.trackers.tensorboard import TensorBoard

ROOT = Path(__file__).parents[2]
# Keys of text that name no place: metrics, patterns of leaves, fields of a row, words of a text.
PLAIN = {
    "FP8.products", "FP8.exclude", "EvaluateConfig.int8", "EvaluateConfig.sets", "CheckpointConfig.best",
    "Chat.day", "Chat.field", "Chat.ignore", "TextLines.field", "TextPairs.marks", "Mixture.tokenizer", "Tokens.tokenizer", "CharacterTokens.alphabet",
    "PretrainedTokenizer.end", "Lora.on", "ParamGroup.match", "Muon.adamw", "Muon.stacks", "OptimizerConfig.decay",
    "Prompt.text", "CustomOptimizer.kind", "Config.optimizer", "Mixture.parts", "BaseConfig.experiment",
}  # fmt: skip


def keys_of_text() -> Iterator[tuple[str, str]]:
    """Yield each field of a config class that takes text: its class and name, and its key."""
    for folder in ("jtrain", "experiments"):
        for file in (ROOT / folder).rglob("*.py"):
            for cls in ast.walk(ast.parse(file.read_text())):
                if isinstance(cls, ast.ClassDef) and any(
                    "configclass" in ast.unparse(each) for each in cls.decorator_list
                ):
                    for field in cls.body:
                        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                            kind = ast.unparse(field.annotation)
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
    assert {"TensorBoard.directory", "MLflow.uri", "ImageFolder.cache"} <= found.keys()
    assert {name for name, key in found.items() if key not in listed} - PLAIN == set()


HOSTILE_TRACKERS = [
    "kind: tensorboard, directory: {out}",
    "kind: tensorboard, directory: ../out",
    "kind: tensorboard, directory: a/../../out",
    "kind: tensorboard, directory: link/out",
    "kind: tensorboard, directory: .git/hooks",
    "kind: mlflow, uri: 'file:{out}'",
    "kind: mlflow, uri: 'file://{out}'",
    "kind: mlflow, uri: 'file:../out'",
    "kind: mlflow, uri: 'file:%2e%2e/out'",
    "kind: mlflow, uri: '{out}'",
    "kind: mlflow, uri: 'sqlite:///../out.db'",
    "kind: mlflow, uri: 'sqlite:///file:out.db?uri=true'",
    "kind: mlflow, uri: 'sqlite+pysqlcipher://:x@/{out}'",
    "kind: mlflow, uri: 'mssql+pyodbc:///?odbc_connect=Driver=/tmp/evil.so'",
    "kind: mlflow, uri: 'postgresql://evil/x?sslkey=/etc/passwd'",
]
HOSTILE_STORES = [
    "file://{out}", "local://{out}", "file://../out", "ssh://host/x", "ftp://host/x", "http://host/x",
    "s3://bucket/x::file://{out}", "simplecache://x", "github://a:b@c/x", "dask://x", "reference://x",
]  # fmt: skip
ALLOWED = [
    "trackers=[{kind: tensorboard, directory: logs/tb}]",
    "trackers=[{kind: mlflow, uri: 'file:mlruns'}]",
    "trackers=[{kind: mlflow, uri: 'sqlite:///mlflow.db'}]",
    "trackers=[{kind: mlflow, uri: 'https://user@mlflow.example:5000/x'}]",
    "trackers=[{kind: mlflow, uri: databricks}]",
    "checkpoint.store=s3://bucket/runs",
    "checkpoint.store=file://{here}/copies",
]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv(WRITABLE, raising=False)
    Path("link").symlink_to(tmp_path)
    path = Path("digits.yaml")
    path.write_text("experiment: digits\nsteps: 3\nbatch: 8\noptimizer: {kind: adam, lr: 1e-3}\n")
    return path


@pytest.mark.parametrize(
    "setting",
    [f"trackers=[{{{{{t}}}}}]" for t in HOSTILE_TRACKERS]
    + [f"checkpoint.store={s}" for s in HOSTILE_STORES],
)
def test_a_config_names_no_place_outside(setting: str, config: Path, tmp_path: Path, monkeypatch):
    setting = setting.format(out=tmp_path / "out")
    with pytest.raises(ConfigError) as caught:
        resolve(config, [setting])
    text = str(caught.value)
    if f"set {WRITABLE}=" in text:
        advice = text.partition(f"set {WRITABLE}=")[2].split(" to allow")[0]
        monkeypatch.setenv(WRITABLE, f"/nowhere{os.pathsep}{advice}")
        resolve(config, [setting])


@pytest.mark.parametrize("setting", ALLOWED)
def test_a_config_names_places_inside(setting: str, config: Path):
    resolve(config, [setting.replace("{here}", str(Path.cwd()))])


def test_a_config_made_in_python_writes_anywhere(tmp_path: Path):
    assert TensorBoard(directory=str(tmp_path)).directory == str(tmp_path)


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


@pytest.mark.parametrize("flag", HOSTILE_FLAGS)
def test_no_flag_of_the_compiler_writes_or_runs(flag: str):
    ((key, words),) = misfitting_flags(XlaConfig(flags=(f"--{flag}",)))
    assert key == "xla.flags"
    command = words.partition("if you want that: ")[2]
    shown = subprocess.run(f"{command}; echo $XLA_FLAGS", shell=True, capture_output=True, text=True)  # fmt: skip
    assert shown.stdout.strip() == f"--{flag}"


@pytest.mark.parametrize("flag", TPU_FLAGS)
def test_no_flag_of_libtpu_writes_or_runs(flag: str):
    ((key, words),) = misfitting_flags(XlaConfig(tpu_flags=(flag,)))
    assert key == "xla.tpu_flags"
    assert f"export LIBTPU_INIT_ARGS=--{flag}" in words


def test_flags_that_only_compile_are_allowed():
    flags = ("--xla_gpu_enable_triton_gemm=false", "xla_cpu_a=-1", "--xla_gpu_enable_command_buffer=FUSION,CUBLAS", "--xla_gpu_all_to_all_size=8")  # fmt: skip
    tpu = ("--xla_tpu_scoped_vmem_limit_kib=65536", "--megascale_graph_hang_threshold=10m")
    assert not [*misfitting_flags(XlaConfig(flags=flags, tpu_flags=tpu))]
