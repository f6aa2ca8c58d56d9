"""Table of docs/plans.md: the presets planned for TPUs and GPUs, one process a plan.

    python benchmarks/plan_table.py [PRESET ...] [--topology T ...]

Needs the extras `plan` and `plan-gpu`. Answers are cached: a second call takes seconds a row.
"""

import argparse
import json
import subprocess
import sys
from typing import Any

RANDOM = "data={kind: random, context: 1024, vocab: 50304}"
PRESETS: dict[str, list[str]] = {
    "gpt2": [RANDOM],
    "llama2_7b": [],
    "llama3_8b": [],
    "mixtral_8x7b": [],
}
TOPOLOGIES = ("v5e:4x4", "v5p:2x2x4", "v6e:4x4", "tpu7x:2x2x2", "h100:8", "2*h200:8")
DEVICES = dict.fromkeys(TOPOLOGIES, 16) | {"h100:8": 8}

# Published by MaxText, https://github.com/AI-Hypercomputer/maxtext: 492 TFLOP/s of 989 on 8 H100
# (src/maxtext/configs/gpu/a3/llama_2_7b/README.md); Llama 3.1 on 256 v6e
# (docs/reference/models/tiering.md).
MAXTEXT = {("llama2_7b", "h100:8"): "49.7 %", ("llama3_8b", "v6e:4x4"): "45.5 % (256 chips)"}


def settings(preset: str, topology: str) -> list[str]:
    """Return the settings of a preset on a topology, beside its config."""
    words = list(PRESETS[preset])
    if preset == "mixtral_8x7b":
        words += [f"parallel.fsdp={DEVICES[topology] // 8}", "parallel.expert=8"]
    if "h" in topology and preset != "gpt2":  # the kernel `splash` is for TPUs
        words.append("model.attention=xla")
    return words


def plan(preset: str, topology: str) -> dict[str, Any]:
    """Return the plan as `jtrain plan --json` prints it, or its error."""
    command = [sys.executable, "-m", "jtrain", "plan", f"configs/{preset}.yaml", "--json"]
    done = subprocess.run(
        [*command, "--topology", topology, *settings(preset, topology)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):
        return {"error": done.stderr.strip().splitlines()[-1:]}
    return json.loads(done.stdout)


def row(preset: str, topology: str, found: dict[str, Any]) -> str:
    """Return a line of the table."""
    if "error" in found:
        return f"| `{preset}` | {topology} | {found['error']} |"
    memory, estimate = found["memory"], found["estimate"] or {}
    layout = ", ".join(f"{axis} {size}" for axis, size in found["layout"].items() if size > 1)
    sent = sum(each["sent"] for each in found["collective_table"])
    beside = sum(each["overlapped"] for each in found["collective_table"])
    cells = [
        f"`{preset}`",
        topology,
        layout,
        f"{memory['peak'] / 1e9:.1f} of {memory['limit'] / 1e9:.1f}",
        "yes" if found["fits"] else "no",
        f"{sent / 1e9:.1f}",
        f"{beside / sent:.0%}".replace("%", " %") if sent else "",
        f"{estimate.get('seconds', 0):.2f}",
        estimate.get("bound", ""),
        f"{estimate['mfu']:.0%}".replace("%", " %") if estimate.get("mfu") else "",
        MAXTEXT.get((preset, topology), ""),
    ]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "config",
    "topology",
    "layout",
    "memory, GB",
    "fits",
    "sent, GB",
    "beside computation",
    "estimate, s",
    "bound",
    "MFU, estimated",
    "MFU, MaxText's",
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("presets", nargs="*", default=list(PRESETS))
    parser.add_argument("--topology", nargs="*", default=list(TOPOLOGIES))
    args = parser.parse_args()
    print(f"| {' | '.join(HEAD)} |\n|---|---|---|---|---|{'---:|' * 3}---|---:|---:|")
    for preset in args.presets or PRESETS:
        for topology in args.topology:
            print(row(preset, topology, plan(preset, topology)), flush=True)


if __name__ == "__main__":
    main()
