"""Check of the Python that runs jtrain."""

import sys
from collections.abc import Iterator, Mapping

from jtrain.inspect.doctor.finding import Finding, error, ok, warning

OLDEST, NEWEST = (3, 11), (3, 13)


def check_python(
    version: tuple[int, ...], executable: str, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Return findings about the version of Python, and about the environment it runs in.

    A Python older than 3.11 is refused where jtrain is imported.
    """
    found = f"Python {'.'.join(map(str, version[:3]))} at {executable}"
    if version[:2] > NEWEST:
        yield error(
            "python",
            "python-new",
            f"{found}; jtrain is tested up to {NEWEST[0]}.{NEWEST[1]}",
            "uv venv --python 3.12 && source .venv/bin/activate && uv pip install jtrain",
        )
        return
    virtual = environ.get("VIRTUAL_ENV")
    if virtual and not executable.startswith(virtual.rstrip("/") + "/"):
        yield warning(
            "python",
            "python-other-environment",
            f"{found}, and the active environment is {virtual}: packages installed there are not "
            f"seen",
            f"{virtual}/bin/python -m jtrain doctor",
        )
        return
    yield ok("python", found)


def python_findings(environ: Mapping[str, str]) -> list[Finding]:
    """Return the findings about this Python."""
    return list(check_python(sys.version_info[:3], sys.executable, environ))
