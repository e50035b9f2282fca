"""What a micro-batch of a block drafter occupies beside weights, optimizer and slots. Never imports torch.

Counted from the code: every tensor that autograd keeps of ``_layers.py``, the attention and the head, until backward. A
test compares the count with what autograd really keeps.

Legend: R rows, S tokens per row, N = R x A x B slots, H width, Q and G widths of queries and of keys, I MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from helixctl.models.drafters._options import BlockOptions
from helixctl.models.drafters._sizes import Shape, make_shape, parameter_count

if TYPE_CHECKING:
    from helixctl.models.facts import TargetFacts

HEAD_CHUNK_ROWS = 4096
"""Slots per chunk of the head on a GPU; a test holds it equal to the head's own number."""
CPU_HEAD_CHUNK_ROWS = 512
"""The same on a CPU."""
_FLOAT32 = 4
_GROUP_BLOCKS = 16
"""Blocks that share a product on a CPU, at most."""
_MLP_GRADIENTS = 3
"""Tensors [N, I] that live at once in the backward of an MLP, beside what forward kept."""


@dataclass(frozen=True)
class Work:
    """One micro-batch on one device."""

    rows: int
    seq_len: int
    compute_bytes: int
    """Per element of matrix products: 2 or 4."""
    on_gpu: bool
    compiled: bool = False
    """Layers are compiled: float32 inside norms is computed again in backward, not kept."""
    most_anchors: int | None = None
    """Of the fullest row that there is; None where that is unknown."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes at the peak of a micro-batch, by what holds them."""

    kept: int
    """Until backward: by the layers, the projection of the features, and the states' gradient."""
    passing: int
    """For a moment on top: a chunk of logits with its gradient, or the gradients inside an MLP."""
    copies: int
    """Low-precision copies of the weights."""


def step_bytes(options: BlockOptions, facts: TargetFacts, work: Work) -> StepBytes:
    """Peak of one training micro-batch with as many anchors in use as there can be, and every token supervised."""
    s, options = make_shape(options, facts), with_computed_anchors(options, work)
    slots, tokens = work.rows * options.num_anchors * s.block_size, work.rows * work.seq_len
    per_slot = s.num_layers * (_kept_per_slot(s, work) + _attention_per_slot(s, options, work))
    final_norm = s.hidden_size * (_norm_bytes(work) + work.compute_bytes)
    per_slot += final_norm + 2 * _FLOAT32 * s.head_dim + s.hidden_size * work.compute_bytes
    return StepBytes(
        kept=slots * per_slot + tokens * _context_per_token(s, work),
        passing=max(_head(s, options, work), _MLP_GRADIENTS * slots * s.intermediate_size * work.compute_bytes),
        copies=work.compute_bytes * parameter_count(options, facts) if work.compute_bytes < _FLOAT32 else 0,
    )


def with_computed_anchors(options: BlockOptions, work: Work) -> BlockOptions:
    """Options with as many anchors as are computed: on a CPU, in groups, those of the fullest row; elsewhere all."""
    if work.on_gpu or work.compiled or work.most_anchors is None or options.attention not in ("auto", "groups"):
        return options
    return options.model_copy(update={"num_anchors": max(1, min(options.num_anchors, work.most_anchors))})


def _norm_bytes(work: Work) -> int:
    """Kept per element of a norm's input: itself in float32, and on a CPU its normed value, too."""
    return _FLOAT32 if work.on_gpu else 2 * _FLOAT32


def _kept_per_slot(s: Shape, work: Work) -> int:
    """Of one layer, its attention's scores left out. Compiled, float32 is computed again, and so is silu(gate)."""
    c = work.compute_bytes
    norm, products = (c, 3) if work.compiled else (_norm_bytes(work), 4)  # gate, up, their product; silu(gate)
    queries, keys = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    norms = 2 * s.hidden_size * (norm + c)  # inputs, and what the projections read
    return norms + queries * (norm + 2 * c) + keys * (norm + 2 * c) + products * s.intermediate_size * c


def _attention_per_slot(s: Shape, options: BlockOptions, work: Work) -> int:
    """Log-sum-exps on a GPU; probabilities of a group of blocks on a CPU, where rows hold one document."""
    if work.on_gpu:
        return _FLOAT32 * s.num_heads
    group = min(_GROUP_BLOCKS, options.num_anchors)
    keys = (work.seq_len + 1) // 2 + group * s.block_size
    return work.compute_bytes * s.num_heads * keys


def _context_per_token(s: Shape, work: Work) -> int:
    c, keys = work.compute_bytes, s.num_kv_heads * s.head_dim
    projected, norm = (_FLOAT32, c) if work.compiled else (_norm_bytes(work), _norm_bytes(work))
    return s.hidden_size * (projected + c) + s.num_layers * keys * (norm + 2 * c) + 2 * _FLOAT32 * s.head_dim


def _head(s: Shape, options: BlockOptions, work: Work) -> int:
    """One chunk of logits with its gradient, and copies of the states: those given to the head, and their gradients."""
    classes, c = s.vocab_size, work.compute_bytes
    slots, extra = work.rows * options.num_anchors * s.block_size, 0
    if options.loss.sampled_classes is not None:
        classes = min(classes, options.loss.sampled_classes + slots)
        extra = classes * s.hidden_size * c
    rows = min(HEAD_CHUNK_ROWS if work.on_gpu else CPU_HEAD_CHUNK_ROWS, slots)
    chunk = rows * classes * (c + _FLOAT32 + c if work.on_gpu else c)  # on a CPU gradients replace logits
    if options.loss.needs_last_hidden:
        chunk += rows * classes * (_FLOAT32 + c)
    return chunk + extra + 2 * slots * s.hidden_size * c
