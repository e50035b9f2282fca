from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helixctl.errors import ModelError
from helixctl.models.backbone import Backbone
from helixctl.models.features import FixedFeatures, check_calls
from helixctl.models.target import Target
from helixctl.recipe.schema import TargetOptions
from tests.models.test_target import SPANS, TAPS, load, make_batch, real, reference
from tests.tiny import save_tiny, tiny_gemma2, tiny_gemma3, tiny_gpt_oss, tiny_llama, tiny_phi3, tiny_qwen3

Spans = tuple[tuple[tuple[int, int], ...], ...]
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # the reference is

OTHER_SPANS = (((0, 12), (12, 40)), ((0, 25), (25, 38)), ((0, 40),), ((0, 10), (10, 20), (20, 30)))


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are traced whole and run by the interpreter: no C++ compiler is waited for."""
    compile_layers = Backbone.compile
    monkeypatch.setattr(Backbone, "compile", lambda self: compile_layers(self, backend="eager"))


@pytest.mark.parametrize("builder", [tiny_llama, tiny_qwen3, tiny_gemma3, tiny_gemma2, tiny_phi3, tiny_gpt_oss])
def test_compiled_layers_equal_the_forward_and_never_recompile(
    builder: Callable[[], Any], tmp_path: Any, traced_only: None
) -> None:
    target = load(builder(), tmp_path, "flex")
    batches = make_batch(), make_batch(OTHER_SPANS, seed=3)
    wanted = [target.features(batch, last_hidden=True) for batch in batches]
    fixed = target.fixed(batches[0], last_hidden=True)
    assert fixed is not None
    torch.compiler.set_stance("fail_on_recompile")
    try:
        for batch, expected in zip(batches, wanted, strict=True):
            got = fixed.features(batch)
            assert len(got) == len(TAPS) + 1
            for one, other in zip(real(batch, got), real(batch, expected), strict=True):
                torch.testing.assert_close(one, other)
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_all_layers_of_a_kind_share_one_graph(quantization: Any, tmp_path: Any, traced_only: None) -> None:
    torch._dynamo.utils.counters.clear()
    target = load(tiny_llama(num_hidden_layers=7), tmp_path, "flex", taps=(0, 5), quantization=quantization)
    batch = make_batch()
    fixed = target.fixed(batch)
    assert fixed is not None
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for one, other in zip(real(batch, fixed.features(batch)), real(batch, target.features(batch)), strict=True):
        torch.testing.assert_close(one, other)


def test_the_targets_own_modules_are_untouched(tmp_path: Any, traced_only: None) -> None:
    target = load(tiny_llama(), tmp_path, "flex")
    before = [dict(layer.__dict__) for layer in target.layers]
    assert target.fixed(make_batch()) is not None
    assert [dict(layer.__dict__) for layer in target.layers] == before
    ids, positions = make_batch().input_ids[:, :6], make_batch().position_ids[2:3, :6].expand(4, 6)
    torch.compiler.set_stance("fail_on_recompile")
    try:
        target.decode_step(ids, positions, target.new_cache(4, 8))  # another shape, other hooks, nothing compiled
    finally:
        torch.compiler.set_stance("default")


def test_layers_that_cannot_be_compiled_are_interpreted(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise torch._dynamo.exc.Unsupported("a loop over data")

    compile_layers = Backbone.compile
    monkeypatch.setattr(Backbone, "compile", lambda self: compile_layers(self, backend=refuse))
    target, batch = load(tiny_llama(), tmp_path, "flex"), make_batch()
    fixed = target.fixed(batch)
    assert fixed is not None
    assert "are not compiled" in caplog.text
    for one, other in zip(real(batch, fixed.features(batch)), real(batch, target.features(batch)), strict=True):
        torch.testing.assert_close(one, other)


def test_layers_past_our_attention_are_refused() -> None:
    with pytest.raises(ModelError, match="3 of 4 layers of LlamaModel use our attention"):
        check_calls(3, 4, "LlamaModel")


def test_nothing_is_prepared_where_attention_is_not_flex(tmp_path: Any) -> None:
    assert load(tiny_llama(), tmp_path).fixed(make_batch()) is None


@pytest.mark.gpu
@pytest.mark.parametrize("builder", [tiny_llama, tiny_gemma3])
@pytest.mark.parametrize("seq_len", [40, 256])
def test_captured_features_equal_one_document_at_a_time(
    builder: Callable[[], Any], seq_len: int, tmp_path: Any
) -> None:
    model = builder()
    spans: Spans = SPANS
    if seq_len > 40:
        spans = (((0, 100), (100, 256)), ((0, 25), (25, 230)), ((0, 256),), ((0, 10), (10, 20), (20, 129)))
    batches = make_batch(spans, seq_len), make_batch(spans[::-1], seq_len, seed=3)
    target = Target.load(TargetOptions(model=str(save_tiny(model, tmp_path))), TAPS, "cuda:0", torch.float32)
    wanted = [real(batch, reference(model, batch)) for batch in batches]
    fixed = target.fixed(batches[0])
    assert isinstance(fixed, FixedFeatures)
    assert fixed.lends
    for i in (0, 1, 0):  # three calls: the first set of outputs is written again
        for got, expected in zip(
            real(batches[i], [f.cpu() for f in fixed.features(batches[i])]), wanted[i], strict=True
        ):
            torch.testing.assert_close(got, expected, atol=5e-3 * float(expected.abs().max()), rtol=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_captured_features_never_wait_for_the_device(quantization: Any, tmp_path: Any) -> None:
    options = TargetOptions(model=str(save_tiny(tiny_llama(), tmp_path)), quantization=quantization)
    target = Target.load(options, TAPS, "cuda:0", torch.bfloat16)
    batch = make_batch().pinned()
    fixed = target.fixed(batch)
    assert fixed is not None
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            fixed.features(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
