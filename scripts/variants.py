"""What `scripts/ablation.py` compares with the recipe as it is, most important first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BASE = "recipe"
"""The variant that changes nothing."""
Cost = Literal["same", "other"]


@dataclass(frozen=True)
class Variant:
    """One change to the recipe."""

    name: str
    settings: tuple[str, ...] = ()
    """As `--set` takes them."""
    suspect: str | None = None
    """A habit of other trainers (`scripts/suspects.py`)."""
    cost: Cost = "same"
    """other: a step takes another time than the recipe's, so that seconds compare and steps do not."""


def block(size: int, gamma: float) -> tuple[str, ...]:
    """Shorter blocks and the decay that suits them."""
    return f"drafter.block_size={size}", f"drafter.loss.decay_gamma={gamma}"


def per_document(count: int) -> tuple[str, ...]:
    """So many anchors in a document, and nineteen times as many in a row."""
    return f"drafter.anchors_per_document={count}", f"drafter.num_anchors={19 * count}"


VARIANTS = (
    Variant(BASE),
    Variant("WSD", ("train.schedule=wsd",)),
    Variant("8 rows a step", ("train.micro_batch_rows=8",), cost="other"),
    Variant("2 rows a step", ("train.micro_batch_rows=2",), cost="other"),
    Variant("learning rate 5e-3", ("train.learning_rate=5.0e-3",)),
    Variant("learning rate 2e-3", ("train.learning_rate=2.0e-3",)),
    Variant("start from the target's last layers", ("drafter.init_layers=[25, 26, 27, 28, 29]",)),
    Variant(
        "rows not packed",
        ("data.packing=false", "data.seq_len=640", "train.micro_batch_rows=72", "drafter.num_anchors=64"),
        cost="other",
    ),
    Variant("blocks of 16", block(16, 4.0), cost="other"),
    Variant("blocks of 8", block(8, 4.0), cost="other"),
    Variant("D-PACE", ("drafter.loss.position_weights=dpace", "drafter.loss.decay_gamma=null"), cost="other"),
    Variant("half KL", ("drafter.loss.cross_entropy=0.5", "drafter.loss.kl=0.5"), cost="other"),
    Variant("32 anchors per document", per_document(32), cost="other"),
    Variant("128 anchors per document", per_document(128), cost="other"),
    Variant("8 layers", ("drafter.num_layers=8",), cost="other"),
    Variant("3 layers", ("drafter.num_layers=3",), cost="other"),
    Variant("decay 7", ("drafter.loss.decay_gamma=7.0",)),
    Variant("no decay", ("drafter.loss.decay_gamma=null",)),
    Variant("bfloat16 masters", suspect="bf16-masters"),
    Variant("whole blocks only", suspect="whole-blocks"),
    Variant("bfloat16 rotary tables", suspect="bf16-rotary"),
    Variant("every document weighs the same", suspect="per-document"),
    Variant("KL alone", ("drafter.loss.cross_entropy=0", "drafter.loss.kl=1"), cost="other"),
    Variant("betas 0.9 and 0.999", ("train.betas=[0.9, 0.999]",)),
    Variant("weight decay 0.1", ("train.weight_decay=0.1",)),
    Variant("no warm-up", ("train.warmup_ratio=0",)),
    Variant("no clipping", ("train.max_grad_norm=1000",)),
    Variant("noise 0.1", ("drafter.feature_noise.kind=gaussian",)),
    Variant("taps in the upper half", ("drafter.num_taps=null", "drafter.target_layer_ids=[13, 17, 21, 25, 29]")),
)
