"""Check of the installed packages: versions that do not work together, and second copies."""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from jtrain.inspect.doctor.checks import Finding, error, ok, warning

PLUGIN = re.compile(r"jax-(cuda\d+|rocm\d+)-plugin")
RELATED = ("ml-dtypes", "scipy", "libtpu")  # besides what jtrain requires and SHOWN
# The extra of jax that installs a package.
EXTRAS = {"libtpu": "tpu", "jax-cuda12-plugin": "cuda12", "jax-cuda13-plugin": "cuda13"}
SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
PIP = f"{Path(sys.executable).name} -m pip install"


class Package(NamedTuple):
    """An installed distribution."""

    name: str
    """In the normal form of PyPI: lower case, dashes."""
    version: str
    folder: str
    requires: tuple[str, ...] = ()


class PackageFacts(NamedTuple):
    """The installed packages, in the order in which Python finds them."""

    packages: tuple[Package, ...]
    required: tuple[str, ...] | None
    """What jtrain requires without its extras; None if pip did not install it."""

    def first(self) -> dict[str, Package]:
        """Return the copy of each package that Python finds first."""
        found: dict[str, Package] = {}
        for package in self.packages:
            found.setdefault(package.name, package)
        return found


def gather_packages(path: Sequence[str]) -> PackageFacts:
    """Read the metadata of the packages that matter, from folders as in sys.path."""
    own = next(iter(metadata.distributions(name="jtrain", path=[*path])), None)
    required = own and tuple(text for text in own.requires or () if "extra ==" not in text)
    names = {*map(_name, required or ()), *SHOWN, *RELATED}
    found: dict[tuple[str, str], Package] = {}
    for folder in dict.fromkeys(os.path.realpath(each or ".") for each in path):
        for each in metadata.distributions(path=[folder]):
            name = _normal(each.metadata["Name"] or "")
            if name in names or PLUGIN.fullmatch(name):
                key, requires = (name, str(getattr(each, "_path", folder))), each.requires or ()
                found.setdefault(key, Package(name, each.version, folder, tuple(requires)))
    return PackageFacts(tuple(found.values()), required)


def check_packages(facts: PackageFacts) -> list[Finding]:
    """Return what is wrong with the packages; one finding that all is well if nothing is."""
    first = facts.first()
    findings = [
        *_check_copies(facts.packages),
        *_check_missing(first, facts.required),
        *_check_plugins(first),
    ]
    blamed = {finding.name for finding in findings if finding.status == "error"}
    findings += _check_versions(first, facts.required or (), blamed)
    if findings:
        return findings
    names = [*SHOWN, "libtpu", *filter(PLUGIN.fullmatch, first)]
    return [ok("packages", ", ".join(f"{n} {first[n].version}" for n in names if n in first))]


def _check_copies(packages: Sequence[Package]) -> Iterator[Finding]:
    by_name: dict[str, list[Package]] = {}
    for package in packages:
        by_name.setdefault(package.name, []).append(package)
    for name, copies in by_name.items():
        if len({copy.version for copy in copies}) == 1:  # an editable install beside its wheel
            continue
        where = ", ".join(f"{copy.version} in {copy.folder}" for copy in copies)
        newest = max(copies, key=lambda copy: _numbers(copy.version))  # in one folder no order
        remedy = f"{PIP} --force-reinstall --no-deps '{name}=={newest.version}'"
        if len({copy.folder for copy in copies}) > 1:
            other = copies[0].folder
            remedy = f"{PIP} --upgrade --no-deps --target {other} '{name}=={copies[1].version}'"
        yield error("packages", "package-twice", f"{name} is installed twice: {where}", remedy)


def _check_missing(
    first: Mapping[str, Package], required: Sequence[str] | None
) -> Iterator[Finding]:
    if required is None:
        found = "jtrain is not installed, and what it requires is not known"
        yield warning("packages", "package-missing", found, f"{PIP} jtrain")
    missing = [text for text in required or () if _name(text) not in first]
    if "jax" in first and "jaxlib" not in first:
        missing.append(f"jaxlib=={first['jax'].version}")
    if missing:
        names = ", ".join(map(_name, missing))
        words = " ".join(f"'{text}'" for text in missing)
        found = f"{names} {'is' if len(missing) == 1 else 'are'} not installed"
        yield error("packages", "package-missing", found, f"{PIP} {words}")


def _check_plugins(first: Mapping[str, Package]) -> Iterator[Finding]:
    jaxlib = first.get("jaxlib")
    if jaxlib is None:
        return
    for plugin in [package for name, package in first.items() if PLUGIN.fullmatch(name)]:
        # ROCm's plugins are not compared: jaxlib/plugin_support.py.
        if "cuda" in plugin.name and _numbers(plugin.version) != _numbers(jaxlib.version):
            version = first["jax"].version if "jax" in first else jaxlib.version
            words = f"{plugin.name} {plugin.version} does not work with jaxlib {jaxlib.version}: "
            words += "JAX leaves its kernels out, or computes on the CPU"
            remedy = f"{PIP} --upgrade 'jax[{plugin.name.split('-')[1]}]=={version}'"
            yield error("packages", "plugin-version", words, remedy)


def _check_versions(
    first: Mapping[str, Package], required: Sequence[str], blamed: set[str]
) -> Iterator[Finding]:
    """Check the requirements of jtrain, and those that the packages have themselves."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # reported as missing
        return
    wanted = [("jtrain", text) for text in required]
    wanted += [(package.name, text) for package in first.values() for text in package.requires]
    reported: set[str] = set()
    for owner, text in wanted:
        requirement = Requirement(text)
        package = first.get(_normal(requirement.name))
        if package is None or package.name in reported:
            continue
        extra = EXTRAS.get(package.name, "") if owner == "jax" else ""
        marker = requirement.marker
        if marker and not marker.evaluate({"extra": extra}):
            continue
        if requirement.specifier.contains(package.version, prereleases=True):
            continue
        named = [_numbers(each.version) for each in requirement.specifier]
        if package.name == "libtpu" and any(_numbers(package.version) >= each for each in named):
            continue  # a newer libtpu serves plans, and runs what an older one runs
        if PLUGIN.fullmatch(package.name) and "plugin-version" in blamed:
            continue
        reported.add(package.name)
        versions = f"{requirement.name}{requirement.specifier}"
        whose = owner if owner == "jtrain" else f"{owner} {first[owner].version}"
        remedy = f"{PIP} --upgrade '{versions}'"
        if extra:
            remedy = f"{PIP} --upgrade 'jax[{extra}]=={first['jax'].version}'"
        elif package.name == "jaxlib" and owner == "jax":
            remedy = f"{PIP} --upgrade 'jaxlib=={first['jax'].version}'"
        name = {"jaxlib": "jaxlib-version", "libtpu": "libtpu-version"}.get(package.name)
        found = f"{whose} requires {versions}, and {package.name} {package.version} is installed"
        yield error("packages", name or "package-version", found, remedy)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, as JAX compares them."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _name(requirement: str) -> str:
    """Return the name of a requirement as `Package.name` has it."""
    return _normal(re.split(r"[^\w.-]", requirement)[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
