"""Judges a published DSpark drafter from its configuration and the headers of its files. Never imports torch.

What vLLM does was read in its source (0.27.1), and DeepSpec's (git afdfa7c); neither was run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from helixctl.errors import CheckpointError
from helixctl.models.drafters._findings import EngineView, Finding, TensorInfo
from helixctl.models.drafters.dflash.check import LAYER_RULES
from helixctl.models.drafters.dflash.formats import zlab
from helixctl.models.drafters.dflash.seen import VLLM, Seen
from helixctl.models.drafters.dspark.formats import deepspec
from helixctl.models.drafters.dspark.published import tensor_shapes
from helixctl.models.facts import TargetFacts

DEEPSPEC = "DeepSpec"
_TABLES = ("embed_tokens.weight", "lm_head.weight")


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
    seen = Seen("zlab", deepspec.flatten(config), deepspec.flatten(config), tensors, target)
    order = {"error": 0, "warning": 1, "note": 2}
    found = sorted((f for rule in RULES for f in rule(seen)), key=lambda finding: order[finding.severity])
    return tuple(found), _views(seen, found)


def _heads(seen: Seen) -> Iterator[Finding]:
    for what in deepspec.unsupported(seen.raw):
        yield Finding("note", f"helixctl cannot run or train it: {what}")
    rank = seen.raw.get("markov_rank")
    if rank is None:
        yield Finding("error", "markov_rank is missing", (VLLM, DEEPSPEC), "write the rank of the sequential head")
    if seen.raw.get("num_anchors") is None:
        yield Finding("error", "num_anchors is missing; loading asks for it", (DEEPSPEC,), "write any number")


def _tensors(seen: Seen) -> Iterator[Finding]:
    needed = (*zlab.NEEDED, "markov_rank")
    if any(seen.raw.get(key) is None for key in needed) or zlab.taps_of(seen.flat) is None:
        return
    try:
        expected = tensor_shapes(deepspec.read(seen.raw))
    except CheckpointError:  # told by another rule
        return
    own = seen.own_tensors
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - own.keys())]
    wrong += [
        f"{name} is {list(own[name].shape)}, not {list(expected[name])}"
        for name in sorted(expected.keys() & own.keys())
        if own[name].shape != expected[name]
    ]
    if wrong:
        yield Finding("error", f"tensors do not follow from the configuration: {'; '.join(wrong[:4])}")
    unknown = sorted(own.keys() - expected.keys())
    if unknown:
        yield Finding("warning", f"tensors that no such drafter has: {', '.join(unknown[:4])}")


def _tables(seen: Seen) -> Iterator[Finding]:
    copies = [name for name in seen.foreign_tensors if name.endswith(_TABLES)]
    if copies:
        yield Finding("note", f"it stores tables of its own, used in place of the target's: {', '.join(copies)}")
    else:
        message = "it stores no embedding and no head: its loader begins with random ones"
        yield Finding("error", message, (DEEPSPEC,), "copy them from the target after loading")


def _views(seen: Seen, findings: Sequence[Finding]) -> tuple[EngineView, ...]:
    made = []
    for engine in (VLLM, DEEPSPEC):
        stopped = any(f.severity == "error" and (not f.engines or engine in f.engines) for f in findings)
        uses = {
            "drafts": f"{seen.raw.get('block_size')} tokens per block",
            "captures": f"after {', '.join(str(tap + 1) for tap in zlab.taps_of(seen.flat) or ())} layers",
            "mask token": str(seen.value("mask_token_id")),
            "sequential head": f"rank {seen.raw.get('markov_rank')}",
            "confidence head": "not used" if engine == VLLM else "used",
        }
        made.append(EngineView(engine, not stopped, {} if stopped else uses))
    return tuple(made)


RULES: tuple[Callable[[Seen], Iterator[Finding]], ...] = (*LAYER_RULES, _heads, _tensors, _tables)
