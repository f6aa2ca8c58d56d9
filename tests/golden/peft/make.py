"""Write the goldens beside this file: outputs of `transformers` with an adapter that peft wrote.

Run from the folder of the repository, with torch, transformers and peft installed:

    PYTHONPATH=tests python tests/golden/peft/make.py

Bases and terms are drawn by name (tests/published_models.py).
"""

import json
import re
import tempfile
from pathlib import Path

import peft
import torch
import transformers
from published_models import draw, golden, write_model
from safetensors.numpy import load_file, save_file

TARGETS = {"gpt2": ["c_attn", "c_proj"], "llama31": ["q_proj", "v_proj", "down_proj"]}


def write(name: str, targets: list[str]) -> None:
    """Write the golden of an adapter of the modules `targets`."""
    with tempfile.TemporaryDirectory() as folder:
        base = write_model(Path(folder) / "base", golden(name))
        load = lambda: transformers.AutoModelForCausalLM.from_pretrained(
            base, attn_implementation="eager"
        ).eval()
        how = peft.LoraConfig(r=2, lora_alpha=8, target_modules=targets, lora_dropout=0.1)
        out = Path(folder) / "adapter"
        peft.get_peft_model(load(), how).save_pretrained(out)
        shapes = {k: x.shape for k, x in load_file(out / "adapter_model.safetensors").items()}
        terms = {key: draw(key, shape) for key, shape in shapes.items()}
        save_file(terms, out / "adapter_model.safetensors", metadata={"format": "pt"})
        tokens = torch.tensor(golden(name)["tokens"][:1])
        with torch.no_grad():
            found = peft.PeftModel.from_pretrained(load(), out).eval()(input_ids=tokens).logits
        config = json.loads((out / "adapter_config.json").read_text())
    rounded = [[[float(f"{x:.7g}") for x in row] for row in rows] for rows in found.numpy()]
    made = {
        "config": config | {"base_model_name_or_path": "BASE"},
        "tensors": {key: list(shape) for key, shape in shapes.items()},
        "outputs": rounded,
    }
    text = re.sub(r"\[[^][{}]*\]", lambda x: " ".join(x[0].split()), json.dumps(made, indent=1))
    Path(__file__).with_name(f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    for name, targets in TARGETS.items():
        write(name, targets)
