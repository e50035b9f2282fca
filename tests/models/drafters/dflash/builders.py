"""Tiny drafters, targets' facts and slots, seeded."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from helixctl.data.batch import SlotBatch
from helixctl.models.drafters.dflash import plugin
from helixctl.models.drafters.dflash.model import DFlashDraftModel
from helixctl.models.drafters.dflash.options import Options
from helixctl.models.facts import TargetFacts
from helixctl.models.shared import SharedWeights

MASK = 95
TAPS = (1, 3, 5)
FACTS = TargetFacts(
    num_layers=8,
    hidden_size=32,
    vocab_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    tie_word_embeddings=True,
    model_type="llama",
    max_positions=4096,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    recurrent=False,
    embedding_scale=1.0,
    logit_softcap=None,
    architectures=("LlamaForCausalLM",),
    dtype="bfloat16",
    bos_token_ids=(0,),
    eos_token_ids=(1, 2),
    pad_token_ids=(3,),
)


def make_options(**values: object) -> Options:
    base: dict[str, object] = {"num_layers": 2, "num_taps": 3, "block_size": 5, "num_anchors": 6, "mask_token_id": MASK}
    return Options.model_validate({**base, **values})


def make_model(seed: int = 0, facts: TargetFacts = FACTS, **values: object) -> DFlashDraftModel:
    """A drafter whose weights are large enough that every part of it shows in the output."""
    model = plugin.build(make_options(**values), facts, TAPS, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * 0.15 if p.dim() > 1 else 1 + 0.2 * noise)
    return model


def make_shared(facts: TargetFacts = FACTS, seed: int = 3, **values: object) -> SharedWeights:
    table = torch.randn(facts.vocab_size, facts.hidden_size, generator=torch.Generator().manual_seed(seed))
    shared = SharedWeights(
        embedding=table,
        head=table,
        head_bias=None,
        embedding_scale=facts.embedding_scale,
        logit_softcap=facts.logit_softcap,
        final_norm=nn.Identity(),
    )
    return dataclasses.replace(shared, **values)  # type: ignore[arg-type]


def make_slot(documents: list[list[int]], seq_len: int, anchors: list[list[int]], num_anchors: int = 6) -> SlotBatch:
    """Rows of documents of the given lengths, padding behind them; everything but padding is supervised."""
    rows = len(documents)
    generator = torch.Generator().manual_seed(5)
    document_ids = torch.full((rows, seq_len), -1, dtype=torch.int32)
    positions = torch.zeros(rows, seq_len, dtype=torch.int64)
    for r, lengths in enumerate(documents):
        start = 0
        for d, length in enumerate(lengths):
            document_ids[r, start : start + length] = d
            positions[r, start : start + length] = torch.arange(length)
            start += length
    padded = torch.zeros(rows, num_anchors, dtype=torch.int64)
    valid = torch.zeros(rows, num_anchors, dtype=torch.bool)
    for r, row in enumerate(anchors):
        padded[r, : len(row)] = torch.tensor(row, dtype=torch.int64)
        valid[r, : len(row)] = True
    width = FACTS.hidden_size
    features = [torch.randn(rows, seq_len, width, generator=generator) * scale for scale in (3.0, 20.0, 105.0)]
    return SlotBatch(
        features=features,
        input_ids=torch.randint(4, MASK, (rows, seq_len), generator=generator),
        position_ids=positions,
        document_ids=document_ids,
        loss_mask=document_ids >= 0,
        anchors=padded,
        anchor_valid=valid,
    )


def packed_slot() -> SlotBatch:
    """Two rows, several documents, padding, neighbouring anchors, an anchor at 0 and one before a document's end."""
    return make_slot([[9, 14, 3], [20]], 28, [[0, 1, 7, 12, 13, 20], [4, 5, 18]])


def gradients(model: DFlashDraftModel, slot: SlotBatch, shared: SharedWeights) -> dict[str, Tensor]:
    model.zero_grad()
    terms = model.loss(slot, shared)
    (terms.numerator / terms.denominator).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
