"""What a GPU can do at most, for the share of it that training uses (MFU)."""

from __future__ import annotations

import torch

_BF16_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "H800": 989.4,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.1,
    "L4": 121.0,
    "A10": 125.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}
"""Dense bfloat16 products with float32 sums, from the makers' data sheets; the first name that fits counts."""


def peak_flops(device: str) -> float | None:
    """Dense bfloat16 operations per second of ``cuda:0`` and the like; None for a CPU and for an unknown GPU."""
    if not device.startswith("cuda"):
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """The same by the GPU's name."""
    words = f" {name} ".replace("-", " ")
    return next((1e12 * peak for known, peak in _BF16_TFLOPS.items() if f" {known} " in words), None)
