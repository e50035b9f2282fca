"""Causal blocks: backends agree, later slots are not seen, decoding is the training forward, configurations tell."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch

from helixctl.checkpoint.export import ExportSource, export_drafter
from helixctl.checkpoint.published import open_published
from helixctl.errors import CheckpointError
from helixctl.models.drafters._blocks import make_blocks
from helixctl.models.drafters.jetspec import plugin
from helixctl.models.drafters.jetspec.formats import zlab
from helixctl.models.drafters.jetspec.options import Options
from tests.checkpoint.builders import edit_config, make_facts
from tests.models.drafters.dflash.builders import FACTS, MASK, TAPS, gradients, make_shared, make_slot, packed_slot

BASE = {"num_layers": 2, "num_taps": 3, "block_size": 5, "num_anchors": 6, "mask_token_id": MASK}


def make_model(**values):
    """A causal drafter whose weights are large enough that every part of it shows; trained on the row's tokens."""
    loss = {"cross_entropy": 1.0, "kl": 0.0, "decay_gamma": 7.0}
    model = plugin.build(Options.model_validate({**BASE, "loss": loss, **values}), FACTS, TAPS, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * 0.15 if p.dim() > 1 else 1 + 0.2 * noise)
    return model


def states(backend, slot):
    model = make_model(attention=backend).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without")
        return model(slot, make_shared())


def test_it_learns_the_targets_distribution_unless_told_otherwise():
    loss = Options.model_validate(BASE).loss
    assert (loss.cross_entropy, loss.kl, loss.decay_gamma) == (0.0, 1.0, None)


@pytest.mark.parametrize("backend", ["groups", "flex"])
def test_backends_equal_the_dense_reference(backend):
    slot = packed_slot()
    out, expected = states(backend, slot), states("dense", slot)
    torch.testing.assert_close(out[slot.anchor_valid], expected[slot.anchor_valid], rtol=1e-4, atol=1e-5)


def test_gradients_of_groups_equal_the_dense_reference():
    slot, shared = packed_slot(), make_shared()
    expected = gradients(make_model(attention="dense"), slot, shared)
    for name, gradient in gradients(make_model(attention="groups"), slot, shared).items():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("backend", ["dense", "groups"])
def test_a_slot_sees_itself_and_the_slots_before_it(backend):
    slot, model = packed_slot(), make_model(attention=backend)
    blocks = make_blocks(slot, 5, MASK)
    attention = model._attention(slot, blocks)
    positions = blocks.positions.flatten(0, 1)
    if attention.index is not None:
        positions = positions[attention.index]
    h = torch.zeros(positions.numel(), FACTS.hidden_size, requires_grad=True)
    contexts = model.context_key_values(model.project_features(slot.features), slot.position_ids)
    out = model.run_layers(h + 0.1, model.rotary(positions.flatten()), contexts, attention)
    out[7].sum().backward()  # block 1, slot 2
    assert h.grad is not None
    reached = (h.grad.abs().sum(1) > 0).nonzero().squeeze(1).tolist()
    assert reached == [5, 6, 7]


@pytest.mark.parametrize("backend", ["dense", "groups", "flex"])
def test_features_at_or_after_an_anchor_change_nothing_bit_for_bit(backend):
    slot = make_slot([[20]], 20, [[6, 7, 8, 9]])
    before = states(backend, slot)
    changed = copy.deepcopy(slot)
    for feature in changed.features:
        feature[:, 8:] = feature[:, 8:] * -3.0 + 7.0
    after = states(backend, changed)
    assert torch.equal(after[0, :3], before[0, :3]) and not torch.equal(after[0, 3], before[0, 3])


def test_block_logits_of_training_equal_those_of_decoding():
    slot, shared, model = make_slot([[30]], 30, [[7, 15, 25]]), make_shared(), make_model()
    trained = shared.logits(model.drafted_states(slot, shared))
    policy = plugin.policy(model, shared)
    policy.start(1, 30)
    for place, anchor in enumerate([7, 15, 25]):
        positions = torch.arange(anchor)[None]
        features = [f[:, :anchor] for f in slot.features]
        policy.extend(features, positions, torch.ones_like(positions, dtype=torch.bool))
        where = slot.input_ids[:, anchor], torch.tensor([anchor])
        torch.testing.assert_close(policy.draft_logits(*where), trained[:, place], rtol=1e-4, atol=1e-4)
        # A shorter block is the beginning of a longer one: its slots never saw the rest.
        torch.testing.assert_close(policy.draft_logits(*where, size=3), trained[:, place, :2], rtol=1e-4, atol=1e-4)


def test_an_export_says_that_blocks_are_causal_and_is_compared_as_such(tmp_path):
    options = Options(num_layers=2, block_size=5, mask_token_id=7)
    source = ExportSource(options, make_facts(), (1, 4), "org/target-8b")
    model = plugin.build(options, source.facts, source.taps, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.3)
    result = export_drafter(model, source, tmp_path / "out")
    config = json.loads((result.dir / "config.json").read_text())
    assert config["is_causal"] is True and config["dflash_config"]["causal"] is True
    assert list(result.commands) == ["vLLM"]
    assert open_published(result.dir).algorithm == "jetspec"
    edit_config(result.dir, is_causal=None)  # the section alone is enough
    assert open_published(result.dir).algorithm == "jetspec"
    edit_config(result.dir, dflash_config__causal=False)
    assert open_published(result.dir).algorithm == "dflash"
    with pytest.raises(CheckpointError, match="not causal"):
        zlab.read(json.loads((result.dir / "config.json").read_text()))


def test_an_export_that_forgot_it_would_be_noticed(tmp_path, monkeypatch):
    options = Options(num_layers=2, block_size=5, mask_token_id=7)
    source = ExportSource(options, make_facts(), (1, 4), "org/target-8b")
    write = zlab.write

    def forgetful(drafter):
        config = write(drafter)
        config["dflash_config"]["causal"] = False
        return config

    monkeypatch.setattr(zlab, "write", forgetful)
    model = plugin.build(options, source.facts, source.taps, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.3)
    with pytest.raises(CheckpointError, match="does not compute what the drafter computes"):
        export_drafter(model, source, tmp_path / "out")
