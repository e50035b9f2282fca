"""Judges a published DSpark drafter from its configuration and the headers of its files. Never imports torch.

What vLLM does was read in its source (0.27.1), and DeepSpec's (git afdfa7c); neither was run. vLLM
uses the confidence head since https://github.com/vllm-project/vllm/pull/47808.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from helixctl.models.drafters._findings import EngineView, Finding, TensorInfo, judge
from helixctl.models.drafters.dflash.check import LAYER_RULES
from helixctl.models.drafters.dflash.check_tensors import dtype, names_and_shapes, stored_tables
from helixctl.models.drafters.dflash.formats import zlab
from helixctl.models.drafters.dflash.seen import VLLM, Seen
from helixctl.models.drafters.dspark.formats import deepspec
from helixctl.models.drafters.dspark.published import tensor_shapes
from helixctl.models.facts import TargetFacts

DEEPSPEC = "DeepSpec"


def check(
    format_name: str, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], target: TargetFacts | None
) -> tuple[tuple[Finding, ...], tuple[EngineView, ...]]:
    """Everything found, worst first, and what each engine would do.

    Args:
        format_name: Plug-in in ``formats``.
        config: The folder's config.json.
        tensors: The headers of its weight files.
        target: Facts of the target, where it is at hand: more can be checked then.
    """
    assert format_name == "deepspec"
    flat = deepspec.flatten(config)
    return judge(Seen("zlab", flat, flat, tensors, target), RULES, USES)


def _heads(seen: Seen) -> Iterator[Finding]:
    for what in deepspec.unsupported(seen.raw):
        yield Finding("note", f"helixctl cannot run or train it: {what}")
    rank = seen.raw.get("markov_rank")
    if rank is None:
        yield Finding("error", "markov_rank is missing", (VLLM, DEEPSPEC), "write the rank of the sequential head")
    if seen.raw.get("num_anchors") is None:
        yield Finding("error", "num_anchors is missing; loading asks for it", (DEEPSPEC,), "write any number")


def _tensors(seen: Seen) -> Iterator[Finding]:
    if seen.raw.get("markov_rank"):  # else another rule tells
        yield from names_and_shapes(seen, "DSpark", tensor_shapes)


def _tables(seen: Seen) -> Iterator[Finding]:
    copies = stored_tables(seen)
    if copies:
        yield Finding("note", copies)
    else:
        message = "it stores no embedding and no head: its loader begins with random ones"
        yield Finding("error", message, (DEEPSPEC,), "copy them from the target after loading")


def _vllm(seen: Seen) -> dict[str, str]:
    return _uses(seen) | {"confidence head": "not read by 0.27.1; later ones: enable_adaptive_verification"}


def _deepspec(seen: Seen) -> dict[str, str]:
    return _uses(seen) | {"confidence head": "cuts blocks where confidence_threshold is given"}


def _uses(seen: Seen) -> dict[str, str]:
    return {
        "drafts": f"{seen.raw.get('block_size')} tokens per block",
        "captures": f"after {', '.join(str(tap + 1) for tap in zlab.taps_of(seen.flat) or ())} layers",
        "mask token": str(seen.value("mask_token_id")),
        "sequential head": f"rank {seen.raw.get('markov_rank')}",
    }


RULES: tuple[Callable[[Seen], Iterator[Finding]], ...] = (*LAYER_RULES, _heads, _tensors, dtype, _tables)
USES = {VLLM: _vllm, DEEPSPEC: _deepspec}
"""By engine."""
