"""Names of topologies: those that exist, and what to type in the place of those that do not."""

import sys

import pytest

from jtrain.cli import main
from jtrain.errors import ConfigError
from jtrain.inspect.plan.gpu_targets import GPU_TARGETS
from jtrain.inspect.plan.topology import MACHINE_GPUS, SLICES, find_topology, nearest_slices


@pytest.mark.parametrize(
    ("kind", "dims", "nearest"),
    [
        ("v5e", (3, 5), ["4x4", "2x4", "4x8"]),
        ("v5e", (4, 4, 1), ["4x4", "2x4", "4x8"]),
        ("v5p", (4, 4), ["2x2x4", "2x4x4", "2x2x2"]),
        ("tpu7x", (1, 1, 1), ["2x2x1", "2x2x2", "2x2x4"]),
    ],
)
def test_the_nearest_slices_have_nearly_as_many_chips(kind, dims, nearest):
    assert nearest_slices(kind, dims) == nearest


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h1000:8", r"no compiler for 'h1000' here; kinds: cpu, .*h100.*did you mean h100"),
        ("h100:6", r"a machine has 1, 2, 4 or 8 GPUs; write h100:8\."),
        ("h100:16", r"write h100:8, or 2\*h100:8 for 2 machines"),
        ("a100:2x4", r"a machine has 1, 2, 4 or 8 GPUs; write a100:8"),
        ("2*v5e:4x4x4", r"v5e has no slice 4x4x4; the nearest are 2\*v5e:8x8,"),  # links in a plane
    ],
)
def test_an_unknown_machine_raises_with_those_that_exist(name, said):
    with pytest.raises(ConfigError, match=said):
        find_topology(name)


def test_without_the_gpus_compiler_the_line_that_installs_it_is_named(monkeypatch, capsys):
    for version in ("12", "13"):
        monkeypatch.setitem(sys.modules, f"jax_plugins.xla_cuda{version}", None)
    assert main(["plan", "configs/shakespeare.yaml", "--topology", "h100:8"]) == 2
    assert "pip install 'jtrain[plan-gpu]'" in capsys.readouterr().err


def test_an_old_libtpu_is_named_with_the_line_that_renews_it(tmp_path, monkeypatch):
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").touch()
    about = tmp_path / "libtpu-0.0.19.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: libtpu\nVersion: 0.0.19.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"libtpu 0\.0\.19\.1 is out of date; .*0\.0\.40 or newer"
    ):
        find_topology("v5e:4x4")


def test_a_layout_that_does_not_fill_the_devices_is_named(capsys):
    words = ["parallel.kind=sharded", "parallel.fsdp=3", "batch=24"]
    assert main(["plan", "configs/shakespeare.yaml", "--topology", "cpu:8", *words]) == 2
    assert "8" in capsys.readouterr().err


@pytest.mark.compiler
@pytest.mark.parametrize("kind", list(SLICES))
def test_the_compiler_knows_every_slice(kind):
    for shape in SLICES[kind]:
        assert find_topology(f"{kind}:{shape}").devices


@pytest.mark.compiler
def test_the_slices_that_an_error_names_exist():
    with pytest.raises(ConfigError, match=r"v5e has no slice 3x5; the nearest are") as raised:
        find_topology("v5e:3x5")
    names = str(raised.value).rpartition("are ")[2].rstrip(".").split(", ")
    assert all(find_topology(name).devices for name in names)


@pytest.mark.compiler
@pytest.mark.parametrize("kind", list(GPU_TARGETS))
def test_machines_have_their_gpus(kind):
    for count in MACHINE_GPUS:
        one, two = find_topology(f"{kind}:{count}"), find_topology(f"2*{kind}:{count}")
        assert len(one.devices) == count
        assert [device.process_index for device in two.devices] == [0] * count + [1] * count
        assert one.limit == int(0.75 * GPU_TARGETS[kind].memory)
