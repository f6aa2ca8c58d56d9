"""One part of the benchmark, in a process of its own: writes its rows as JSON.

python part.py NAME full|rehearsal PYTHON_WITH_TORCH OUT
"""

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Measure the part that is asked for."""
    name, sizes, torch, out = sys.argv[1:]
    Path(out).write_text(json.dumps(measure(name, sizes, torch)))


def measure(name: str, sizes: str, torch: str) -> dict[str, Any]:
    """Return the rows and notes of a part."""
    kind, _, variant = name.partition("-")
    if variant == "cures":
        from language import cures

        return cures(kind, sizes)
    if variant == "flags":
        from language import flags

        return flags(kind, sizes)
    if kind in {"gpt2", "llama"}:
        from language import language

        return language(kind, variant, sizes, torch)
    if kind == "memory":
        from language import memory

        return memory(variant, sizes)
    if kind in {"resnet18", "cnn"}:
        from images import images

        return images(kind, sizes, torch)
    import reliability

    return {"start": reliability.start, "save": reliability.save, "kill": reliability.kill}[kind](
        sizes
    )


if __name__ == "__main__":
    main()
