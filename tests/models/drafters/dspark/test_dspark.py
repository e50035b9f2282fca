"""Shifted labels and a sequential head: the loss is the formula, decoding walks as training taught, exports match."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from helixctl.checkpoint.export import ExportSource, export_drafter
from helixctl.checkpoint.published import open_published
from helixctl.decoding.policy import DraftCall
from helixctl.errors import CheckpointError
from helixctl.models.drafters._blocks import make_blocks
from helixctl.models.drafters._memory import Work
from helixctl.models.drafters.dspark import plugin
from helixctl.models.drafters.dspark.check import check
from helixctl.models.drafters.dspark.formats import deepspec
from helixctl.models.drafters.dspark.heads import ConfidenceHead, MarkovHead
from helixctl.models.drafters.dspark.objective import train_terms
from helixctl.models.drafters.dspark.options import Options, parameter_count, step_bytes
from tests.checkpoint.builders import make_facts
from tests.models.drafters.dflash.builders import FACTS, MASK, TAPS, gradients, make_shared, make_slot, packed_slot
from tests.models.drafters.test_memory import ANCHORS, BLOCK, ROWS, SEQ_LEN, WIDE, full_slot, kept_bytes
from tests.models.drafters.test_objective import shared_with_norm, with_last_hidden

BASE: dict[str, Any] = {"num_layers": 2, "num_taps": 3, "block_size": 5, "num_anchors": 6, "mask_token_id": MASK}
LOSS = {"cross_entropy": 0.3, "l1": 0.7, "kl": 0.2, "confidence": 0.5, "decay_gamma": 3.0}


def make_model(**values):
    """A drafter whose weights are large enough that every part of it shows in the output."""
    model = plugin.build(Options.model_validate({**BASE, "markov_rank": 6, **values}), FACTS, TAPS, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            large = 0.8 if name.startswith("markov") else 0.15
            p.copy_(noise * large if p.dim() > 1 else 1 + 0.2 * noise)
    return model


def heads(model) -> tuple[MarkovHead, ConfidenceHead]:
    markov, confidence = model.markov_head, model.confidence_head
    assert isinstance(markov, MarkovHead) and isinstance(confidence, ConfidenceHead)
    return markov, confidence


def test_initial_weights_and_sizes():
    options = Options.model_validate(BASE)
    model = plugin.build(options, FACTS, TAPS, 0)
    markov, confidence = heads(model)
    assert options.markov_rank == 256 and model.num_slots == 4
    assert abs(markov.markov_w1.weight.std() - 0.02) < 1e-3 and confidence.proj.bias.item() == 0
    assert parameter_count(options, FACTS) == sum(p.numel() for p in model.parameters())
    loss = Options(mask_token_id=3).loss
    assert (loss.cross_entropy, loss.l1, loss.confidence, loss.decay_gamma) == (0.1, 0.9, 1.0, 4.0)


@given(st.integers(0, 26), st.integers(1, 40))
def test_every_slot_predicts_the_token_behind_its_place(anchor: int, size: int):
    slot = make_slot([[27]], 27, [[anchor]])
    blocks = make_blocks(slot, size, MASK, shift=1)
    count = min(size, 26 - anchor)
    assert int(blocks.supervised.sum()) == count
    assert blocks.labels[0, 0, :count].tolist() == slot.input_ids[0, anchor + 1 : anchor + 1 + count].tolist()
    assert blocks.ids[0, 0].tolist() == [int(slot.input_ids[0, anchor]), *[MASK] * (size - 1)]
    assert blocks.first == 0


def test_loss_and_gradients_are_those_of_the_formula_on_full_logits():
    slot, shared = with_last_hidden(packed_slot()), shared_with_norm()
    slot.loss_mask[0, 15] = False
    model = make_model(loss=LOSS)
    markov, confidence = heads(model)
    states = model(slot, shared)
    goal = shared.logits(shared.final_norm(slot.last_hidden))
    expected, weights, sums = torch.zeros(()), 0.0, dict.fromkeys(("cross_entropy", "l1", "kl", "confidence"), 0.0)
    for row, place in slot.anchor_valid.nonzero().tolist():
        anchor = int(slot.anchors[row, place])
        for k in range(4):
            i = anchor + k + 1
            inside = i < slot.input_ids.shape[1] and slot.document_ids[row, i] == slot.document_ids[row, anchor]
            if not (inside and slot.loss_mask[row, i]):
                continue
            left = markov.markov_w1.weight[slot.input_ids[row, i - 1]]
            raw = states[row, place, k] @ shared.head.t() + markov.markov_w2.weight @ left
            own, other = 8.0 * torch.tanh(raw / 8.0), goal[row, i - 1]
            l1 = (own.softmax(0) - other.softmax(0)).abs().sum()
            sure = confidence.proj(torch.cat((states[row, place, k], left)))[0]
            terms = {
                "cross_entropy": F.cross_entropy(own[None], slot.input_ids[row, i][None]),
                "l1": l1,
                "kl": F.kl_div(own.log_softmax(0), other.log_softmax(0), log_target=True, reduction="sum"),
                "confidence": F.binary_cross_entropy_with_logits(sure, 1 - 0.5 * l1.detach()),
            }
            weight = float(torch.exp(torch.tensor(-k / 3.0)))
            weights += weight
            for name, value in terms.items():
                sums[name] += weight * float(value.detach())
                expected = expected + weight * LOSS[name] * value
    terms = model.loss(slot, shared)
    torch.testing.assert_close(terms.numerator, expected, rtol=1e-4, atol=1e-4)
    assert terms.denominator.item() == pytest.approx(weights, rel=1e-5)
    for name, value in sums.items():
        assert terms.sums[f"term_{name}"].item() == pytest.approx(value, rel=1e-4)
    expected.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for name, gradient in gradients(make_model(loss=LOSS), slot, shared).items():
        reference = wanted[name]
        assert reference is not None and reference.abs().max() > 0, name
        scale = reference.abs().max().item()
        torch.testing.assert_close(gradient * weights, reference, rtol=1e-3, atol=1e-4 * scale, msg=name)
    for name in ("loss_num", "loss_den", "term_confidence"):
        torch.testing.assert_close(model.evaluate(slot, shared)[name], terms.sums[name], rtol=1e-4, atol=1e-4)


def float64_loss(drafted, leaves, shared, slot):
    """The recipe's default loss, from states and heads in float64, with full logits; and how wrong the head is."""
    hidden, w1, w2, weight, bias = leaves
    goal = shared.logits(shared.final_norm(slot.last_hidden)).double()
    places = list(range(slot.anchors.numel())) if drafted.index is None else drafted.index.tolist()
    total, distance = torch.zeros((), dtype=torch.float64), 0.0
    for n, flat in enumerate(places):
        row, place = divmod(flat, slot.anchors.shape[1])
        for k in range(4):
            i = int(slot.anchors[row, place]) + k + 1
            if not drafted.blocks.supervised[row, place, k]:
                continue
            left = w1[slot.input_ids[row, i - 1]]
            own = 8.0 * torch.tanh((hidden[n, k] @ shared.head.double().t() + w2 @ left) / 8.0)
            l1 = (own.softmax(0) - goal[row, i - 1].softmax(0)).abs().sum()
            sure, accepted = (weight[0] @ torch.cat((hidden[n, k], left)) + bias[0]).sigmoid(), 1 - 0.5 * l1.detach()
            confidence = -accepted * sure.log() - (1 - accepted) * (1 - sure).log()
            cross = F.cross_entropy(own[None], slot.input_ids[row, i][None])
            decay = float(torch.exp(torch.tensor(-k / 4.0)))
            total = total + decay * (0.1 * cross + 0.9 * l1 + 1.0 * confidence)
            distance += decay * abs(float(sure.detach()) - float(accepted))
    return total, distance


def test_gradients_of_states_and_heads_are_those_of_a_float64_reference():
    slot, shared, model = with_last_hidden(packed_slot()), shared_with_norm(), make_model()
    drafted = model._drafted(slot.features, slot, shared)
    states = drafted.hidden.detach().requires_grad_()
    markov, confidence = heads(model)
    leaves = [states, markov.markov_w1.weight, markov.markov_w2.weight, confidence.proj.weight, confidence.proj.bias]
    terms = train_terms(dataclasses.replace(drafted, hidden=states), model)
    found = torch.autograd.grad(terms.numerator, leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected, distance = float64_loss(drafted, exact, shared, slot)
    assert terms.numerator.item() == pytest.approx(expected.item(), rel=1e-5)
    assert terms.sums["term_confidence_error"].item() == pytest.approx(distance, rel=1e-4)
    for one, reference in zip(found, torch.autograd.grad(expected, exact), strict=True):
        assert reference.abs().max() > 0
        scale = reference.abs().max().item()
        torch.testing.assert_close(one.double(), reference, rtol=1e-4, atol=1e-5 * scale)


def test_decoding_given_the_rows_own_tokens_has_the_logits_of_training():
    slot, shared, model = make_slot([[30]], 30, [[7, 15, 25]]), shared_with_norm(), make_model()
    markov, _ = heads(model)
    states = model.drafted_states(slot, shared)[0]  # [A, B-1, H]
    policy = plugin.policy(model, shared)
    policy.start(1, 30)
    for place, anchor in enumerate([7, 15, 25]):
        positions = torch.arange(anchor)[None]
        features = [f[:, :anchor] for f in slot.features]
        policy.extend(features, positions, torch.ones_like(positions, dtype=torch.bool))
        tokens = slot.input_ids[:, anchor : anchor + 4]
        raw = states[place] @ shared.head.t() + markov(tokens[0]) @ markov.markov_w2.weight.t()
        found = policy.logits_given(tokens, torch.tensor([anchor]))[0]
        torch.testing.assert_close(found, 8.0 * torch.tanh(raw / 8.0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            policy.draft_logits(tokens[:, 0], torch.tensor([anchor]))[0],
            shared.logits(states[place]),
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("size", [5, 3, 2])
def test_drafts_are_chosen_one_after_another_each_given_the_one_before(size):
    slot, shared, model = make_slot([[30], [30]], 30, [[11], [11]]), make_shared(), make_model()
    policy = plugin.policy(model, shared)
    policy.start(2, 30)
    positions = torch.arange(11).expand(2, -1)
    policy.extend([f[:, :11] for f in slot.features], positions, torch.ones_like(positions, dtype=torch.bool))
    asked: list[torch.Tensor] = []

    def choose(logits: torch.Tensor) -> torch.Tensor:
        asked.append(logits)
        return (logits.argsort(-1)[..., -2] + len(asked)) % FACTS.vocab_size  # not the best: what a sample may be

    anchors = slot.input_ids[:, 11]
    drafts = policy.draft(anchors, torch.tensor([11, 11]), DraftCall(size, choose))
    assert drafts.shape == (2, size - 1) and [tuple(x.shape) for x in asked] == [(2, 1, 96)] * (size - 1)
    tokens = torch.cat((anchors[:, None], drafts), dim=1)
    padded = F.pad(tokens[:, :-1], (0, 4 - tokens.shape[1] + 1))
    whole = policy.logits_given(padded, torch.tensor([11, 11]))
    if size == 5:  # shorter blocks are other blocks: their slots see fewer
        torch.testing.assert_close(torch.cat(asked, dim=1), whole, rtol=1e-4, atol=1e-4)


def test_it_tells_of_a_draft_before_it_draws_it_what_the_confidence_head_says():
    slot, shared, model = make_slot([[30], [30]], 30, [[11], [11]]), make_shared(), make_model()
    policy = plugin.policy(model, shared)
    policy.start(2, 30)
    positions = torch.arange(11).expand(2, -1)
    policy.extend([f[:, :11] for f in slot.features], positions, torch.ones_like(positions, dtype=torch.bool))
    seen: list[tuple[str, torch.Tensor]] = []

    def choose(logits: torch.Tensor) -> torch.Tensor:
        seen.append(("drew", (logits.argmax(-1) + len(seen)) % FACTS.vocab_size))
        return seen[-1][1]

    anchors, starts = slot.input_ids[:, 11], torch.tensor([11, 11])
    policy.draft(anchors, starts, DraftCall(5, choose, tell=lambda told: seen.append(("told", told))))
    assert [what for what, _ in seen] == ["told", "drew"] * 4
    drawn = torch.cat([value for what, value in seen if what == "drew"], dim=1)
    before = torch.cat((anchors[:, None], drawn[:, :-1]), dim=1)
    markov, confidence = heads(model)
    states = policy._backbone.draft_states(anchors, starts)
    both = torch.cat((states, markov.markov_w1.weight[before]), dim=-1)
    expected = (both @ confidence.proj.weight[0] + confidence.proj.bias).sigmoid()
    told = torch.cat([value for what, value in seen if what == "told"], dim=1)
    torch.testing.assert_close(told, expected.detach(), rtol=1e-5, atol=1e-6)
    assert told.std() > 0.05


def test_a_tree_asks_the_sequential_head_behind_every_candidate():
    slot, shared, model = make_slot([[30], [30]], 30, [[11], [11]]), make_shared(), make_model()
    policy = plugin.policy(model, shared)
    policy.start(2, 30)
    positions, anchors = torch.arange(11).expand(2, -1), slot.input_ids[:, 11]
    policy.extend([f[:, :11] for f in slot.features], positions, torch.ones_like(positions, dtype=torch.bool))
    next_logits = policy.branch(anchors, torch.tensor([11, 11]), DraftCall(policy.block_size, torch.Tensor.argmax, 11))
    candidates = torch.tensor([[3, 9, 4], [8, 1, 1]])
    for slot_number in range(1, policy.block_size - 1):
        found = next_logits(slot_number, candidates)
        for place in range(3):
            tokens = candidates[:, place, None].expand(-1, policy.block_size - 1).clone()
            tokens[:, 0] = anchors
            expected = policy.logits_given(tokens, torch.tensor([11, 11]))[:, slot_number]
            torch.testing.assert_close(found[:, place], expected, rtol=1e-4, atol=1e-4)
    first = policy.logits_given(anchors[:, None].expand(-1, policy.block_size - 1), torch.tensor([11, 11]))[:, :1]
    torch.testing.assert_close(next_logits(0, anchors[:, None]), first, rtol=1e-4, atol=1e-4)


def test_sampled_classes_train_the_sequential_head_too():
    slot, shared = with_last_hidden(packed_slot()), make_shared()
    model = make_model(loss={**LOSS, "sampled_classes": 8})
    found = gradients(model, slot, shared)
    rows = found["markov_head.markov_w2.weight"].abs().sum(1) > 0
    assert 8 < int(rows.sum()) < FACTS.vocab_size  # the labels and those drawn
    torch.testing.assert_close(model.evaluate(slot, shared), make_model(loss=LOSS).evaluate(slot, shared))


def test_a_document_is_learned_by_heart_and_drafted_to_its_end():
    slot, shared = make_slot([[24]], 24, [[2, 6, 9, 13, 15, 18]]), make_shared()
    model = make_model(loss={"cross_entropy": 1.0, "l1": 0.0, "confidence": 0.0, "decay_gamma": None})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=6e-3, weight_decay=0.0)
    for _ in range(60):
        terms = model.loss(slot, shared)
        optimizer.zero_grad()
        (terms.numerator / terms.denominator).backward()
        optimizer.step()
    sums = model.evaluate(slot, shared)
    assert sums["prefix_sum"] / sums["num_blocks"] == 4  # block_size - 1, before the bonus
    policy = plugin.policy(model, shared)
    policy.start(1, 24)
    positions = torch.arange(9)[None]
    policy.extend([f[:, :9] for f in slot.features], positions, torch.ones_like(positions, dtype=torch.bool))
    call = DraftCall(5, lambda logits: logits.argmax(-1))
    assert torch.equal(policy.draft(slot.input_ids[:, 9], torch.tensor([9]), call), slot.input_ids[:, 10:14])


def make_source(**facts: Any) -> ExportSource:
    options = Options(num_layers=2, block_size=5, mask_token_id=7, markov_rank=6)
    return ExportSource(options, make_facts(**facts), (1, 4), "org/target-8b", format="deepspec")


def make_export(folder, source=None):
    source = source or make_source()
    model = plugin.build(source.options, source.facts, source.taps, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.3)
    return export_drafter(model, source, folder)


def test_an_export_has_what_deepspec_and_vllm_read(tmp_path):
    result = make_export(tmp_path / "out")
    config = json.loads((result.dir / "config.json").read_text())
    wanted = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": 4,  # slots, all of which draft
        "mask_token_id": 7,
        "target_layer_ids": [1, 4],
        "num_target_layers": 6,
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    assert config.items() >= wanted.items()
    assert '"num_speculative_tokens":4' in result.commands["vLLM"] and '"method":"dspark"' in result.commands["vLLM"]
    found = open_published(result.dir)
    assert found.describe().block_size == 5 and found.describe().markov_rank == 6
    shapes = {name: info.shape for name, info in found.tensors.items()}
    assert shapes["markov_head.markov_w1.weight"] == shapes["markov_head.markov_w2.weight"] == (100, 6)
    assert shapes["confidence_head.proj.weight"] == (1, 38) and shapes["confidence_head.proj.bias"] == (1,)


@pytest.mark.parametrize("changes", [{"block_size": 3}, {"mask_token_id": 8}, {"rms_norm_eps": 0.1}])
def test_an_export_that_computes_something_else_is_not_put_in_place(tmp_path, monkeypatch, changes):
    write = deepspec.write
    monkeypatch.setattr(deepspec, "write", lambda drafter: write(drafter) | changes)
    with pytest.raises((CheckpointError, RuntimeError)):
        make_export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_targets_that_the_format_cannot_describe_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="scales its embeddings by 5 and caps its logits at 30"):
        make_export(tmp_path / "out", make_source(embedding_scale=5.0, logit_softcap=30.0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"markov_head_type": "gated"}, "sequential head is 'gated'"),
        ({"enable_confidence_head": False}, "no confidence head"),
        ({"markov_rank": 0}, "no sequential head"),
        ({"target_layer_ids": None}, "target_layer_ids is missing"),
    ],
)
def test_drafters_that_helixctl_cannot_compute_are_refused_and_judged(tmp_path, changes, words):
    result = make_export(tmp_path / "out")
    config = json.loads((result.dir / "config.json").read_text()) | changes
    with pytest.raises(CheckpointError, match=words):
        deepspec.read(config)
    findings, _ = check("deepspec", config, open_published(result.dir).tensors, None)
    assert any(words in finding.message for finding in findings)


def test_check_compares_tensors_with_the_configuration(tmp_path):
    result = make_export(tmp_path / "out")
    config, tensors = json.loads((result.dir / "config.json").read_text()), dict(open_published(result.dir).tensors)
    findings, engines = check("deepspec", config, tensors, make_source().facts)
    assert [finding.severity for finding in findings if not finding.engines] == []
    assert {view.engine: view.reads for view in engines} == {"vLLM": True, "DeepSpec": False}  # it stores no tables
    tensors["markov_head.markov_w2.weight"] = dataclasses.replace(tensors["fc.weight"], shape=(9, 9))
    del tensors["confidence_head.proj.bias"]
    findings, engines = check("deepspec", config, tensors, None)
    text = " ".join(finding.message for finding in findings)
    assert "tensors are missing: confidence_head.proj.bias" in text and "w2.weight is [9, 9], not [100, 6]" in text
    assert not any(view.reads for view in engines)


def test_dynamic_weights_are_refused():
    with pytest.raises(ValidationError, match="not available with a sequential head"):
        Options.model_validate({**BASE, "loss": {"position_weights": "dpace"}})


@pytest.mark.parametrize("num_valid", [ANCHORS // 2, ANCHORS])
@pytest.mark.parametrize("rank", [16, 256])
@pytest.mark.parametrize(("dtype", "compute_bytes"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_what_backward_needs_is_counted(dtype, compute_bytes, rank, num_valid):
    sizes = {"num_anchors": ANCHORS, "block_size": BLOCK, "markov_rank": rank}
    options = Options.model_validate({**BASE, **sizes})
    slot = full_slot(dtype)
    slot.anchor_valid[:, num_valid:] = False
    slot = dataclasses.replace(slot, last_hidden=torch.randn(ROWS, SEQ_LEN, WIDE.hidden_size, dtype=dtype))
    kept = kept_bytes(plugin.build(options, WIDE, TAPS, 0), slot, dtype)
    told = step_bytes(options, WIDE, Work(ROWS, SEQ_LEN, compute_bytes, on_gpu=False, most_anchors=num_valid))
    assert told.kept + told.copies == pytest.approx(kept, rel=0.1)
