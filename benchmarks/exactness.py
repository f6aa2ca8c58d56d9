"""Distance of any layout from one device: the worst figures of the whole matrix, as a table.

Runs the slow tests of tests/every/test_every_strategy.py, 400 layouts, and reads what they record;
or reads a record that `pytest --junit-xml` left. Most of an hour on two cores.

    python benchmarks/exactness.py [--record FILE] [-k EXPRESSION]
"""

import argparse
import collections
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TypeAlias

from pairs import machine

ROOT = Path(__file__).parent.parent
MATRIX = "tests/every/test_every_strategy.py"
FIGURES = ["loss", "gradient", "losses of SGD", "parameters of SGD", "losses of AdamW"]
Figures: TypeAlias = dict[str, float]


def measure(record: Path, only: str) -> None:
    """Run the matrix, which leaves its record; continue after failures, as their figures count."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", MATRIX, "--junit-xml", record]
    subprocess.run([*command, "-k", f"whole_matrix and ({only})"], cwd=ROOT, check=False)


def read(record: Path) -> dict[str, Figures]:
    """Return the figures of each case by its name."""
    cases = {}
    for test in ET.parse(record).iter("testcase"):
        found = {p.attrib["name"]: p.attrib["value"] for p in test.iter("property")}
        if "case" in found:
            cases[found["case"]] = {name: float(found[name]) for name in FIGURES}
    return cases


def worst(cases: dict[str, Figures]) -> dict[str, Figures]:
    """Return the largest of each figure over all cases that share a value of the matrix."""
    by_value: dict[str, list[Figures]] = collections.defaultdict(list)
    for column in zip(*(case.split("-") for case in cases), strict=True):
        for value, figures in zip(column, cases.values(), strict=True):
            by_value[value].append(figures)
    by_value["all"] = list(cases.values())
    return {
        value: {name: max(figures[name] for figures in group) for name in FIGURES}
        for value, group in by_value.items()
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, help="a record to read instead of measuring")
    parser.add_argument("-k", default="test", help="which cases, as pytest takes it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = arguments.record or Path(folder) / "record.xml"
        if not arguments.record:
            measure(record, arguments.k)
        cases = read(record)
    print(f"{len(cases)} layouts; {machine()}\n")
    print(f"| | {' | '.join(FIGURES)} |\n|---|{'---:|' * len(FIGURES)}")
    for value, figures in worst(cases).items():
        print(f"| {value} | {' | '.join(f'{figures[name]:.1e}' for name in FIGURES)} |")


if __name__ == "__main__":
    main()
