from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helixctl.data.batch import MicroBatch
from helixctl.errors import ModelError
from helixctl.models.flex import make_flex
from helixctl.models.target import Target
from helixctl.recipe.schema import TargetOptions
from tests.tiny import (
    save_tiny,
    tiny_gemma2,
    tiny_gemma3,
    tiny_gemma3_multimodal,
    tiny_gpt_oss,
    tiny_lfm2,
    tiny_llama,
    tiny_mistral,
    tiny_phi3,
    tiny_qwen3,
)

TAPS = (0, 2)
BUILDERS = (tiny_llama, tiny_qwen3, tiny_gemma3, tiny_mistral, tiny_gemma2, tiny_phi3, tiny_gpt_oss)
SPANS = (((0, 5), (5, 32), (32, 40)), ((0, 5), (5, 38)), ((0, 40),), ((0, 40),))


def make_batch(spans: tuple[tuple[tuple[int, int], ...], ...] = SPANS, seq_len: int = 40, seed: int = 0) -> MicroBatch:
    """Random tokens; padding where no span is."""
    num_rows = len(spans)
    position_ids = torch.zeros(num_rows, seq_len, dtype=torch.int64)
    document_ids = torch.full((num_rows, seq_len), -1, dtype=torch.int32)
    for row, documents in enumerate(spans):
        for number, (start, end) in enumerate(documents):
            position_ids[row, start:end] = torch.arange(end - start)
            document_ids[row, start:end] = number
    ids = torch.randint(3, 128, (num_rows, seq_len), generator=torch.Generator().manual_seed(seed))
    nothing = torch.zeros(num_rows, 1, dtype=torch.int64)
    return MicroBatch(
        seq=0,
        role="train",
        index=0,
        epoch=0,
        input_ids=ids,
        position_ids=position_ids,
        document_ids=document_ids,
        loss_mask=document_ids >= 0,
        anchors=nothing,
        anchor_valid=nothing.bool(),
        documents=tuple(tuple(range(len(row))) for row in spans),
        spans=spans,
    )


def load(
    model: Any, folder: Any, backend: str = "segments", taps: tuple[int, ...] = TAPS, quantization: Any = "auto"
) -> Target:
    """A target with ``backend``; flex, which Target refuses on a CPU, runs uncompiled."""
    chosen: Any = "segments" if backend == "flex" else backend
    options = TargetOptions(model=str(save_tiny(model, folder)), attention=chosen, quantization=quantization)
    target = Target.load(options, taps, "cpu", torch.float32)
    if backend == "flex":
        target.backend, target.flex = "flex", make_flex(compiled=False)
    return target


def reference(model: Any, batch: MicroBatch, taps: tuple[int, ...] = TAPS) -> list[Tensor]:
    """One document at a time through the stock implementation; zeros at padding."""
    model.set_attn_implementation("eager")
    out = [torch.zeros(*batch.input_ids.shape, model.config.hidden_size) for _ in taps]
    for row, documents in enumerate(batch.spans):
        for start, end in documents:
            states = model(batch.input_ids[row : row + 1, start:end], output_hidden_states=True).hidden_states
            for tap, kept in zip(taps, out, strict=True):
                kept[row, start:end] = states[tap + 1][0]
    return out


def real(batch: MicroBatch, states: list[Tensor]) -> list[Tensor]:
    return [s[batch.document_ids >= 0] for s in states]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["segments", "dense", "flex"])
@pytest.mark.parametrize("builder", BUILDERS)
def test_packed_rows_equal_one_document_at_a_time(builder: Callable[[], Any], backend: str, tmp_path: Any) -> None:
    model = builder()
    batch = make_batch()
    got = real(batch, load(model, tmp_path, backend).features(batch))
    want = real(batch, reference(model, batch))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5 * float(other.abs().max()), rtol=1e-5)


@pytest.mark.parametrize("builder", [tiny_llama, tiny_gemma3])
def test_long_documents_take_the_other_path_to_the_same_numbers(
    builder: Callable[[], Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, batch = load(builder(), tmp_path), make_batch()
    short = target.features(batch)
    monkeypatch.setattr("helixctl.models.attention.SHORT", 0)
    for one, other in zip(short, target.features(batch), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["segments", "dense", "flex"])
@pytest.mark.parametrize("builder", [tiny_llama, tiny_gemma3])
def test_a_document_never_sees_its_neighbour(builder: Callable[[], Any], backend: str, tmp_path: Any) -> None:
    target = load(builder(), tmp_path, backend)
    batch = make_batch()
    before = target.features(batch)
    batch.input_ids[0, 2] = (batch.input_ids[0, 2] - 3 + 1) % 125 + 3
    after = target.features(batch)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[0, 5:], other[0, 5:])
        assert not torch.equal(one[0, 2:5], other[0, 2:5])
        assert torch.equal(one[0, :2], other[0, :2])


def test_flex_blocks_agree_with_the_dense_mask_across_block_borders(tmp_path: Any) -> None:
    from helixctl.models.flex import document_blocks

    batch = make_batch((((0, 128), (128, 130), (130, 500)), ((0, 300), (300, 460))), seq_len=500)
    ids = batch.document_ids
    place = torch.arange(500)
    for window in (None, 8, 128, 200):
        mask = document_blocks(ids, ids, window)
        seen = (ids[:, :, None] == ids[:, None, :]) & (place[:, None] >= place[None, :])
        if window is not None:
            seen &= place[:, None] - place[None, :] < window
        blocks = torch.nn.functional.pad(seen, (0, 12, 0, 12)).view(2, 4, 128, 4, 128).transpose(2, 3)
        dense = mask.to_dense()[:, 0].bool()  # 1 where a block is visited
        assert not (blocks.any(-1).any(-1) & ~dense).any()
        assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
        for row in range(2):
            for q in range(4):
                for k in mask.full_kv_indices[row, 0, q, : int(mask.full_kv_num_blocks[row, 0, q])]:
                    rows = slice(0, 500 - q * 128)  # a ragged last block has queries beyond the row
                    assert blocks[row, q, int(k)][rows].all()


@pytest.mark.parametrize("builder", BUILDERS)
def test_final_norm_and_head_of_the_last_state_give_the_logits(builder: Callable[[], Any], tmp_path: Any) -> None:
    model = builder()
    target = load(model, tmp_path)
    batch = make_batch((((0, 40),),) * 2)
    *_, last = target.features(batch, last_hidden=True)
    model.set_attn_implementation("eager")
    out = model(batch.input_ids, output_hidden_states=True)
    logits = target.shared.logits(target.shared.final_norm(last))
    torch.testing.assert_close(logits, out.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.shared.embed(batch.input_ids), out.hidden_states[0])


@pytest.mark.parametrize("tied", [False, True])
def test_head_is_the_embedding_exactly_where_it_is_tied(tied: bool, tmp_path: Any) -> None:
    target = load(tiny_qwen3(tie_word_embeddings=tied), tmp_path)
    assert torch.equal(target.shared.head, target.shared.embedding) == tied
    assert (target.shared.head.data_ptr() == target.shared.embedding.data_ptr()) == tied


def test_layer_index_is_the_output_of_the_0_based_layer(tmp_path: Any) -> None:
    """Layer i adds i + 1 to every number, so the captured value names the layer."""
    model = tiny_llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    target = load(model, tmp_path, taps=(0, 1, 3))
    for i, layer in enumerate(target.model.model.layers):
        layer.mlp.down_proj.bias = torch.nn.Parameter(torch.full((32,), float(i + 1)), requires_grad=False)
    batch = make_batch()
    base = target.shared.embed(batch.input_ids)
    added = [float((state - base).mean()) for state in target.features(batch, last_hidden=True)]
    assert added == pytest.approx([1.0, 3.0, 10.0, 10.0], abs=1e-4)


def test_only_the_layers_up_to_the_last_tap_run(tmp_path: Any) -> None:
    target = load(tiny_llama(), tmp_path)
    ran: list[int] = []
    for i, layer in enumerate(target.model.model.layers):
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
    target.features(make_batch())
    assert ran == [0, 1]  # the tap's own hook, first in line, ends layer 2


def test_two_threads_share_one_target(tmp_path: Any) -> None:
    """Training's features and live decoding run on the same layers and do not see each other's captures."""
    target = load(tiny_qwen3(), tmp_path)
    batch = make_batch()
    want = target.features(batch)
    ids, positions = batch.input_ids[:, :6], batch.position_ids[2:3, :6].expand(4, 6)
    want_logits, _ = target.decode_step(ids, positions, target.new_cache(4, 8))
    failures: list[str] = []

    def decode() -> None:
        for _ in range(10):
            logits, states = target.decode_step(ids, positions, target.new_cache(4, 8))
            if not torch.equal(logits, want_logits) or len(states) != 2:
                failures.append("decode")

    thread = threading.Thread(target=decode)
    thread.start()
    for _ in range(10):
        if not all(torch.equal(a, b) for a, b in zip(target.features(batch), want, strict=True)):
            failures.append("features")
    thread.join()
    assert not failures


@pytest.mark.parametrize(("taps", "text"), [((4,), "0 and 3"), ((-1,), "0 and 3"), ((), "0 and 3")])
def test_taps_that_do_not_exist(taps: tuple[int, ...], text: str, tmp_path: Any) -> None:
    with pytest.raises(ModelError, match=text):
        load(tiny_llama(), tmp_path, taps=taps)


def test_missing_folder_missing_config_unknown_architecture(tmp_path: Any) -> None:
    def fails(model: str) -> str:
        with pytest.raises(ModelError) as caught:
            Target.load(TargetOptions(model=model), TAPS, "cpu", torch.float32)
        assert caught.value.fix
        return str(caught.value)

    assert "nowhere" in fails(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert "config.json" in fails(str(tmp_path / "empty"))
    folder = save_tiny(tiny_llama(), tmp_path / "strange")
    config = (folder / "config.json").read_text().replace('"llama"', '"strange_llm"')
    (folder / "config.json").write_text(config)
    assert "strange_llm" in fails(str(folder))


def test_flex_is_refused_on_a_cpu(tmp_path: Any) -> None:
    options = TargetOptions(model=str(save_tiny(tiny_llama(), tmp_path)), attention="flex")
    with pytest.raises(ModelError, match="GPU"):
        Target.load(options, TAPS, "cpu", torch.float32)


def test_layers_whose_mask_we_do_not_have_are_refused(tmp_path: Any) -> None:
    folder = save_tiny(tiny_qwen3(), tmp_path)
    config = (folder / "config.json").read_text().replace("full_attention", "chunked_attention")
    (folder / "config.json").write_text(config)
    with pytest.raises(ModelError, match="chunked_attention"):
        Target.load(TargetOptions(model=str(folder)), TAPS, "cpu", torch.float32)


def test_attention_that_bypasses_ours_is_an_error_not_a_leak(tmp_path: Any) -> None:
    target = load(tiny_llama(), tmp_path)
    target.model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ModelError, match="2 of 3 layers"):
        target.features(make_batch())


def test_a_recurrent_target_takes_one_document_a_row(tmp_path: Any) -> None:
    model = tiny_lfm2()
    target = load(model, tmp_path)
    assert target.facts.recurrent
    batch = make_batch((((0, 30),), ((0, 40),)))
    got, want = real(batch, target.features(batch)), real(batch, reference(model, batch))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    with pytest.raises(ModelError, match="packing: false"):
        target.features(make_batch())
    with pytest.raises(ModelError, match="rolled back"):
        target.decode_step(batch.input_ids, batch.position_ids, target.new_cache(2, 40))


def test_the_decoder_of_a_multimodal_model_is_found(tmp_path: Any) -> None:
    model = tiny_gemma3_multimodal()
    target = load(model, tmp_path)
    batch = make_batch((((0, 40),),) * 2)
    model.set_attn_implementation("eager")
    out = model(batch.input_ids, output_hidden_states=True)
    *taps, last = target.features(batch, last_hidden=True)
    for tap, state in zip(TAPS, taps, strict=True):
        torch.testing.assert_close(state, out.hidden_states[tap + 1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.shared.logits(target.shared.final_norm(last)), out.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("builder", [tiny_llama, tiny_gemma3, tiny_gemma2, tiny_gpt_oss])
def test_compiled_flex_on_a_gpu_equals_one_document_at_a_time(builder: Callable[[], Any], tmp_path: Any) -> None:
    model, batch = builder(), make_batch()
    options = TargetOptions(model=str(save_tiny(model, tmp_path)))
    target = Target.load(options, TAPS, "cuda:0", torch.float32)
    assert target.backend == "flex"
    got = real(batch, [state.cpu() for state in target.features(batch)])
    for one, other in zip(got, real(batch, reference(model, batch)), strict=True):
        torch.testing.assert_close(one, other, atol=5e-3 * float(other.abs().max()), rtol=5e-3)
    ids, positions = batch.input_ids[:, :6].cuda(), batch.position_ids[2:3, :6].expand(4, 6).cuda()
    logits, _ = target.decode_step(ids, positions, target.new_cache(4, 8))
    want = model(batch.input_ids[:, :6]).logits
    torch.testing.assert_close(logits.cpu(), want, atol=5e-3 * float(want.abs().max()), rtol=5e-3)
