"""What `helixctl profile` says of a small target before and after its launches leave the interpreter lock.

    python -m scripts.launch_bound FOLDER                on a GPU: 0.6B shape, rows of 1,024 tokens, two minutes
    python -m scripts.launch_bound FOLDER --shape tiny   on a CPU, to see that it runs

Before: the target is launched operation by operation, the drafter's compiled layers by Python, as other trainers do it.
After: compiled layers and captured graphs, the default. One JSON line each; the reports stay in FOLDER/before and
FOLDER/after.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from helixctl.data.fingerprint import describe_tokenizer
from scripts.shapes import SHAPES, write_recipe

EAGER = ("target.compile=off", "compile.graphs=off")
BUSY = ("checkpoint.every_steps=1000000",)
LOG_CHARACTERS = 3000


def main() -> int:
    """Profile both; 0 when both could be profiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new or empty folder")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b-small")
    parser.add_argument("--seconds", type=int, default=12, help="of each profile; the verdict wants ten")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    recipe = write_recipe(
        SHAPES[options.shape], options.folder.resolve(), 1000, None, tokenizer=describe_tokenizer(tokenizer)
    )
    write_weights(recipe.parent / "target")
    tokenizer.save_pretrained(recipe.parent / "target")
    are_there = []
    for name, sets in (("before", EAGER), ("after", ())):
        one = profiled(recipe, name, sets, options.seconds)
        print(json.dumps({"profile": name, "shape": options.shape, **one}), flush=True)
        are_there.append("verdict" in one)
    return 0 if all(are_there) else 1


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token per byte: a recipe needs a tokenizer, random documents do not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


def write_weights(folder: Path) -> None:
    """Random ones for the configuration in ``folder``."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        config = transformers.AutoConfig.from_pretrained(folder)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def profiled(recipe: Path, name: str, sets: tuple[str, ...], seconds: int) -> dict[str, Any]:
    """The verdict, its numbers and how busy the process was; or what the command said when there is none."""
    out = recipe.parent / name
    words = [sys.executable, "-m", "helixctl", "profile", str(recipe), "--seconds", str(seconds), "--output", str(out)]
    words += ["--cuda"] if torch.cuda.is_available() else []
    for value in (*BUSY, *sets):
        words += ["--set", value]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    report = out / "report.json"
    if done.returncode or not report.exists():
        return {"exit code": done.returncode, "said": (done.stdout + done.stderr)[-LOG_CHARACTERS:]}
    content = json.loads(report.read_text(encoding="utf-8"))
    return {"verdict": content["verdict"], "pipeline": content["pipeline"]}


if __name__ == "__main__":
    sys.exit(main())
