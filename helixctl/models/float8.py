"""The linear layers of a frozen target in float8 e4m3, with the numbers that serving engines compute.

Weights are quantised once, activations token by token. On devices that multiply float8 the product is theirs; elsewhere
the dequantised numbers are multiplied in the target's dtype. ``float8_format.py`` says which layers are float8 and why.

Legend: T tokens, K inputs and N outputs of a layer, b side of a block, G = K / b groups (1 without blocks).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from helixctl.errors import ModelError
from helixctl.models.facts import find_model_file
from helixctl.models.float8_format import Float8

logger = logging.getLogger(__name__)

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
_SMALLEST_ROW = 1e-12
"""A row of zeros needs a scale, too. vLLM's smallest scale is 1 / (448 x 512): rows below 1/512 are coarser there."""
_MULTIPLE = 16
"""`torch._scaled_mm` wants sizes that are multiples of it; see its checks in torch 2.11 and 2.13."""
_BLOCKS = 4
"""cuBLAS reads four scales of blocks at once: the product of others would be wrong without a word, see
https://github.com/pytorch/pytorch/pull/166752"""
_FIRST_CAPABILITY = (8, 9)
_PRODUCTS: dict[tuple[torch.device, int | None], bool] = {}
"""Whether a device multiplies float8 with such scales, by trying."""


def quantize(values: Tensor, block: int | None = None) -> tuple[Tensor, Tensor]:
    """The nearest float8 numbers with one scale per row, or per row and ``block`` columns.

    A group that holds something that is not finite comes out as NaN altogether, as its product would.

    Args:
        values: [T, K] of any float type; K is a multiple of ``block``.
        block: b; None for whole rows.

    Returns:
        [T, K] float8 e4m3 and scales [T, G] float32: ``dequantize`` gives the values within a sixteenth each.
    """
    groups = values.float().unflatten(-1, (-1, block or values.shape[-1]))  # [T, G, b]
    scales = groups.abs().amax(-1).clamp_min(_SMALLEST_ROW) / LARGEST  # [T, G]
    scaled = (groups / scales[..., None]).clamp(-LARGEST, LARGEST)  # torch 2.11 makes NaN of what is larger
    return scaled.to(DTYPE).flatten(-2), scales


def quantize_weight(weight: Tensor, block: int | None = None) -> tuple[Tensor, Tensor]:
    """Float8 weights [N, K] and scales: [N, 1] float32, or [ceil(N / b), G] with one for every block of b x b."""
    if block is None:
        return quantize(weight)
    rows = weight.shape[0]
    padded = functional.pad(weight, (0, 0, 0, -rows % block))
    tiles = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block)).transpose(1, 2)  # [N / b, G, b, b]
    quantized, scales = quantize(tiles.flatten(0, 1).flatten(1))
    tiles = quantized.view(*tiles.shape).transpose(1, 2)
    return tiles.reshape(padded.shape)[:rows].contiguous(), scales.view(padded.shape[0] // block, -1)


def dequantize(quantized: Tensor, scales: Tensor, dtype: torch.dtype, block: int | None = None) -> Tensor:
    """The numbers [N, K] that float8 ``quantized`` [N, K] stands for, in ``dtype``.

    ``scales`` float32 are [N, G], or [ceil(N / b), G] where b rows share theirs.
    """
    rows, groups = quantized.shape[0], scales.shape[1]
    if block is not None and scales.shape[0] != rows:
        scales = scales.repeat_interleave(block, 0)[:rows]
    values = quantized.float().unflatten(-1, (groups, -1)) * scales[..., None]  # [N, G, b]
    plain: Tensor = values.flatten(-2).to(dtype)
    return plain


class Float8Linear(nn.Module):
    """``x @ weight.T + bias`` with both factors in float8; of the dtype of ``x``. Frozen."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None, block: int | None = None) -> None:
        """``weight`` is [N, K] float8 e4m3, ``scales`` [N, 1] or [ceil(N / b), G] float32, ``bias`` [N]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.block = block
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.multiplies = self._multiplies()

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        tokens, scales = quantize(x.reshape(-1, self.in_features), self.block)
        if self.multiplies and x.dtype == torch.bfloat16:
            found = multiply(tokens, scales, self.weight, self.scales, self.block)
            found = found if self.bias is None else found + self.bias
        else:
            plain = dequantize(tokens, scales, x.dtype)
            found = functional.linear(plain, self.dequantized(x.dtype), self.bias)
        return found.view(*x.shape[:-1], self.out_features)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] as plain numbers."""
        return dequantize(self.weight, self.scales, dtype, self.block)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moved: what the new device can do is found out now, not in a forward that may be captured."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.multiplies = self._multiplies()
        return self

    def _multiplies(self) -> bool:
        rows, columns = (_MULTIPLE, _MULTIPLE) if self.block is None else (self.block, _BLOCKS * self.block)
        whole = self.out_features % rows == 0 and self.in_features % columns == 0
        return whole and multiplies_float8(self.weight.device, self.block)


def multiply(tokens: Tensor, token_scales: Tensor, weight: Tensor, scales: Tensor, block: int | None) -> Tensor:
    """The device's own product: [T, K] and [N, K] float8 with their scales to [T, N] bfloat16.

    Sums are kept as serving engines keep them: in the tensor core's own precision with scales of rows, in float32 from
    block to block.
    """
    num_tokens = tokens.shape[0]
    missing = -num_tokens % _MULTIPLE  # cuBLAS has no product of 1 token, nor, with scales of blocks, of 5
    if missing:
        tokens, token_scales = (_padded(x, missing) for x in (tokens, token_scales))
    if block is not None:
        token_scales = token_scales.t().contiguous().t()  # cuBLAS wants one group of all tokens behind the other
    product = torch._scaled_mm(
        tokens,
        weight.t(),
        token_scales,
        scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=block is None,
    )
    return product[:num_tokens]


def _padded(x: Tensor, missing: int) -> Tensor:
    """[T, G] with as many more rows of zeros."""
    return torch.cat((x, x.new_zeros(missing, x.shape[1])))


def multiplies_float8(device: torch.device, block: int | None = None) -> bool:
    """Whether ``device`` has float8 products with such scales; the log names a GPU that has none, once per process.

    Scales of rows need compute capability 8.9; those of blocks Hopper and CUDA 12.9.
    """
    if device.type != "cuda":
        return False
    if (device, block) not in _PRODUCTS:
        lack = _try_product(device, block)
        if lack:
            scales = "rows" if block is None else f"blocks of {block}"
            logger.warning("%s has no float8 products with scales of %s, so they are slow: %s", device, scales, lack)
        _PRODUCTS[device, block] = not lack
    return _PRODUCTS[device, block]


def _try_product(device: torch.device, block: int | None) -> str:
    """Multiply two small matrices; what went wrong."""
    capability = torch.cuda.get_device_capability(device)
    if capability < _FIRST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]}"
    size = _BLOCKS * (block or _MULTIPLE)
    ones = torch.ones(size, size, device=device)
    try:
        multiply(*quantize(ones, block), *quantize_weight(ones, block), block)
    except (RuntimeError, ValueError) as error:
        return str(error).strip().partition("\n")[0]
    return ""


def is_float8(model: nn.Module) -> bool:
    """Whether some of its products are done in float8."""
    return any(isinstance(module, Float8Linear) for module in model.modules())


def plain_weight(module: Any) -> Tensor:
    """The weight of a linear layer as plain numbers: float32 where it is float8."""
    return module.dequantized(torch.float32) if isinstance(module, Float8Linear) else module.weight


@torch.no_grad()
def quantize_layers(decoder: Any, float8: Float8) -> None:
    """Replace every linear layer in the decoder's layers by its float8 form, on the device where it is.

    Raises:
        ModelError: there are none.
    """
    linear = dict(_linear_layers(decoder))
    if not linear:
        raise ModelError(
            f"the layers of {type(decoder).__name__} have no linear layers that could be float8",
            fix="set target.quantization: none",
        )
    for name, module in linear.items():
        layer = Float8Linear(*quantize_weight(module.weight, float8.block), module.bias, float8.block)
        decoder.set_submodule(name, layer)


@torch.no_grad()
def restore_layers(model: Any, decoder: Any, name: str, float8: Float8, *, plain: bool = False) -> None:
    """Give the layers of a float8 checkpoint their scales; the loader has left them the bare float8 numbers.

    Args:
        model: The causal LM, as transformers loads it without its quantiser, in any dtype.
        decoder: The part of it that holds ``layers``.
        name: Folder of the checkpoint, or its hub name.
        float8: How it is stored.
        plain: Multiply the weights by their scales instead, and let the products be done in their dtype.

    Raises:
        ModelError: scales without a layer, layers without scales, or sizes that do not fit.
    """
    scales, weights = read_scales(name, float8.stored)
    prefix = next(own for own, module in model.named_modules() if module is decoder)
    for place, module in _linear_layers(decoder):
        own = scales.pop(f"{prefix}.{place}.{float8.stored}", None)
        if own is not None:  # the others are stored in full
            weights.discard(f"{prefix}.{place}.weight")
            layer = _restored(module, own.float(), float8.block, f"{name}: {prefix}.{place}")
            if plain:
                module.weight.copy_(layer.dequantized(module.weight.dtype))
            else:
                decoder.set_submodule(place, layer)
    fix = "name the bfloat16 checkpoint that it was made from, with target.quantization: fp8"
    if scales:
        raise ModelError(f"{name} holds {min(scales)}, which belongs to no linear layer of its decoder", fix=fix)
    if weights:
        raise ModelError(f"{name}: {min(weights)} is float8 and has no scale", fix=fix)


def _restored(module: nn.Linear, scales: Tensor, block: int | None, what: str) -> Float8Linear:
    rows, columns = module.weight.shape
    shape = (rows, 1) if block is None else (-(-rows // block), -(-columns // block))
    if tuple(scales.shape) != shape or columns % (block or 1):
        message = f"{what} has scales {list(scales.shape)} for a weight {[rows, columns]}, expected {list(shape)}"
        raise ModelError(message, fix="download the model again, or name the bfloat16 checkpoint that it was made from")
    weight = module.weight.to(DTYPE)
    if not torch.equal(weight.to(module.weight.dtype), module.weight):
        fix = "name the bfloat16 checkpoint that it was made from, with target.quantization: fp8"
        raise ModelError(f"{what} has a scale, but its weight is not float8", fix=fix)
    return Float8Linear(weight, scales.to(weight.device), module.bias, block)


def read_scales(name: str, ending: str) -> tuple[dict[str, Tensor], set[str]]:
    """Every tensor of the checkpoint whose name ends in ``.ending``, and the names of those that are float8.

    Raises:
        ModelError: no tensor of that name.
    """
    found: dict[str, Tensor] = {}
    float8: set[str] = set()
    for path in _weight_files(name):
        with safe_open(path, "pt") as file:
            names = [*file.keys()]
            found |= {key: file.get_tensor(key) for key in names if key.endswith(f".{ending}")}
            float8 |= {key for key in names if file.get_slice(key).get_dtype() == "F8_E4M3"}
    if not found:
        raise ModelError(
            f"{name} says that it is float8, but holds no tensors named *.{ending}",
            fix="download the model again, or name the bfloat16 checkpoint that it was made from",
        )
    return found, float8


def _weight_files(name: str) -> list[Path]:
    index = find_model_file(name, "model.safetensors.index.json")
    if index is None:
        files = {"model.safetensors"}
    else:
        weight_map: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {*weight_map.values()}
    return [path for file in sorted(files) if (path := find_model_file(name, file)) is not None]


def _linear_layers(decoder: Any) -> list[tuple[str, nn.Linear]]:
    """Names below ``decoder`` and modules."""
    found = decoder.layers.named_modules(prefix="layers")
    return [(name, module) for name, module in found if isinstance(module, nn.Linear)]
