"""Rules about a published DFlash drafter's tensors: names, shapes, types. See ``check.py``. Never imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from helixctl.models.drafters._findings import Finding
from helixctl.models.drafters.dflash.formats import zlab
from helixctl.models.drafters.dflash.published import own_tensor_name, tensor_shapes
from helixctl.models.drafters.dflash.seen import SGLANG, SPECFORGE, SPECULATORS, VLLM, ZLAB, Seen

_SHOWN = 4
"""Tensors named before "and N more"."""
_TABLES = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class _Sizes:
    """What the shapes follow from."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    taps: tuple[int, ...]


def _sizes(seen: Seen) -> _Sizes | None:
    """None where the configuration does not say enough; another rule tells."""
    taps = zlab.taps_of(seen.flat)
    if taps is None or any(seen.flat.get(key) is None for key in zlab.NEEDED):
        return None
    heads, width = int(seen.flat["num_attention_heads"]), int(seen.flat["hidden_size"])
    return _Sizes(
        num_layers=int(seen.flat["num_hidden_layers"]),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=int(seen.flat["num_key_value_heads"]),
        head_dim=int(seen.flat.get("head_dim") or width // heads),
        intermediate_size=int(seen.flat["intermediate_size"]),
        taps=taps,
    )


def _names_and_shapes(seen: Seen) -> Iterator[Finding]:
    sizes = _sizes(seen)
    if sizes is None:
        return
    expected = tensor_shapes(sizes)
    missing = sorted(expected.keys() - seen.own_tensors.keys())
    if missing:
        yield Finding("error", f"tensors are missing: {_listed(missing)}")
    unknown = sorted(seen.own_tensors.keys() - expected.keys())
    if unknown:
        yield Finding("warning", f"tensors that no DFlash drafter has: {_listed(unknown)}")
    wrong = [
        f"{name} is {list(info.shape)}, not {list(expected[name])}"
        for name, info in sorted(seen.own_tensors.items())
        if name in expected and info.shape != expected[name]
    ]
    if wrong:
        yield Finding("error", f"shapes do not follow from the configuration: {_listed(wrong)}")


def _renamed(seen: Seen) -> Iterator[Finding]:
    other = sorted(name for name in seen.tensors if own_tensor_name(name) not in (None, name))
    if other:
        message = f"tensors have names that engines do not know: {_listed(other)}"
        fix = "helixctl convert SRC DST renames them"
        yield Finding("error", message, (ZLAB, VLLM, SGLANG, SPECULATORS, SPECFORGE), fix)


def _dtype(seen: Seen) -> Iterator[Finding]:
    said = seen.raw.get("dtype") or seen.raw.get("torch_dtype")
    said = None if said is None else str(said).removeprefix("torch.")
    stored = Counter(info.dtype for info in seen.own_tensors.values())
    if len(stored) > 1:
        yield Finding("warning", f"tensors have different types: {', '.join(f'{n} {d}' for d, n in stored.items())}")
    elif said is None:
        yield Finding("warning", f"dtype is not written; the file's is {next(iter(stored), 'unknown')}")
    elif stored and said not in stored:
        fix = f'write "dtype": "{next(iter(stored))}"'
        yield Finding(
            "error", f"dtype is {said}, the file's is {next(iter(stored))}: engines allocate the first", fix=fix
        )


def _tables(seen: Seen) -> Iterator[Finding]:
    """The embedding and the head are the target's; a copy is used where it is found, right or not."""
    copies = [name for name in seen.foreign_tensors if name.endswith(_TABLES)]
    if copies:
        message = f"it stores tables of its own, used in place of the target's: {_listed(copies)}"
        yield Finding("warning", message, (VLLM,), "take them away unless they are the target's, value for value")
    if any("mask_hidden" in name for name in seen.tensors):
        yield Finding("error", "a tensor mask_hidden stops loading", (VLLM,))
    reduced = seen.flat.get("draft_vocab_size")
    if reduced and reduced != seen.flat.get("vocab_size") and not any(name.endswith("d2t") for name in seen.tensors):
        yield Finding("error", f"draft_vocab_size is {reduced} and there is no tensor d2t", (VLLM, SPECULATORS))


def _listed(items: list[str]) -> str:
    rest = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


TENSOR_RULES: tuple[Callable[[Seen], Iterator[Finding]], ...] = (_names_and_shapes, _renamed, _dtype, _tables)
