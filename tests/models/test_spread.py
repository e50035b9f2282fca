"""A target over several devices computes what it computes on one."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helixctl.errors import ModelError
from helixctl.models.spread import carrier, split_layers
from helixctl.models.target import Target
from helixctl.recipe.schema import TargetOptions
from tests.models.test_target import BUILDERS, TAPS, make_batch
from tests.tiny import save_tiny, tiny_qwen3

CPU = torch.device("cpu")


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=9), data=st.data())
def test_parts_are_contiguous_none_is_empty_and_the_largest_is_smallest(sizes: list[int], data: Any) -> None:
    num_parts = data.draw(st.integers(1, len(sizes)))
    parts = split_layers(sizes, num_parts)
    assert parts[0] == 0 and parts[-1] == num_parts - 1 and all(b - a in (0, 1) for a, b in pairwise(parts))
    largest = max(sum(size for size, own in zip(sizes, parts, strict=True) if own == part) for part in range(num_parts))
    assert largest == smallest_possible(tuple(sizes), num_parts)


def smallest_possible(sizes: tuple[int, ...], num_parts: int) -> int:
    """Every way to cut."""
    if num_parts == 1:
        return sum(sizes)
    return min(
        max(sum(sizes[:cut]), smallest_possible(sizes[cut:], num_parts - 1))
        for cut in range(1, len(sizes) - num_parts + 2)
    )


def test_more_devices_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers cannot stand on 3 devices"):
        split_layers([1, 1], 3)


def test_arguments_are_carried_and_what_is_no_tensor_is_left_alone() -> None:
    cache, module = object(), nn.Identity()
    args, kwargs = carrier(torch.device("meta"))(
        module, (torch.ones(2),), {"rotary": (torch.ones(1), torch.ones(1)), "cache": cache, "use_cache": False}
    )
    assert args[0].device.type == "meta" and all(part.device.type == "meta" for part in kwargs["rotary"])
    assert kwargs["cache"] is cache and kwargs["use_cache"] is False


@pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: builder.__name__)
def test_features_of_a_spread_target_equal_those_of_one_device(builder: Any, tmp_path: Path) -> None:
    save_tiny(builder(), tmp_path)
    options, batch = TargetOptions(model=str(tmp_path)), make_batch()
    one = Target.load(options, TAPS, CPU, torch.float32)
    two = Target.load(options, TAPS, CPU, torch.float32, span=(CPU, CPU))
    expected, found = (target.features(batch, last_hidden=True) for target in (one, two))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    ids, positions = batch.input_ids[:, :5], batch.position_ids[:, :5]
    logits = [target.decode_step(ids, positions, target.new_cache(4, 8))[0] for target in (one, two)]
    assert torch.equal(*logits)


def test_a_tied_head_gets_a_copy_of_its_own(tmp_path: Path) -> None:
    save_tiny(tiny_qwen3(tie_word_embeddings=True), tmp_path)
    target = Target.load(TargetOptions(model=str(tmp_path)), TAPS, CPU, torch.float32, span=(CPU, CPU))
    embedding, head = target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight
    assert embedding is not head and torch.equal(embedding, head)


@pytest.mark.parametrize("options", [{"attention": "flex"}, {"attention": "dense"}])
def test_attention_that_stands_on_one_device_is_refused(options: Any, tmp_path: Path) -> None:
    save_tiny(tiny_qwen3(), tmp_path)
    with pytest.raises(ModelError, match=r"target\.attention"):
        Target.load(TargetOptions(model=str(tmp_path), **options), TAPS, CPU, torch.float32, span=(CPU, CPU))


@pytest.mark.gpu
@pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: builder.__name__)
def test_gpu_features_and_decoding_over_two_gpus_equal_those_of_one(builder: Any, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    save_tiny(builder(), tmp_path)
    options, batch = TargetOptions(model=str(tmp_path), attention="segments"), make_batch()
    devices = [torch.device("cuda:0"), torch.device("cuda:1")]
    one = Target.load(options, TAPS, devices[1], torch.float32)
    two = Target.load(options, TAPS, devices[1], torch.float32, span=devices)
    assert {p.device for p in two.model.parameters()} == set(devices)
    expected, found = (target.features(batch, last_hidden=True) for target in (one, two))
    for a, b in zip(expected, found, strict=True):
        assert b.device == devices[1]
        torch.testing.assert_close(a, b)
    ids, positions = (x[:, :5].to(devices[1]) for x in (batch.input_ids, batch.position_ids))
    logits = [target.decode_step(ids, positions, target.new_cache(4, 8))[0] for target in (one, two)]
    torch.testing.assert_close(*logits)
