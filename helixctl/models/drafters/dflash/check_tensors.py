"""Rules about the tensors of a published drafter: names, shapes, types. See ``check.py``. Never imports torch."""

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
class Sizes:
    """What the shapes follow from."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    taps: tuple[int, ...]
    markov_rank: int | None
    """Of a sequential head; None: there is none."""


def names_and_shapes(
    seen: Seen, kind: str, shapes_of: Callable[[Sizes], dict[str, tuple[int, ...]]]
) -> Iterator[Finding]:
    """Tensors beside what ``shapes_of`` the configuration's sizes says of a ``kind`` of drafter."""
    sizes = _sizes(seen)
    if sizes is None:
        return
    expected, own = shapes_of(sizes), seen.own_tensors
    missing, unknown = sorted(expected.keys() - own.keys()), sorted(own.keys() - expected.keys())
    if missing:
        yield Finding("error", f"tensors are missing: {_listed(missing)}")
    if unknown:
        yield Finding("warning", f"tensors that no {kind} drafter has: {_listed(unknown)}")
    wrong = [
        f"{name} is {list(info.shape)}, not {list(expected[name])}"
        for name, info in sorted(own.items())
        if name in expected and info.shape != expected[name]
    ]
    if wrong:
        yield Finding("error", f"shapes do not follow from the configuration: {_listed(wrong)}")


def dtype(seen: Seen) -> Iterator[Finding]:
    """The type that is written, and that of the tensors."""
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


def stored_tables(seen: Seen) -> str | None:
    """What to say of copies of the embedding and the head; None where there are none."""
    copies = [name for name in seen.foreign_tensors if name.endswith(_TABLES)]
    return f"it stores tables of its own, used in place of the target's: {_listed(copies)}" if copies else None


def _sizes(seen: Seen) -> Sizes | None:
    """None where the configuration does not say enough; another rule tells."""
    taps = zlab.taps_of(seen.flat)
    if taps is None or any(seen.flat.get(key) is None for key in zlab.NEEDED):
        return None
    heads, width = int(seen.flat["num_attention_heads"]), int(seen.flat["hidden_size"])
    rank = seen.raw.get("markov_rank")
    return Sizes(
        num_layers=int(seen.flat["num_hidden_layers"]),
        hidden_size=width,
        vocab_size=int(seen.flat["vocab_size"]),
        num_heads=heads,
        num_kv_heads=int(seen.flat["num_key_value_heads"]),
        head_dim=int(seen.flat.get("head_dim") or width // heads),
        intermediate_size=int(seen.flat["intermediate_size"]),
        taps=taps,
        markov_rank=None if rank is None else int(rank),
    )


def _layers(seen: Seen) -> Iterator[Finding]:
    yield from names_and_shapes(seen, "DFlash", tensor_shapes)


def _renamed(seen: Seen) -> Iterator[Finding]:
    other = sorted(name for name in seen.tensors if own_tensor_name(name) not in (None, name))
    if other:
        message = f"tensors have names that engines do not know: {_listed(other)}"
        fix = "helixctl convert SRC DST renames them"
        yield Finding("error", message, (ZLAB, VLLM, SGLANG, SPECULATORS, SPECFORGE), fix)


def _tables(seen: Seen) -> Iterator[Finding]:
    """The embedding and the head are the target's; a copy is used where it is found, right or not."""
    copies = stored_tables(seen)
    if copies:
        yield Finding("warning", copies, (VLLM,), "take them away unless they are the target's, value for value")
    if any("mask_hidden" in name for name in seen.tensors):
        yield Finding("error", "a tensor mask_hidden stops loading", (VLLM,))
    reduced = seen.flat.get("draft_vocab_size")
    if reduced and reduced != seen.flat.get("vocab_size") and not any(name.endswith("d2t") for name in seen.tensors):
        yield Finding("error", f"draft_vocab_size is {reduced} and there is no tensor d2t", (VLLM, SPECULATORS))


def _listed(items: list[str]) -> str:
    rest = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


TENSOR_RULES: tuple[Callable[[Seen], Iterator[Finding]], ...] = (_layers, _renamed, dtype, _tables)
