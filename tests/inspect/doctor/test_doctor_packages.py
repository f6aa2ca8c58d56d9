"""Faults of packages are found, each with the line to type."""

import sys
from pathlib import Path

import pytest
from fakes import healthy, install, names, the

from jtrain.inspect.doctor import packages
from jtrain.inspect.doctor.checks import Finding

PYTHON = Path(sys.executable).name


def checked(folder: Path) -> list[Finding]:
    return packages.check_packages(packages.gather_packages([str(folder)]))


def test_a_healthy_environment_has_one_line(tmp_path):
    (finding,) = checked(healthy(tmp_path))
    assert finding.status == "ok"
    assert "jax 0.10.2, jaxlib 0.10.2, flax 0.12.8" in finding.found


@pytest.mark.parametrize(
    ("without", "versions", "name", "words", "remedy"),
    [
        ([], {"jaxlib": "0.7.2"}, "jaxlib-version", "jaxlib<=0.10.2,>=0.10.1", "'jaxlib==0.10.2'"),
        (
            [],
            {"jax__cuda12__plugin": "0.7.2"},
            "plugin-version",
            "jax-cuda12-plugin 0.7.2 does not work with jaxlib 0.10.2",
            "'jax[cuda12]==0.10.2'",
        ),
        (
            [],
            {"libtpu": "0.0.21.1"},
            "libtpu-version",
            "jax 0.10.2 requires libtpu==0.0.42.*, and libtpu 0.0.21.1",
            "'jax[tpu]==0.10.2'",
        ),
        ([], {"flax": "0.11.2"}, "package-version", "jtrain requires flax>=0.12.6", "'flax>=0.12"),
        (["xxhash"], {}, "package-missing", "xxhash is not installed", "'xxhash>=3.5'"),
    ],
)
def test_packages_that_do_not_fit(tmp_path, without, versions, name, words, remedy):
    (finding,) = checked(healthy(tmp_path, *without, **versions))
    assert finding.name == name
    assert words in finding.found
    assert finding.remedy.startswith(f"{PYTHON} -m pip ")
    assert remedy in finding.remedy


def test_a_newer_libtpu_serves_plans(tmp_path):
    assert names(checked(healthy(tmp_path, libtpu="0.0.52"))) == ["ok"]


def test_two_copies_of_jax(tmp_path):
    """As an upgrade into the user's folder leaves them, or one that was interrupted."""
    first = install(tmp_path / "user", jax="0.7.2")
    second = healthy(tmp_path / "site")
    found = packages.check_packages(packages.gather_packages([str(first), str(second)]))
    finding = the(found, "package-twice")
    assert f"0.7.2 in {first}, 0.10.2 in {second}" in finding.found
    assert finding.remedy.endswith(f"--target {first} 'jax==0.10.2'")
    install(second, jax="0.9.0")
    half = the(checked(second), "package-twice")
    assert "--force-reinstall --no-deps 'jax==0." in half.remedy


def test_the_same_package_on_two_paths_is_one(tmp_path):
    first, second = healthy(tmp_path / "a"), healthy(tmp_path / "b")
    found = packages.check_packages(packages.gather_packages([str(first), str(second)]))
    assert names(found) == ["ok"]


def test_without_the_metadata_of_jtrain_a_line_says_so(tmp_path):
    (finding,) = checked(healthy(tmp_path, "jtrain"))
    assert (finding.name, finding.status) == ("package-missing", "warning")
    assert finding.remedy == f"{PYTHON} -m pip install jtrain"
