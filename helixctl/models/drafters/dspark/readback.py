"""A second, plain implementation of the drafter that knows nothing but an exported config.json and its tensors.

The backbone is DFlash's second implementation; what it does with the heads is written out here once more.

Legend: T context tokens, W slots, H width, C classes of the probe, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from helixctl.models.drafters.dflash.model import DFlashDraftModel
from helixctl.models.drafters.dflash.policy import DFlashPolicy
from helixctl.models.drafters.dflash.published import Published
from helixctl.models.drafters.dflash.readback import (
    Difference,
    Probe,
    begin,
    block_states,
    compare_published,
    difference,
    make_probe,
)
from helixctl.models.drafters.dspark.heads import ConfidenceHead, MarkovHead
from helixctl.models.facts import TargetFacts
from helixctl.models.shared import SharedWeights


def largest_difference(
    model: nn.Module, facts: TargetFacts, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Difference:
    """Compare logits and confidence of ``model`` with those of the exported files, for a random context and tokens.

    Args:
        model: The drafter, on the CPU, in float32, its weights rounded to the exported type.
        facts: Of the target.
        config: Read from the exported config.json, flattened.
        tensors: Read from the exported model.safetensors.
    """
    assert isinstance(model, DFlashDraftModel)
    probe = make_probe(config, facts.vocab_size)
    return difference(_own(model, probe), _plain(config, tensors, probe))


def published_difference(
    source: tuple[Published, Mapping[str, Tensor]], written: tuple[Mapping[str, Any], Mapping[str, Tensor]]
) -> Difference:
    """Compare a published drafter with what was written of it (a flat config.json); 0.0 where they are the same."""
    return compare_published(source, written, _plain)


@torch.no_grad()
def _own(model: DFlashDraftModel, probe: Probe) -> Tensor:
    """Logits and confidence [W, C + 1] from the drafter itself, as decoding and training compute them."""
    shared = SharedWeights(probe.embedding, probe.head, None, 1.0, None, nn.Identity())
    policy = DFlashPolicy(model, shared)
    states = policy.draft_states(*begin(policy, probe))[0]
    markov, confidence = model.markov_head, model.confidence_head
    assert isinstance(markov, MarkovHead) and isinstance(confidence, ConfidenceHead)
    left = markov(_tokens(probe, len(states)))
    logits = states @ probe.head.t() + left @ markov.markov_w2.weight[: len(probe.head)].t()
    return torch.cat((logits, confidence(states, left)[:, None]), dim=1)


def _plain(config: Mapping[str, Any], tensors: Mapping[str, Tensor], probe: Probe) -> Tensor:
    """The same from configuration and tensors."""
    section = config["dflash_config"]
    num_slots = int(section["block_size"]) - 1
    ids = [probe.anchor_id] + [int(section["mask_token_id"])] * (num_slots - 1)
    states = block_states(config, tensors, torch.cat(probe.features, dim=-1), probe.embedding[ids])
    w1, w2 = (tensors[f"markov_head.markov_{name}.weight"].float() for name in ("w1", "w2"))
    before = w1[_tokens(probe, num_slots)]  # [W, r]
    logits = torch.einsum("wh,ch->wc", states, probe.head) + torch.einsum("wr,cr->wc", before, w2[: len(probe.head)])
    weight, bias = (tensors[f"confidence_head.proj.{name}"].float() for name in ("weight", "bias"))
    sure = (torch.cat((states, before), dim=1) * weight).sum(dim=1, keepdim=True) + bias
    return torch.cat((logits, sure), dim=1)


def _tokens(probe: Probe, count: int) -> Tensor:
    """The anchor and ``count`` - 1 tokens behind it, spread over the vocabulary."""
    return (probe.anchor_id + torch.arange(count) * 7919) % len(probe.embedding)
