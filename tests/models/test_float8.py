"""Targets whose products are done in float8: rounding, layers, whole models, and checkpoints stored so."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helixctl.errors import ModelError
from helixctl.models.facts import read_target_facts
from helixctl.models.float8 import (
    DTYPE,
    LARGEST,
    Float8Linear,
    dequantize,
    multiplies_float8,
    multiply,
    plain_weight,
    quantize,
    quantize_weight,
)
from helixctl.models.float8_format import choose_float8, weight_bytes
from helixctl.models.identity import fingerprint_weights
from helixctl.models.proof import prove_capture
from helixctl.models.target import Target
from helixctl.recipe.schema import TargetOptions
from tests.models.test_target import TAPS, make_batch, real, reference
from tests.tiny import save_tiny, tiny_gemma3, tiny_gpt_oss, tiny_lfm2, tiny_llama, tiny_phi3, tiny_qwen3

CPU = torch.device("cpu")
BUILDERS = (tiny_llama, tiny_qwen3, tiny_gemma3, tiny_phi3)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
HALF_STEP = 2.0**-4
"""Of a number with three bits behind the leading one."""


@given(values=st.lists(FLOATS, min_size=4, max_size=4), block=st.sampled_from([None, 2]))
@example(values=[0.0, 0.0, 0.0, 0.0], block=None)
@example(values=[3.4e38, 1e-30, -1.0, 0.0], block=2)
@example(values=[1e-45, 0.0, 0.0, 0.0], block=None)
def test_a_value_comes_back_within_half_a_step(values: list[float], block: int | None) -> None:
    given_ = torch.tensor([values])
    quantized, scales = quantize(given_, block)
    assert quantized.dtype == DTYPE and scales.dtype == torch.float32
    assert scales.shape == (1, 1 if block is None else 2)
    back = dequantize(quantized, scales, torch.float64)[0].tolist()
    width = block or 4
    for place, (value, found) in enumerate(zip(values, back, strict=True)):
        group = values[place // width * width :][:width]
        largest = max(abs(other) for other in group)
        # Below 2^-6 of float8's own range steps have one size: 2^-9 x scale, and rows below 1e-12 share one scale.
        step = 2.0**-9 * max(largest, 1e-12) / LARGEST
        assert abs(found - value) <= (1 + 1e-6) * max(HALF_STEP * abs(value), step / 2) + 1e-44
        assert abs(found - value) <= HALF_STEP * max(largest, 1e-12)
        assert found == 0 or math.copysign(1, found) == math.copysign(1, value)


@given(values=st.lists(FLOATS, min_size=3, max_size=3), bad=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_row_with_something_not_finite_is_lost_and_no_other(values: list[float], bad: float) -> None:
    rows = torch.tensor([[*values, bad], [*values, 1.0]])
    back = dequantize(*quantize(rows), torch.float32)
    assert back[0].isnan().all()
    assert torch.equal(back[1], dequantize(*quantize(rows[1:]), torch.float32)[0])
    assert back[1].isfinite().all()


def test_an_outlier_flattens_its_own_row_alone() -> None:
    rows = torch.tensor([[1e6, 1.0, 1e-3, -1.0], [0.5, 1.0, 1e-3, -1.0]])
    back = dequantize(*quantize(rows), torch.float32)
    assert back[0].tolist() == [1e6, 0.0, 0.0, 0.0]  # 1 / 1e6 of the largest is below float8's smallest step
    torch.testing.assert_close(back[1], rows[1], rtol=HALF_STEP, atol=0)


def obvious_weight(weight: Tensor, block: int) -> Tensor:
    """Tile by tile, the nearest of all float8 numbers by search."""
    numbers = torch.arange(256, dtype=torch.uint8).view(DTYPE).float()
    numbers = numbers[numbers.isfinite()].sort().values
    out = torch.zeros_like(weight)
    for top in range(0, weight.shape[0], block):
        for left in range(0, weight.shape[1], block):
            tile = weight[top : top + block, left : left + block]
            scale = tile.abs().max() / LARGEST
            nearest = (tile[..., None] / scale - numbers).abs().argmin(-1)
            out[top : top + block, left : left + block] = numbers[nearest] * scale
    return out


def test_blocks_equal_the_nearest_numbers_of_every_tile() -> None:
    weight = torch.randn(10, 12, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 10)[:, None]
    quantized, scales = quantize_weight(weight, 4)
    assert quantized.shape == (10, 12) and scales.shape == (3, 3)
    torch.testing.assert_close(dequantize(quantized, scales, torch.float32, 4), obvious_weight(weight, 4))


@pytest.mark.parametrize("block", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_layer_is_the_product_of_what_both_sides_stand_for(block: int | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(10, 8, generator=generator), torch.randn(10, generator=generator)
    x = (torch.randn(2, 3, 8, generator=generator) * torch.logspace(-2, 2, 3)[:, None]).to(dtype)
    layer = Float8Linear(*quantize_weight(weight, block), bias.to(dtype), block)
    kept = dequantize(*quantize(x.reshape(6, 8), block), torch.float32).view(2, 3, 8)
    wanted = kept.double() @ layer.dequantized(torch.float64).T + bias.double()
    found = layer(x)
    assert found.dtype == dtype and found.shape == (2, 3, 10)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def load(model: Any, folder: Path, quantization: Any = "fp8", dtype: torch.dtype = torch.float64) -> Target:
    """Float64 by default: in it two orders of summation round to the same float8 number."""
    options = TargetOptions(model=str(save_tiny(model, folder)), quantization=quantization)
    return Target.load(options, TAPS, CPU, dtype)


@pytest.mark.parametrize("builder", BUILDERS)
def test_captured_states_are_the_quantised_models_own(builder: Callable[[], Any], tmp_path: Path) -> None:
    target, plain = load(builder(), tmp_path), load(builder(), tmp_path, "none")
    assert target.float8 and not plain.float8
    batch = make_batch()
    got, unquantised = real(batch, target.features(batch)), real(batch, plain.features(batch))
    implementation = target.model.config._attn_implementation
    want = real(batch, reference(target.model, batch))
    target.model.set_attn_implementation(implementation)
    for one, other, far in zip(got, want, unquantised, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), atol=1e-5 * float(other.abs().max()), rtol=1e-5)
        assert float((one - far).norm() / far.norm()) > 1e-2  # and not those of the target that it was made from


@pytest.mark.parametrize("builder", BUILDERS)
def test_spread_and_moved_targets_keep_their_numbers(builder: Callable[[], Any], tmp_path: Path) -> None:
    options, batch = TargetOptions(model=str(save_tiny(builder(), tmp_path)), quantization="fp8"), make_batch()
    one = Target.load(options, TAPS, CPU, torch.float32)
    two = Target.load(options, TAPS, CPU, torch.float32, span=(CPU, CPU))
    assert two.float8
    for a, b in zip(one.features(batch), two.features(batch), strict=True):
        assert torch.equal(a, b)


def test_the_library_forward_gives_the_captured_states_and_logits(tmp_path: Path) -> None:
    found = prove_capture(load(tiny_llama(), tmp_path), make_batch().input_ids[2])
    assert found.holds and max(*found.taps, found.logits) < 1e-9  # a softmax in float32 would show, and grow


def test_only_linear_layers_of_the_decoders_layers_are_float8(tmp_path: Path) -> None:
    target = load(tiny_qwen3(), tmp_path, dtype=torch.float32)
    plain = load(tiny_qwen3(), tmp_path, "none", dtype=torch.float32)
    kinds = {name: type(module) for name, module in target.model.named_modules()}
    assert kinds["lm_head"] is nn.Linear and kinds["model.layers.3.mlp.down_proj"] is Float8Linear
    assert not any(type(module) is nn.Linear for module in target.layers.modules())
    assert torch.equal(target.shared.head, plain.shared.head)
    assert torch.equal(target.shared.embedding, plain.shared.embedding)
    held = sum(p.numel() * p.element_size() for p in target.layers.parameters())
    norms = sum(p.numel() for p in plain.layers.parameters() if p.ndim == 1)
    rows = sum(len(p) for p in plain.layers.parameters() if p.ndim == 2)
    assert held == sum(p.numel() for p in plain.layers.parameters() if p.ndim == 2) + 4 * (norms + rows)
    assert fingerprint_weights(target.model) != fingerprint_weights(plain.model)


def test_what_cannot_be_float8_is_refused(tmp_path: Path) -> None:
    for builder, what in ((tiny_gpt_oss, "experts"), (tiny_lfm2, "recurrent layers")):
        with pytest.raises(ModelError, match=f"has {what}"):
            load(builder(), tmp_path / what)


def store_float8(model: Any, folder: Path, block: int | None, method: str = "fp8") -> dict[str, Tensor]:
    """Write the checkpoint as publishers of float8 do; returns the numbers that its layers stand for, by module."""
    save_tiny(model, folder)
    tensors, plain = load_file(folder / "model.safetensors"), {}
    ending = "weight_scale_inv" if method == "fp8" else "weight_scale"
    for key in [key for key in tensors if "layers" in key and key.endswith("proj.weight")]:
        quantized, scales = quantize_weight(tensors[key], block)
        if method != "fp8":
            scales = scales.bfloat16()
        name = key.removesuffix(".weight")
        tensors |= {key: quantized, f"{name}.{ending}": scales}
        plain[name] = dequantize(quantized, scales.float(), torch.float32, block)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    sides = None if block is None else [block, block]
    section: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": sides}
    if method != "fp8":
        section = compressed_tensors(sides)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return plain


def compressed_tensors(sides: list[int] | None) -> dict[str, Any]:
    """What llm-compressor writes for FP8_DYNAMIC and FP8_BLOCK."""
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    inputs: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
    weights |= {"strategy": "channel"} if sides is None else {"strategy": "block", "block_structure": sides}
    inputs |= {"strategy": "token"} if sides is None else {"strategy": "group", "group_size": sides[0]}
    group = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


LAYOUTS = [("fp8", 16), ("compressed-tensors", None), ("compressed-tensors", 16)]


@pytest.mark.parametrize(("method", "block"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_float8_checkpoint_is_taken_as_it_is_stored(
    method: str, block: int | None, dtype: torch.dtype, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = store_float8(tiny_qwen3(), tmp_path, block, method)
    target = Target.load(TargetOptions(model=str(tmp_path)), TAPS, CPU, dtype)
    assert capfd.readouterr().err == ""  # the library would report every scale as left over
    assert target.float8 and target.dtype == dtype
    modules = dict(target.model.named_modules())
    for name, weight in plain.items():
        assert isinstance(modules[name], Float8Linear) and modules[name].block == block
        assert torch.equal(plain_weight(modules[name]), weight)
    options = TargetOptions(model=str(tmp_path), quantization="none")
    full = Target.load(options, TAPS, CPU, dtype)
    assert not full.float8
    for name, weight in plain.items():
        assert torch.equal(dict(full.model.named_modules())[name].weight, weight.to(dtype))


def test_quantising_and_storing_give_the_same_target(tmp_path: Path) -> None:
    store_float8(tiny_llama(), tmp_path / "stored", None, "compressed-tensors")
    stored = Target.load(TargetOptions(model=str(tmp_path / "stored")), TAPS, CPU, torch.float32)
    quantised = load(tiny_llama(), tmp_path / "plain", dtype=torch.float32)
    for one, other in zip(stored.layers.modules(), quantised.layers.modules(), strict=True):
        if isinstance(one, Float8Linear) and isinstance(other, Float8Linear):
            assert torch.equal(one.weight.view(torch.uint8), other.weight.view(torch.uint8))
            torch.testing.assert_close(one.scales, other.scales, rtol=2**-8, atol=0)  # stored in bfloat16


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": values}))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [16, 16]}, "is static"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "weight_block_size is None"),
        ({"quant_method": "fp8", "weight_block_size": [1, 16]}, r"weight_block_size is \[1, 16\]"),
        ({"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0"}, "scale_fmt is ue8m0"),
        ({**compressed_tensors(None), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({**compressed_tensors(None), "config_groups": {}}, "0 config_groups"),
        ({**compressed_tensors([16, 16]), "config_groups": {"one": {}}}, "not symmetric float8"),
    ],
)
def test_float8_of_another_kind_is_refused_and_says_what(section: dict[str, Any], words: str, tmp_path: Path) -> None:
    store_float8(tiny_llama(), tmp_path, 16)
    change(tmp_path, **section)
    for quantization in ("auto", "none", "fp8"):
        options = TargetOptions.model_validate({"model": str(tmp_path), "quantization": quantization})
        with pytest.raises(ModelError, match=words) as caught:
            Target.load(options, TAPS, CPU, torch.float32)
        assert "bfloat16 checkpoint" in str(caught.value.fix)


def test_another_quantisation_is_not_done_again(tmp_path: Path) -> None:
    save_tiny(tiny_llama(), tmp_path)
    change(tmp_path, quant_method="gptq", bits=4)
    with pytest.raises(ModelError, match=r"quantised already \(gptq\)"):
        Target.load(TargetOptions(model=str(tmp_path), quantization="fp8"), TAPS, CPU, torch.float32)


@pytest.mark.parametrize("fault", ["no scales", "lost", "elsewhere", "size", "not float8"])
def test_scales_that_do_not_fit_the_weights_are_refused(fault: str, tmp_path: Path) -> None:
    store_float8(tiny_llama(), tmp_path, 16)
    file, first = tmp_path / "model.safetensors", "model.layers.0.mlp.down_proj"
    tensors = load_file(file)
    scale = f"{first}.weight_scale_inv"
    if fault == "no scales":
        tensors = {key: value for key, value in tensors.items() if "scale" not in key}
    elif fault == "lost":
        del tensors[scale]
    elif fault == "elsewhere":
        tensors["lm_head.weight_scale_inv"] = torch.ones(8, 2)
    elif fault == "size":
        tensors[scale] = torch.ones(2, 5)
    else:
        tensors[f"{first}.weight"] = torch.full((32, 64), 0.3)
    save_file(tensors, file, {"format": "pt"})
    words = {
        "no scales": "holds no tensors named",
        "lost": "model.layers.0.mlp.down_proj.weight is float8 and has no scale",
        "elsewhere": "lm_head.weight_scale_inv",
        "size": r"scales \[2, 5\] for a weight \[32, 64\], expected \[2, 4\]",
        "not float8": "its weight is not float8",
    }
    with pytest.raises(ModelError, match=words[fault]):
        Target.load(TargetOptions(model=str(tmp_path)), TAPS, CPU, torch.float32)


def test_the_plan_counts_the_bytes_that_are_held(tmp_path: Path) -> None:
    for quantization, block in (("none", None), ("fp8", None), ("auto", 16)):
        folder = tmp_path / str(quantization)
        if block is None:
            save_tiny(tiny_qwen3(), folder)
        else:
            store_float8(tiny_qwen3(), folder, block)
        options = TargetOptions.model_validate({"model": str(folder), "quantization": quantization})
        target, facts = Target.load(options, TAPS, CPU, torch.bfloat16), read_target_facts(options)
        matrices = [p for p in target.layers.parameters() if p.ndim == 2]
        held = sum(p.numel() * p.element_size() for p in matrices)
        assert held == weight_bytes(facts, 2, choose_float8(options, facts))


def test_a_drafter_starts_from_the_plain_numbers_of_a_float8_layer(tmp_path: Path) -> None:
    own: Any = load(tiny_qwen3(), tmp_path, dtype=torch.float32).layers.get_submodule("1.mlp.up_proj")
    assert own.weight.dtype == DTYPE and plain_weight(own).dtype == torch.float32
    assert torch.equal(own(torch.eye(32)).T, plain_weight(own))  # ones are exact in float8
    assert plain_weight(nn.Linear(2, 2)).dtype == torch.float32


@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("num_tokens", [1, 5, 300])
def test_torch_takes_factors_and_scales_as_they_are_laid_out(block: int | None, num_tokens: int) -> None:
    """On `meta` torch checks sizes and strides as it does for a GPU, and computes nothing."""
    weight, x = torch.empty(384, 1024, device="meta"), torch.empty(num_tokens, 1024, device="meta")
    found = multiply(*quantize(x, block), *quantize_weight(weight, block), block)
    assert found.shape == (num_tokens, 384) and found.dtype == torch.bfloat16
    with pytest.raises(RuntimeError):
        multiply(*quantize(x, block), *quantize_weight(torch.empty(377, 1024, device="meta"), block), block)


def needs_products(block: int | None) -> None:
    if not multiplies_float8(torch.device("cuda:0"), block):
        pytest.skip(f"this GPU and this CUDA multiply no float8 with scales of {block or 'rows'}")


@pytest.mark.gpu
@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("num_tokens", [1, 5, 300])
def test_the_devices_product_equals_the_reference(block: int | None, num_tokens: int) -> None:
    needs_products(block)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(384, 1024, generator=generator) * torch.logspace(-2, 2, 384)[:, None]
    x = torch.randn(num_tokens, 1024, generator=generator) * torch.logspace(0, 3, 1024)
    layer = Float8Linear(*quantize_weight(weight, block), torch.randn(384, generator=generator).bfloat16(), block)
    kept = dequantize(*quantize(x.bfloat16(), block), torch.float64)
    assert layer.bias is not None
    wanted = kept @ layer.dequantized(torch.float64).T + layer.bias.double()
    layer = layer.cuda()
    assert layer.multiplies
    found = layer(x.bfloat16().cuda())
    assert found.dtype == torch.bfloat16
    error = (found.cpu().double() - wanted).norm(dim=0) / wanted.norm(dim=0)  # row by row of the weight
    assert float(error.max()) < 1e-2


@pytest.mark.gpu
def test_a_gpu_without_room_for_whole_sizes_multiplies_the_plain_numbers() -> None:
    layer = Float8Linear(*quantize_weight(torch.randn(24, 40)), None).cuda()
    assert not layer.multiplies
    assert layer(torch.randn(3, 40, device="cuda", dtype=torch.bfloat16)).isfinite().all()


@pytest.mark.gpu
def test_compiled_quantisation_is_the_same(device: str = "cuda:0") -> None:
    x = torch.randn(64, 1024, device=device, dtype=torch.bfloat16)
    (one, scales), (other, others) = quantize(x), torch.compile(quantize, fullgraph=True)(x)
    torch.testing.assert_close(scales, others)
    assert float((one.float() != other.float()).float().mean()) < 1e-2  # a last bit of the division


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 0.02), (torch.bfloat16, 0.5)])
def test_captured_gpu_features_are_the_quantised_models(dtype: torch.dtype, limit: float, tmp_path: Path) -> None:
    """Bfloat16 differs from float32 by nearly as much as float8 does in so small and random a model."""
    wanted = real(make_batch(), load(tiny_llama(), tmp_path).features(make_batch()))
    target = Target.load(TargetOptions(model=str(tmp_path), quantization="fp8"), TAPS, "cuda:0", dtype)
    assert all(m.multiplies for m in target.layers.modules() if isinstance(m, Float8Linear))
    fixed = target.fixed(make_batch())
    assert fixed is not None and fixed.lends
    for _ in range(2):
        found = real(make_batch(), [feature.cpu() for feature in fixed.features(make_batch())])
        for one, other in zip(found, wanted, strict=True):
            assert float((one.double() - other).norm() / other.norm()) < limit
