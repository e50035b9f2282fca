"""The trained model on packed rows: loss and every gradient are those of the library on each document alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch._dynamo.utils

from helixctl.data.batch import SlotBatch
from helixctl.errors import ModelError
from helixctl.models.attention import IMPLEMENTATION
from helixctl.models.causal_lm import CausalLM, build_causal_lm, check_packing, choose_backend, next_tokens
from helixctl.models.facts import read_model_facts
from helixctl.models.flex import make_flex
from helixctl.recipe.causal_lm import ModelOptions

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "tied": {"model_type": "qwen3", **SIZES, "tie_word_embeddings": True},
    "windows": {"model_type": "mistral", **SIZES, "sliding_window": 5},
    "softcaps": {
        **{"model_type": "gemma2", **SIZES, "sliding_window": 5, "query_pre_attn_scalar": 16},
        **{"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    },
    "bias": {"model_type": "phi", **{k: v for k, v in SIZES.items() if k != "head_dim"}, "num_key_value_heads": 4},
    "gpt2": {"model_type": "gpt2", **GPT2},
}
DOCUMENTS = ((7, 12, 3), (20, 1), (24,))
S = 24


def make_slot(seed: int = 0) -> SlotBatch:
    """Three rows of documents of the lengths above; about a third of the tokens are not supervised."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(DOCUMENTS)
    ids = torch.randint(3, 96, (rows, S), generator=generator)
    documents, positions = torch.full((rows, S), -1, dtype=torch.int32), torch.zeros((rows, S), dtype=torch.int64)
    spans = []
    for row, lengths in enumerate(DOCUMENTS):
        start, own = 0, []
        for number, length in enumerate(lengths):
            documents[row, start : start + length] = number
            positions[row, start : start + length] = torch.arange(length)
            own.append((start, start + length))
            start += length
        spans.append(tuple(own))
    mask = (torch.rand((rows, S), generator=generator) < 0.7) & (documents >= 0)
    batch: Any = type("Batch", (), {"spans": tuple(spans), "document_ids": documents})()
    none = torch.zeros((rows, 0), dtype=torch.int64)
    return SlotBatch([], ids, positions, documents, mask, none, none.bool(), batch=batch)


def build(name: str, **options: Any) -> tuple[Any, CausalLM]:
    asked = ModelOptions(config=CONFIGS[name], tokenizer="none", **options)
    model = build_causal_lm(asked, seed=4)
    return model, CausalLM(model, read_model_facts(asked), asked, compiled=False)


def reference(model: Any, slot: SlotBatch) -> tuple[torch.Tensor, int]:
    """The library's own model with its own attention, one document after the other: summed loss, and its tokens."""
    model.config._attn_implementation = "eager"
    total, count = torch.zeros(()), 0
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            logits = model(input_ids=slot.input_ids[row : row + 1, part], use_cache=False).logits[0, :-1]
            learnt = slot.loss_mask[row, part][1:]
            losses = torch.nn.functional.cross_entropy(logits, slot.input_ids[row, part][1:], reduction="none")
            total = total + losses[learnt].sum()
            count += int(learnt.sum())
            start += length
    model.config._attn_implementation = IMPLEMENTATION
    return total, count


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_loss_and_gradients_are_those_of_each_document_alone(name: str) -> None:
    model, lm = build(name)
    slot = make_slot()
    terms = lm.loss(slot)
    terms.numerator.backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    total, count = reference(model, slot)
    total.backward()
    assert terms.denominator == count
    torch.testing.assert_close(terms.numerator, total, rtol=1e-5, atol=1e-5)
    theirs = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys() == dict(model.named_parameters()).keys()
    for parameter, gradient in theirs.items():
        torch.testing.assert_close(ours[parameter], gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["llama", "windows", "softcaps"])
def test_backends_agree_on_the_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """flex runs here as torch interprets it, which it refuses to do with gradients unless told to."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    slot, found = make_slot(), {}
    for backend in ("segments", "dense", "flex"):
        model, lm = build(name)
        lm._backend = backend
        lm._flex = make_flex(compiled=False) if backend == "flex" else None
        lm.loss(slot).numerator.backward()
        found[backend] = {n: p.grad for n, p in model.named_parameters()}
    for backend in ("dense", "flex"):
        for parameter, gradient in found["segments"].items():
            torch.testing.assert_close(found[backend][parameter], gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ["segments", "dense"])
def test_a_part_of_a_slot_is_its_rows(backend: str) -> None:
    _, lm = build("llama", attention=backend)
    slot = make_slot()
    whole, parts = lm.loss(slot), [lm.loss(part) for part in slot.parts(1)]
    torch.testing.assert_close(sum(part.numerator for part in parts), whole.numerator)
    assert sum(part.denominator for part in parts) == whole.denominator


def test_a_document_does_not_learn_from_another() -> None:
    """Bit for bit: other tokens in one document leave the states of the others alone."""
    _, lm = build("llama")
    slot = make_slot()
    before = lm.hidden(slot).detach()
    slot.input_ids[0, 7:19] = (slot.input_ids[0, 7:19] + 1) % 96
    after = lm.hidden(slot).detach()
    assert torch.equal(before[0, :7], after[0, :7]) and torch.equal(before[0, 19:22], after[0, 19:22])
    assert not torch.equal(before[0, 7:19], after[0, 7:19])


def test_labels_stop_at_the_end_of_a_document_and_at_what_is_not_supervised() -> None:
    slot = make_slot()
    slot.loss_mask[:] = slot.document_ids >= 0
    slot.loss_mask[2, 4] = False
    labels, weights = next_tokens(slot)
    assert weights[0].nonzero().flatten().tolist() == [*range(6), *range(7, 18), *range(19, 21)]
    assert weights[1].nonzero().flatten().tolist() == list(range(19)), "a document of one token has no label"
    assert weights[2].nonzero().flatten().tolist() == [i for i in range(23) if i != 3]
    assert torch.equal(labels[:, :-1], slot.input_ids[:, 1:])


def test_bfloat16_by_autocast_stays_close_and_gradients_stay_float32() -> None:
    model, lm = build("llama")
    slot = make_slot()
    exact = lm.loss(slot).numerator.detach()
    with torch.autocast("cpu", torch.bfloat16):
        terms = lm.loss(slot)
    terms.numerator.backward()
    assert abs(terms.numerator.item() - exact.item()) < 0.02 * exact.item()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_compiled_layers_share_a_graph_that_other_documents_do_not_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but that the graph is interpreted: flex has no backward on a CPU."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    options = ModelOptions(config=CONFIGS["llama"], tokenizer="none")
    model = build_causal_lm(options, seed=4)
    lm = CausalLM(model, read_model_facts(options), options, compiled=True)
    reference = CausalLM(model, read_model_facts(options), options, compiled=False)
    counted = torch._dynamo.utils.counters["stats"]
    counted.clear()
    with torch.no_grad():
        first = lm.hidden(make_slot())
        assert counted["unique_graphs"] == 1, "two layers"
        try:
            torch.compiler.set_stance("fail_on_recompile")
            again, slot = lm.hidden(make_slot()), make_slot(seed=1)
            slot.document_ids[0, 3:7] = -1
            lm.hidden(slot)
        finally:
            torch.compiler.set_stance("default")
        real = make_slot().document_ids >= 0
        torch.testing.assert_close(first[real], reference.hidden(make_slot())[real], rtol=1e-4, atol=1e-4)
    assert torch.equal(first, again)


def test_initial_weights_are_a_function_of_the_seed_and_leave_other_generators_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    options = ModelOptions(config=CONFIGS["llama"], tokenizer="none")
    one, same, other = (build_causal_lm(options, seed).state_dict() for seed in (4, 4, 5))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_what_cannot_be_built_is_told() -> None:
    with pytest.raises(ModelError, match="Unrecognized model identifier: helix"):
        build_causal_lm(ModelOptions(config={"model_type": "helix"}, tokenizer="none"), 0)
    with pytest.raises(ModelError, match="flex needs a GPU"):
        choose_backend(ModelOptions(config={}, tokenizer="x", attention="flex"), torch.device("cpu"), compiled=False)


def test_an_architecture_with_attention_of_its_own_must_not_pack() -> None:
    sizes = {**SIZES, "layer_types": ["conv", "full_attention"]}
    options = ModelOptions(config={"model_type": "lfm2", **sizes}, tokenizer="none")
    model = build_causal_lm(options, 0)
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ModelError, match="attention code of its own"):
        check_packing(model, "continuous")
    check_packing(model, "document")
