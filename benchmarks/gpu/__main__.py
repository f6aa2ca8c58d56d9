"""jtrain on one NVIDIA GPU, beside PyTorch: speed, memory, start, saves, and a kill.

    pip install -r benchmarks/gpu-requirements.txt
    python benchmarks/gpu                          all parts; writes gpu.md and gpu.json
    python benchmarks/gpu --parts gpt2-cudnn kill  some of them
    python benchmarks/gpu --quick                  fewer turns, and one round of starts and saves
    python benchmarks/gpu --rehearse               every part at toy size on the CPU

Each part is a process of its own, so that one which fails leaves the others their memory and their
row in the table, which is written after each. `--torch PYTHON` names another Python that has torch.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import environment, markdown

HERE = Path(__file__).parent
# What answers most comes first: a run that is cut off has it in its table.
PARTS = {
    "gpt2-cures": "GPT-2: the guard by a select, logits in bfloat16, all logits at once",
    "llama-cures": "the Llama: the same",
    "gpt2-cudnn": "GPT-2, 124 million parameters, attention by cuDNN",
    "llama-cudnn": "a Llama of 1.1 billion parameters, attention by cuDNN",
    "llama-fp8": "the same, linear layers in fp8",
    "gpt2-flags": "GPT-2: each flag of XLA beside the default",
    "gpt2-xla": "GPT-2, attention by XLA",
    "start": "seconds from the command to the first step, cold and warm",
    "save": "what an asynchronous save costs the loop",
    "resnet18": "ResNet-18 on images of 32 x 32",
    "gpt2-fp8": "GPT-2, linear layers in fp8",
    "cnn": "a CNN of two convolutions on images of 28 x 28",
    "memory-gpt2": "memory of GPT-2 beside `jtrain plan`",
    "memory-llama": "memory of the Llama beside `jtrain plan`",
    "kill": "SIGKILL and resume, bit for bit",
}


def main() -> int:
    """Run the parts; return 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--quick", action="store_true", help="fewer turns of the same sizes")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--torch", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for a part")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="gpu.md and gpu.json")
    asked = parser.parse_args()
    results = {}
    for name in asked.parts:
        began = time.perf_counter()
        results[name] = {"title": PARTS[name], **run_part(name, asked)}
        seconds = round(time.perf_counter() - began)
        outcome = results[name].get("failed") or "done"
        print(f"{name:14} {seconds:5} s  {outcome.splitlines()[-1]}", flush=True)
        found = {"environment": environment(asked.rehearse), "parts": results}
        asked.out.with_suffix(".json").write_text(json.dumps(found, indent=1))
        asked.out.with_suffix(".md").write_text(markdown(found))
    print(f"wrote {asked.out.with_suffix('.md')} and {asked.out.with_suffix('.json')}")
    return int(any("failed" in part for part in results.values()))


def run_part(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of a part, or why it failed."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "part.json"
        sizes = "rehearsal" if asked.rehearse else "quick" if asked.quick else "full"
        command = [sys.executable, str(HERE / "part.py"), name, sizes, asked.torch, str(out)]
        paths = [str(HERE.parent.parent), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        changed = {"PYTHONPATH": os.pathsep.join(paths)}
        # PyTorch's process needs its share of the memory.
        changed["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        if asked.rehearse:
            changed["JAX_PLATFORMS"] = "cpu"
        try:
            run = subprocess.run(
                command,
                env={**os.environ, **changed},
                cwd=scratch,
                timeout=asked.timeout,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {asked.timeout:g} s"}
        if run.returncode or not out.exists():
            return {"failed": run.stdout[-2000:].strip() or f"exit code {run.returncode}"}
        return json.loads(out.read_text())


if __name__ == "__main__":
    sys.exit(main())
