"""`init`: a recipe with comments, from what the model's and the data's files say."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helixctl.checkpoint.atomic import write_output
from helixctl.cli.peek import DataPeek, MaskToken, choose_mask_token, peek_data, peek_tokenizer
from helixctl.errors import ModelError, UsageError
from helixctl.models.facts import TargetFacts, read_target_facts
from helixctl.models.taps import default_target_layer_ids
from helixctl.plugins import DRAFTERS, plugin_names
from helixctl.recipe.schema import TargetOptions

_SEQ_LENS = (128, 256, 512, 1024, 2048, 3072, 4096, 8192)
_ANCHORS_PER_TOKEN = 1 / 6
"""512 anchors in 3072 tokens, as in published recipes."""
_NUM_TAPS = 5
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Findings:
    """What a look at model and data found out."""

    model: str
    data: Path
    folder: Path
    """Where the recipe goes: its paths start here."""
    target: TargetFacts
    mask_token: MaskToken
    peek: DataPeek
    seq_len: int

    def sentences(self) -> Iterator[str]:
        """For people, one line each."""
        how = "counted" if self.peek.counted else "estimated"
        yield f"target: {self.target.model_type}, {self.target.num_layers} layers of {self.target.hidden_size}"
        yield f"mask token {self.mask_token.id}: {self.mask_token.reason}"
        yield f"documents: format {self.peek.format}, 95 % within {self.peek.long_length} tokens ({how})"


def write_recipe(model: str, data: Path, output: Path, *, force: bool) -> list[str]:
    """Look at both, write `output`, and return what was found out.

    Raises:
        UsageError: the file exists and `force` is off, or there is nothing at `data`.
        ModelError: the model cannot be found, or no mask token.
        DataError: no format understands the documents.
    """
    if output.is_dir():
        raise UsageError(f"{output} is a folder", fix="name a file in it with -o")
    if output.exists() and not force:
        raise UsageError(f"{output} exists", fix="choose another file with -o, or replace it with --force")
    findings = _look(model, data, output.absolute().parent)
    text = "\n".join(_lines(findings)) + "\n"
    write_output(output, text, "-o", parents=True)
    return list(findings.sentences())


def _look(model: str, data: Path, folder: Path) -> Findings:
    target = read_target_facts(TargetOptions(model=model))
    tokenizer = peek_tokenizer(model)
    peek = peek_data(data, tokenizer)
    mask_token = choose_mask_token(target, tokenizer, peek.texts)
    if mask_token is None:
        fix = "choose a row of the embedding yourself, and write the recipe by hand (helixctl recipe schema)"
        raise ModelError(f"{model}: no token was found that could stand for masked places", fix=fix)
    longest = target.max_positions or _SEQ_LENS[-1]
    seq_len = next((n for n in _SEQ_LENS if n >= peek.long_length), _SEQ_LENS[-1])
    return Findings(model, data, folder, target, mask_token, peek, min(seq_len, longest))


def _lines(findings: Findings) -> Iterator[str]:
    """The recipe, line by line."""
    target, peek = findings.target, findings.peek
    model = findings.model if not Path(findings.model).is_dir() else _relative(Path(findings.model), findings.folder)
    algorithm = plugin_names(DRAFTERS)[0]
    name = Path(findings.model).resolve().name if Path(findings.model).is_dir() else findings.model.split("/")[-1]
    field = f"\n      field: {_quote(peek.field)}" if peek.field else ""
    how = "counted with the target's tokenizer" if peek.counted else "estimated from characters"
    num_taps = min(_NUM_TAPS, target.num_layers)
    num_anchors = max(8, round(findings.seq_len * _ANCHORS_PER_TOKEN / 8) * 8)
    yield f"""# Written by `helixctl init`. What it will do: helixctl plan FILE. Options: helixctl recipe schema.
# Relative paths start at this file's folder.
kind: drafter
run:
  dir: {_quote(f"runs/{name}-{algorithm}")}
  seed: 0
target:
  # {target.model_type}: {target.num_layers} layers of {target.hidden_size}, vocabulary {target.vocab_size}
  model: {_quote(model)}
data:
  train:
    - path: {_quote(_relative(findings.data, findings.folder))}
      format: {peek.format}{field}
  validation:
    fraction: 0.05
  store: {_quote(f"runs/{name}-store")}
  # 95 % of the first {len(peek.lengths)} documents have at most {peek.long_length} tokens ({how})
  seq_len: {findings.seq_len}
drafter:
  algorithm: {algorithm}
  num_layers: {num_taps}
  # layers of the target whose output the drafter sees, counted from 0
  target_layer_ids: {list(default_target_layer_ids(target.num_layers, num_taps))}
  block_size: {_BLOCK_SIZE}
  # blocks per row; `helixctl plan` says what share of the tokens they cover
  num_anchors: {num_anchors}
  # {findings.mask_token.reason}
  mask_token_id: {findings.mask_token.id}{_embeddings(target)}
train:
  epochs: 6
  micro_batch_rows: 1
  learning_rate: 6.0e-4
  schedule: cosine
  warmup_ratio: 0.04
validation:
  every_steps: 500
checkpoint:
  every_steps: 500
  keep_last: 3"""


def _embeddings(target: TargetFacts) -> str:
    """Lines for a target that multiplies its embeddings."""
    if target.embedding_scale == 1.0:
        return ""
    scale = f"{target.embedding_scale:.4g}"
    return f"""
  # the target multiplies its embeddings by {scale}; vLLM feeds a drafter raw ones, so it learns on those
  scale_embeddings: false"""


def _relative(path: Path, folder: Path) -> str:
    """From the recipe's folder, unless the user gave it absolute or it is far away."""
    relative = os.path.relpath(path, folder)
    return os.path.abspath(path) if path.is_absolute() or relative.startswith("../..") else relative


def _quote(text: str) -> str:
    """A YAML string; plain where nothing in it could be misread."""
    plain = all(c.isalnum() or c in "/._-" for c in text) and any(c.isalpha() for c in text)
    return text if plain and text[0] not in "-." else json.dumps(text, ensure_ascii=False)
