"""Exports of a causal LM: an ordinary Hugging Face folder with its tokenizer, which any engine loads.

The folder is written beside its place, read back from the disk by transformers, compared with the model in memory, and
only then put in place.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from helixctl.checkpoint.atomic import new_folder
from helixctl.checkpoint.export import CARD_FILE, MARKER, ExportResult, check_replaceable
from helixctl.checkpoint.header import CONFIG_FILE, WEIGHTS_FILE
from helixctl.errors import CheckpointError
from helixctl.models.tokenizer import HelixTokenizer
from helixctl.version import __version__

FORMAT = "transformers"
TOLERANCE = 1e-4
"""Largest difference allowed between logits in float32, relative to the largest; measured: 4e-7 for a Llama."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_FILES = (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE, "generation_config.json", *_TOKENIZER_FILES)
_PROBE_TOKENS = 16


@dataclass(frozen=True)
class LMCard:
    """What the card of a model says, beside what its configuration says."""

    name: str
    license: str | None = None
    """Identifier as the hub knows it."""
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measured values."""
    recipe: str | None = None
    """YAML."""


def check_lm_replaceable(output_dir: Path) -> None:
    """Refuse a place that holds anything but an earlier export.

    Raises:
        CheckpointError: see ``check_replaceable``.
    """
    check_replaceable(output_dir, _FILES)


def export_lm(model: Any, tokenizer: HelixTokenizer, card: LMCard, output_dir: Path) -> ExportResult:
    """Write ``output_dir`` in bfloat16; an earlier export there is replaced in one step, anything else is left alone.

    Args:
        model: Of transformers, on any device; not changed.
        tokenizer: That it was trained with.
        card: What people should know.
        output_dir: Folder of the export; made if absent.

    Raises:
        CheckpointError: ``output_dir`` holds something else, a weight is not finite, the disk refuses, or what was
            written does not compute what the model computes. An earlier export is then still there.
    """
    output_dir = output_dir.resolve()
    check_lm_replaceable(output_dir)
    _check_finite(model)
    rounded = copy.deepcopy(model).to("cpu")
    for parameter in rounded.parameters():  # alone: in bfloat16 the angles of rotary positions would be others
        parameter.data = parameter.data.to(torch.bfloat16)
    rounded.config.dtype = torch.bfloat16
    rounded.config.eos_token_id, rounded.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    rounded.config.bos_token_id = tokenizer.bos_token_id
    rounded.generation_config = tokenizer.make_generation_config()
    with new_folder(output_dir, "export") as folder:
        rounded.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        marked = {**config, MARKER: f"helixctl {__version__}"}
        (folder / CONFIG_FILE).write_text(json.dumps(marked, indent=2) + "\n", encoding="utf-8")
        (folder / CARD_FILE).write_text(_make_card(card, rounded), encoding="utf-8")
        difference = _read_back(folder, rounded, tokenizer)
    with safe_open(output_dir / WEIGHTS_FILE, framework="pt") as weights:
        num_tensors = len(weights.keys())
    commands = {
        "vLLM": f"vllm serve {output_dir}",
        "SGLang": f"python -m sglang.launch_server --model-path {output_dir}",
    }
    num_bytes = (output_dir / WEIGHTS_FILE).stat().st_size
    return ExportResult(output_dir, FORMAT, num_tensors, num_bytes, difference, commands)


def _check_finite(model: nn.Module) -> None:
    bad = sorted(name for name, tensor in model.named_parameters() if not bool(tensor.isfinite().all()))
    if bad:
        raise CheckpointError(f"weights are not finite: {', '.join(bad)}", fix="export an earlier checkpoint")


@torch.no_grad()
def _read_back(folder: Path, rounded: Any, tokenizer: HelixTokenizer) -> float:
    """Load what was written as anybody would, and compare; the largest difference of two logits, in float32.

    Raises:
        CheckpointError: the model or the tokenizer is another.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ours = copy.deepcopy(rounded).float().eval()
    ours.config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(tokenizer), (1, _PROBE_TOKENS), generator=generator)
    one: Tensor = read(input_ids=ids, use_cache=False).logits
    other: Tensor = ours(input_ids=ids, use_cache=False).logits
    difference, scale = float((one - other).abs().max()), float(other.abs().max())
    if not difference <= TOLERANCE * max(scale, 1.0):
        raise CheckpointError(
            f"the export does not compute what the model computes: logits differ by {difference:g} of {scale:g}",
            fix="report this as a bug of helixctl, with the recipe; nothing was replaced",
        )
    text = "def main(): return 'ok'  # \u00e9\n"
    if AutoTokenizer.from_pretrained(folder)(text)["input_ids"] != tokenizer(text)["input_ids"]:
        raise CheckpointError("the exported tokenizer reads texts in another way", fix="report this as a bug")
    return difference


def _make_card(card: LMCard, model: Any) -> str:
    """Markdown with the front matter that hubs read; no place of this machine."""
    head = ["---", *([f"license: {card.license}"] if card.license else []), "library_name: transformers"]
    head += ["pipeline_tag: text-generation", "---", "", f"# {card.name}", ""]
    head += [f"A causal language model, trained by helixctl {__version__}.", ""]
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    facts = {
        "architecture": type(model).__name__,
        "parameters": f"{num_parameters:,}",
        "vocabulary": f"{model.config.vocab_size:,} rows",
        **({"trained for": f"{card.step:,} steps"} if card.step else {}),
    }
    lines = [f"- {name}: {text}" for name, text in facts.items()]
    if card.metrics:
        rows = [f"| {name} | {value:.4g} |" for name, value in sorted(card.metrics.items())]
        lines += ["", "## Measured", "", "| metric | value |", "|---|---|", *rows]
    if card.recipe:
        lines += ["", "## Recipe", "", "```yaml", card.recipe.rstrip(), "```"]
    return "\n".join([*head, *lines]) + "\n"
