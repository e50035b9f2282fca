"""What a micro-batch is predicted to occupy, against what autograd really keeps."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from helixctl.models.drafters import _group_attention, _head, _memory
from helixctl.models.drafters._memory import StepBytes, Work, step_bytes
from helixctl.models.drafters.dflash import plugin
from helixctl.training.stages import make_slot
from tests.models.drafters.dflash.builders import FACTS, TAPS, make_options, make_shared

WIDE = dataclasses.replace(FACTS, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=160)
ROWS, SEQ_LEN, ANCHORS, BLOCK = 2, 128, 32, 8


def full_slot(dtype: torch.dtype) -> Any:
    """Every token supervised, every anchor in use, one document a row."""
    slot = make_slot((ROWS, SEQ_LEN, ANCHORS), len(TAPS), WIDE.hidden_size, torch.device("cpu"), dtype)
    for feature in slot.features:
        feature.normal_()
    slot.position_ids += torch.arange(SEQ_LEN)
    slot.loss_mask |= True
    slot.anchors += torch.arange(ANCHORS) * (SEQ_LEN - BLOCK) // ANCHORS
    slot.anchor_valid |= True
    return slot


def kept_bytes(model: Any, slot: Any, dtype: torch.dtype) -> int:
    """Bytes that backward will need, weights and features left out, every storage once."""
    shared = make_shared(WIDE)
    shared = dataclasses.replace(shared, embedding=shared.embedding.to(dtype), head=shared.head.to(dtype))
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *slot.features)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16),
    ):
        terms = model.loss(slot, shared)
    terms.numerator.backward()  # the tensors live until here, so no address is counted twice
    return sum(kept.values())


@pytest.mark.parametrize("num_layers", [1, 4])
@pytest.mark.parametrize(("dtype", "compute_bytes"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_what_backward_needs_is_counted(dtype, compute_bytes, num_layers):
    options = make_options(num_layers=num_layers, num_anchors=ANCHORS, block_size=BLOCK, num_taps=len(TAPS))
    model = plugin.build(options, WIDE, TAPS, 0)
    told = step_bytes(options, WIDE, Work(ROWS, SEQ_LEN, compute_bytes, on_gpu=False))
    assert told.kept + told.copies == pytest.approx(kept_bytes(model, full_slot(dtype), dtype), rel=0.05)


@pytest.mark.parametrize("num_valid", [1, 16, ANCHORS])
def test_blocks_of_invalid_anchors_count_nowhere_on_a_cpu(num_valid):
    options = make_options(num_layers=2, num_anchors=ANCHORS, block_size=BLOCK, num_taps=len(TAPS))
    model, slot = plugin.build(options, WIDE, TAPS, 0), full_slot(torch.float32)
    slot.anchor_valid[:, num_valid:] = False
    told = step_bytes(options, WIDE, Work(ROWS, SEQ_LEN, 4, on_gpu=False, most_anchors=num_valid))
    assert told.kept == pytest.approx(kept_bytes(model, slot, torch.float32), rel=0.1)
    full = Work(ROWS, SEQ_LEN, 4, on_gpu=True)
    assert step_bytes(options, WIDE, full) == step_bytes(options, WIDE, dataclasses.replace(full, most_anchors=1))


@pytest.mark.parametrize("num_layers", [1, 3])
def test_what_compiled_layers_keep_is_counted(monkeypatch, num_layers):
    """As torch.compile divides the work between forward and backward, without the minutes that its kernels take."""
    sizes: dict[str, Any] = {"num_layers": num_layers, "num_anchors": ANCHORS, "block_size": BLOCK}
    options = make_options(**sizes, num_taps=len(TAPS), attention="dense")
    model = plugin.build(options, WIDE, TAPS, 0)
    compiled = functools.cache(lambda part: torch.compile(part, backend="aot_eager_decomp_partition", dynamic=False))
    monkeypatch.setattr(model, "_maybe_compiled", compiled)
    told = step_bytes(options, WIDE, Work(ROWS, SEQ_LEN, 2, on_gpu=True, compiled=True))
    queries = ANCHORS * BLOCK
    scores = num_layers * ROWS * queries * (SEQ_LEN + queries) * 2  # the mask of the dense attention, as numbers to add
    final_norm = ROWS * queries * WIDE.hidden_size * 4  # a CPU keeps its result, too
    kept = kept_bytes(model, full_slot(torch.bfloat16), torch.bfloat16)
    assert told.kept + told.copies + scores + final_norm == pytest.approx(kept, rel=0.05)


def total(told: StepBytes) -> int:
    return sum(dataclasses.astuple(told))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_more_work_needs_more(on_gpu):
    base = Work(1, 128, 2, on_gpu)
    small = total(step_bytes(make_options(), FACTS, base))
    assert small < total(step_bytes(make_options(), FACTS, dataclasses.replace(base, rows=2)))
    assert small < total(step_bytes(make_options(), FACTS, dataclasses.replace(base, seq_len=512)))
    assert small < total(step_bytes(make_options(num_anchors=60), FACTS, base))
    assert small < total(step_bytes(make_options(loss={"kl": 1.0}), FACTS, base))
    assert small > total(step_bytes(make_options(), FACTS, dataclasses.replace(base, compiled=True)))


def test_numbers_of_the_code_that_allocates():
    assert (_memory.HEAD_CHUNK_ROWS, _memory.CPU_HEAD_CHUNK_ROWS) == (_head.GPU_CHUNK_ROWS, _head.CPU_CHUNK_ROWS)
    assert _memory._GROUP_BLOCKS == _group_attention.MAX_BLOCKS
