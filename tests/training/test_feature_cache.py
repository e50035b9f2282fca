"""The feature cache: same features with and without a hit, whatever row a document is packed into."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helixctl.data.batch import MicroBatch, make_document_batch
from helixctl.training.feature_cache import CachedFeatures
from tests.training.worlds import make_world, make_world_plan


class CountingSource:
    """Features that depend on nothing but the token and its position."""

    device = torch.device("cpu")
    lends = False

    def __init__(self) -> None:
        self.calls = 0

    def features(self, batch: MicroBatch) -> list[Tensor]:
        self.calls += 1
        value = (batch.input_ids * 100 + batch.position_ids).float()
        return [value[..., None].expand(-1, -1, 2).clone(), -value[..., None].expand(-1, -1, 3).clone()]


def packed(*documents: tuple[int, list[int]], length: int = 8, role: str = "train") -> MicroBatch:
    """One row that holds (number, token ids) after one another."""
    ids: list[int] = []
    positions: list[int] = []
    spans = []
    for _, tokens in documents:
        spans.append((len(ids), len(ids) + len(tokens)))
        ids += tokens
        positions += range(len(tokens))
    base = make_document_batch(torch.tensor(ids + [0] * (length - len(ids))))
    fields = {**vars(base), "role": role, "documents": (tuple(n for n, _ in documents),), "spans": (tuple(spans),)}
    return MicroBatch(**{**fields, "position_ids": torch.tensor([positions + [0] * (length - len(positions))])})


def test_hits_give_what_the_source_gives_at_every_place() -> None:
    source = CountingSource()
    cache = CachedFeatures(source, 1 << 20)
    one, two = (4, [7, 8, 9]), (5, [1, 2])
    for batch in (packed(one, two), packed(two, one), packed(one)):
        for found, wanted in zip(cache.features(batch), CountingSource().features(batch), strict=True):
            for start, end in batch.spans[0]:
                assert torch.equal(found[:, start:end], wanted[:, start:end])
    assert (source.calls, cache.misses, cache.hits) == (2, 2, 3)


def test_roles_and_lengths_are_different_documents() -> None:
    source = CountingSource()
    cache = CachedFeatures(source, 1 << 20)
    for batch in (packed((0, [1, 2, 3])), packed((0, [1, 2])), packed((0, [4, 5, 6]), role="validation")):
        cache.features(batch)
    assert source.calls == 3


def test_a_full_cache_computes_and_keeps_nothing_more() -> None:
    source = CountingSource()
    cache = CachedFeatures(source, 3 * (2 + 3) * 4)  # one document of three tokens
    for _ in range(2):
        cache.features(packed((0, [1, 2, 3])))
        cache.features(packed((1, [4, 5, 6])))
    assert source.calls == 3


@pytest.mark.parametrize("resume_at", [None, 3])
def test_a_run_with_the_cache_is_repeatable_and_resumable_bit_for_bit(tmp_path, resume_at, monkeypatch) -> None:
    from helixctl.checkpoint.store import load_checkpoint
    from helixctl.errors import StageFailed
    from helixctl.models.target import Target
    from helixctl.training.run import run_training
    from tests.training.worlds import tensors_equal

    recipe = make_world(tmp_path)
    plans = [make_world_plan(recipe, f"run.dir={tmp_path / n}", "target.feature_cache_mib=64") for n in ("a", "b")]
    run_training(plans[0])
    if resume_at is not None:
        original, calls = Target.features, iter(range(1000))

        def failing(self, batch, **options):
            if next(calls) == 7:  # the last of eight documents
                raise RuntimeError("killed")
            return original(self, batch, **options)

        monkeypatch.setattr(Target, "features", failing)
        with pytest.raises(StageFailed, match="killed"):
            run_training(plans[1])
        monkeypatch.setattr(Target, "features", original)
    run_training(plans[1], resume=resume_at is not None)
    one, two = (load_checkpoint(tmp_path / n / "checkpoints" / "step-00000006") for n in ("a", "b"))
    assert tensors_equal(one.tensors["drafter"], two.tensors["drafter"])
