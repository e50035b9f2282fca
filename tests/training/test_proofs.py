"""Every proof passes on a sound drafter and fails on its fault; one document can be learned by heart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helixctl.data.batch import SlotBatch
from helixctl.data.fingerprint import describe_tokenizer
from helixctl.data.store import SourceCounts
from helixctl.data.store_writer import StoreWriter
from helixctl.decoding.decoded import DecodeOptions, accept_len
from helixctl.decoding.speculative import decode_plain, decode_speculative
from helixctl.models.drafters import _layers
from helixctl.models.drafters.dflash import model as dflash
from helixctl.models.target import Target
from helixctl.plan import Plan
from helixctl.training import proofs
from helixctl.training.build import build_drafter, load_target
from helixctl.training.live import make_policy
from helixctl.training.restore import load_trained
from helixctl.training.results import GreedyCheck
from helixctl.training.run import run_training
from helixctl.training.stages import fill_slot, make_slot
from tests.chats import RECIPE, VOCAB_SIZE, save_target
from tests.data import templates
from tests.training.worlds import make_world_plan

LENGTH = 48
BY_HEART = (
    "train.steps=150",
    "train.schedule=constant",
    "train.log_every_steps=50",
    "drafter.num_anchors=32",
    "validation.every_steps=0",
    "checkpoint.every_steps=150",
)


@dataclass(frozen=True)
class Subject:
    """What the proofs are run on."""

    plan: Plan
    target: Target
    model: nn.Module
    slot: SlotBatch
    ids: torch.Tensor


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A random drafter whose every part shows in its output, and a slot filled by the target."""
    folder = tmp_path_factory.mktemp("proofs")
    save_target(folder / "target")
    (folder / "recipe.yaml").write_text(RECIPE)
    plan = make_world_plan(folder / "recipe.yaml")
    target = load_target(plan, "cpu")
    model = build_drafter(plan, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.15 if parameter.dim() > 1 else 1 + 0.2 * noise)
    ids = torch.randint(3, 250, (LENGTH,), generator=generator)
    batch = proofs.one_document(ids.tolist(), [i >= 8 for i in range(LENGTH)], plan.recipe.drafter.num_anchors)
    slot = make_slot((1, LENGTH, 8), 2, 32, torch.device("cpu"), torch.float32)
    fill_slot(slot, batch, target.features(batch))
    return Subject(plan, target, model, slot, ids)


def test_a_sound_drafter_passes(subject: Subject) -> None:
    shared = subject.target.shared
    assert proofs.same_logits(subject.plan, subject.model, subject.slot, shared).passed
    before = [feature.clone() for feature in subject.slot.features]
    assert proofs.no_leak(subject.model, subject.slot, shared).passed
    assert all(torch.equal(a, b) for a, b in zip(before, subject.slot.features, strict=True))
    assert proofs.captured(subject.target, subject.ids).passed


class Shifted:
    """A policy whose blocks stand one position too far."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.block_size = policy.block_size
        self.start, self.extend = policy.start, policy.extend

    def draft_logits(self, anchor_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.policy.draft_logits(anchor_ids, positions + 1)
        return logits


class Late(Shifted):
    """A policy that gets every feature at the position behind its own."""

    def __init__(self, policy: Any) -> None:
        super().__init__(policy)
        self.extend = lambda features, positions, valid: policy.extend(features, positions + 1, valid)

    def draft_logits(self, anchor_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.policy.draft_logits(anchor_ids, positions)
        return logits


@pytest.mark.parametrize("fault", [Shifted, Late])
def test_proof_1_sees_positions_off_by_one(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(proofs, "make_policy", lambda *arguments: fault(make_policy(*arguments)))
    found = proofs.same_logits(subject.plan, subject.model, subject.slot, subject.target.shared)
    assert not found.passed, found.detail


def test_proof_1_sees_another_rope_in_decoding(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*arguments: Any) -> Any:
        policy = make_policy(*arguments)
        inner: Any = policy
        head_dim = inner.model.shape.head_dim
        monkeypatch.setattr(inner.model, "rotary", lambda at: _layers.rotary_tables(at, head_dim, 500.0))
        return policy

    monkeypatch.setattr(proofs, "make_policy", make)
    found = proofs.same_logits(subject.plan, subject.model, subject.slot, subject.target.shared)
    assert not found.passed, found.detail


@pytest.mark.parametrize("ahead", [1, 3])
def test_proof_2_sees_a_context_that_reaches_the_anchor(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    original = dflash.DFlashDraftModel._attention

    def seeing(self: Any, slot: Any, blocks: Any) -> Any:
        return original(self, slot, dataclasses.replace(blocks, anchors=blocks.anchors + ahead))

    monkeypatch.setattr(dflash.DFlashDraftModel, "_attention", seeing)
    found = proofs.no_leak(subject.model, subject.slot, subject.target.shared)
    assert not found.passed, found.detail


@pytest.mark.parametrize("offset", [-1, 1])
def test_proof_3_sees_taps_off_by_one(subject: Subject, monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    plan, taps = subject.plan, (1, 2)
    sound = Target.load(plan.recipe.target, taps, "cpu", torch.float32)
    other = Target.load(plan.recipe.target, [tap + offset for tap in taps], "cpu", torch.float32)
    assert proofs.captured(sound, subject.ids).passed
    monkeypatch.setattr(sound, "features", other.features)
    assert not proofs.captured(sound, subject.ids).passed


def test_proof_3_sees_a_forgotten_final_norm(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = dataclasses.replace(subject.target.shared, final_norm=nn.Identity())
    monkeypatch.setattr(subject.target, "shared", shared)
    assert not proofs.captured(subject.target, subject.ids).passed


@pytest.mark.parametrize(
    ("check", "passed"),
    [
        (GreedyCheck("float32", 3, 3, 0, 0, None), True),
        (GreedyCheck("float32", 3, 2, 1, 0, 0.1), False),
        (GreedyCheck("bfloat16", 3, 2, 1, 0, 0.1), True),
        (GreedyCheck("bfloat16", 3, 2, 0, 1, 0.1), False),
    ],
)
def test_proof_4_lets_near_ties_pass_in_low_precision_only(check: GreedyCheck, passed: bool) -> None:
    assert proofs.lossless(check).passed is passed


def test_proof_6_a_document_learned_by_heart_is_accepted_almost_whole(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    (tmp_path / "data").mkdir()
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    target = load_target(make_world_plan(tmp_path / "recipe.yaml"), "cpu")
    prompt = list(range(40, 52))
    (plain,) = decode_plain(target, [prompt], DecodeOptions(max_new_tokens=40))
    assert len(set(plain.tokens)) > 10, "an answer that repeats itself would prove little"
    info = dataclasses.replace(describe_tokenizer(templates.byte_tokenizer()), vocab_size=VOCAB_SIZE)
    with StoreWriter(tmp_path / "store", info) as writer:
        ids = np.array([*prompt, *plain.tokens])
        writer.add("train", ids, np.arange(len(ids)) >= len(prompt))
        writer.finish(
            [SourceCounts("memory", "tokens", 1.0, "train", "c" * 64, 1, 1, 1)],
            mask_policy="all_turns",
            validation_fraction=0.0,
        )
    plan = make_world_plan(tmp_path / "recipe.yaml", *BY_HEART)
    result = run_training(plan)
    assert result.checkpoint is not None
    model = load_trained(plan, Path(result.checkpoint), torch.device("cpu")).model
    options = DecodeOptions(max_new_tokens=40)
    (drafted,) = decode_speculative(target, make_policy(plan, model, target.shared), [prompt], options)
    assert drafted.tokens == plain.tokens
    reached = accept_len([drafted])
    assert reached is not None and reached >= 0.9 * plan.recipe.drafter.block_size, drafted.accepted
