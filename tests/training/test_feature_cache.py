"""The feature cache: same features with and without a hit, whatever row a document is packed into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helixctl.checkpoint.store import load_checkpoint
from helixctl.data import sequence as order
from helixctl.data.batch import MicroBatch, make_document_batch
from helixctl.data.loader import BatchLoader
from helixctl.data.store import Store
from helixctl.errors import StageFailed
from helixctl.machine import read_machine
from helixctl.models.target import Target
from helixctl.plan import make_plan
from helixctl.recipe.load import load_recipe
from helixctl.training.build import Targets, feature_loader, make_loader
from helixctl.training.feature_cache import CachedFeatures, CachedRows, Layout, make_layout
from helixctl.training.run import run_training
from tests.training.worlds import make_world, make_world_plan, tensors_equal


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


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("resume_at", [None, 3])
def test_a_run_with_the_cache_is_repeatable_and_resumable_bit_for_bit(tmp_path, resume_at, rows, monkeypatch) -> None:
    if rows:  # as where the target is compiled for whole micro-batches
        monkeypatch.setattr(Target, "fixed", lambda self, batch, last_hidden=False: self)
    recipe = make_world(tmp_path)
    plans = [make_world_plan(recipe, f"run.dir={tmp_path / n}", "target.feature_cache_mib=64") for n in ("a", "b")]
    run_training(plans[0])
    if resume_at is not None:
        original, calls = Target.features, iter(range(1000))

        def failing(self, batch, **options):
            if next(calls) == (6 if rows else 7):  # documents one at a time: the last of eight
                raise RuntimeError("killed")
            return original(self, batch, **options)

        monkeypatch.setattr(Target, "features", failing)
        with pytest.raises(StageFailed, match="killed"):
            run_training(plans[1])
        monkeypatch.setattr(Target, "features", original)
    run_training(plans[1], resume=resume_at is not None)
    one, two = (load_checkpoint(tmp_path / n / "checkpoints" / "step-00000006") for n in ("a", "b"))
    assert tensors_equal(one.tensors["drafter"], two.tensors["drafter"])


# ------------------------------------------------------------------------------------- whole micro-batches at a time


class PlacedSource(CountingSource):
    """Lends its features, which depend on where in its rows a document stands, as rounding does."""

    lends = True

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Tensor] = []

    def features(self, batch: MicroBatch) -> list[Tensor]:
        for tensor in self.held:
            tensor.fill_(float("nan"))
        places = torch.arange(batch.input_ids.numel()).view_as(batch.input_ids) / 1024
        self.held = [feature + places[..., None] for feature in super().features(batch)]
        return self.held


def make_rows_cache(loader: BatchLoader, num_tokens: int) -> tuple[CachedRows, PlacedSource]:
    layout, source = make_layout(loader.first_epoch(), num_tokens), PlacedSource()
    kept = [torch.zeros(layout.num_tokens, width) for width in (2, 3)]
    return CachedRows(source, loader.batch, layout, kept), source


@pytest.fixture
def loader(tmp_path: Path) -> Iterator[BatchLoader]:
    plan = make_world_plan(make_world(tmp_path), "train.micro_batch_rows=2")
    yield make_loader(plan, Store.open(plan.recipe.data.store), order.Sequence(1, 12, 6, 1))


def documents_of(batch: MicroBatch, features: list[Tensor]) -> dict[int, list[Tensor]]:
    return {
        document: [feature[row, start:end].clone() for feature in features]
        for row, (documents, spans) in enumerate(zip(batch.documents, batch.spans, strict=True))
        for document, (start, end) in zip(documents, spans, strict=True)
    }


def train_batches(loader: BatchLoader) -> list[MicroBatch]:
    batches = [loader.batch(seq) for seq in range(loader.sequence.total)]
    return [batch for batch in batches if batch.role == "train"]


def test_every_epoch_gets_the_first_ones_features_and_one_target_pass_is_all(loader: BatchLoader) -> None:
    cache, source = make_rows_cache(loader, 1 << 20)
    first: dict[int, list[Tensor]] = {}
    batches = train_batches(loader)
    epoch = -(-loader.first_row(1) // loader.options.rows)
    assert batches[-1].epoch >= 2
    for batch in batches:
        found = documents_of(batch, cache.features(batch))
        for document, features in found.items():
            wanted = first.setdefault(document, features)
            assert all(torch.equal(one, other) for one, other in zip(features, wanted, strict=True))
    assert source.calls == cache.num_computed == epoch
    for batch in batches[:epoch]:  # a document's first micro-batch is the one it is computed in
        own = documents_of(batch, PlacedSource().features(batch))
        for document in set(own) & {d for d, number in cache._layout.batches.items() if number == batch.index}:
            assert all(torch.equal(one, other) for one, other in zip(own[document], first[document], strict=True))


@pytest.mark.parametrize("begin", [1, 3, 7])
def test_a_cache_that_begins_later_gives_the_same_bits(loader: BatchLoader, begin: int) -> None:
    whole, _ = make_rows_cache(loader, 1 << 20)
    late, source = make_rows_cache(loader, 1 << 20)
    for i, batch in enumerate(train_batches(loader)):
        wanted = documents_of(batch, whole.features(batch))
        if i < begin:
            continue
        found = documents_of(batch, late.features(batch))
        for document, features in found.items():
            assert all(torch.equal(one, other) for one, other in zip(features, wanted[document], strict=True))
    assert source.calls <= -(-loader.first_row(1) // loader.options.rows)


def test_without_room_the_source_is_asked_every_time_and_its_memory_is_not_lent_on(
    loader: BatchLoader, caplog: pytest.LogCaptureFixture
) -> None:
    cache, source = make_rows_cache(loader, 40)
    assert "no room for" in caplog.text and cache._layout.num_tokens <= 40
    for i, batch in enumerate(train_batches(loader), start=1):
        found = cache.features(batch)
        source.features(batch)  # overwrites what it lent
        for row, spans in enumerate(batch.spans):
            assert all(feature[row, start:end].isfinite().all() for feature in found for start, end in spans)
        assert source.calls == 2 * i
    held_out = next(b for b in map(loader.batch, range(loader.sequence.total)) if b.role == "validation")
    assert len(cache.features(held_out)) == 2


@pytest.mark.parametrize("max_tokens", [0, 5, 9, 12, 100])
def test_a_layout_holds_what_fits_without_gaps(max_tokens: int) -> None:
    layout = make_layout([(0, 4, 5), (0, 2, 4), (1, 0, 3)], max_tokens)
    fits = {0: 0, 5: 1, 9: 2, 12: 3, 100: 3}[max_tokens]
    assert layout.batches == dict([(4, 0), (2, 0), (0, 1)][:fits])
    assert layout.starts == dict([(4, 0), (2, 5), (0, 9)][:fits])
    assert layout.num_tokens == (0, 5, 9, 12)[fits]
    assert make_layout([], max_tokens) == Layout()


@pytest.mark.gpu
def test_on_a_gpu_rows_are_kept_on_the_device_and_cost_one_target_pass(tmp_path: Path) -> None:
    recipe = make_world(tmp_path)
    options = ("train.compute_dtype=float32", "drafter.num_anchors=16", "train.steps=24", "target.feature_cache_mib=1")
    plan = make_plan(load_recipe(recipe, options), read_machine())
    store = Store.open(plan.recipe.data.store)
    cache = feature_loader(plan, store, Targets(plan), plan.target_devices[0], nullcontext)()
    assert isinstance(cache, CachedRows)
    loader = make_loader(plan, store, order.Sequence(1, 24))
    target = Target.load(plan.recipe.target, plan.target_layer_ids, "cuda:0", torch.float32)
    torch.cuda.synchronize()
    for batch in map(loader.batch, range(24)):
        found, wanted = cache.features(batch.pinned()), target.features(batch)
        for start, end in batch.spans[0]:
            for one, other in zip(found, wanted, strict=True):
                assert one.is_cuda and torch.allclose(one[0, start:end], other[0, start:end], rtol=1e-3, atol=1e-3)
    assert cache.num_computed == loader.first_row(1)
    assert run_training(plan).finished
