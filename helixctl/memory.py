"""How much memory a run will need, device by device: an estimate from sizes, within a few tens of per cent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from helixctl.machine import Machine
from helixctl.models.facts import DTYPE_BYTES, TargetFacts, target_parameters

_CUDA_CONTEXT_BYTES = 1 << 30
"""Driver context, libraries' workspaces and the allocator's slack."""
_FULL = 0.95
_OUTPUT_SETS = 2
"""A target computes one micro-batch while the last one is copied out."""
_BYTES_PER_PARAMETER = 16
"""float32 master, gradient and two moments of Adam."""


@dataclass(frozen=True)
class MemoryLine:
    """One item on one device."""

    device: str
    name: str
    num_bytes: int


@dataclass(frozen=True)
class Load:
    """What will be put on the devices. R rows, S tokens per row, K taps."""

    target: TargetFacts
    target_devices: tuple[str, ...]
    drafter_devices: tuple[str, ...]
    target_dtype: str
    rows: int
    seq_len: int
    num_taps: int
    num_slots: int
    parameters: int
    """Of one drafter."""
    activation_bytes: int
    """Of one drafter's micro-batch, head included."""
    stored: bool = False
    """Features are read from disk: no target is loaded."""

    @property
    def element_bytes(self) -> int:
        """Of target weights, features and slots."""
        return DTYPE_BYTES[self.target_dtype]

    @property
    def feature_bytes(self) -> int:
        """Of one micro-batch: K x [R, S, H]."""
        return self.num_taps * self.rows * self.seq_len * self.target.hidden_size * self.element_bytes


def estimate_memory(load: Load) -> tuple[MemoryLine, ...]:
    """Every item on every device that the run uses."""
    devices = dict.fromkeys((*load.target_devices, *load.drafter_devices))
    return tuple(line for device in devices for line in _on_device(load, device) if line.num_bytes)


def memory_warnings(lines: tuple[MemoryLine, ...], machine: Machine) -> Iterator[str]:
    """One sentence per device whose estimate does not fit."""
    for device in dict.fromkeys(line.device for line in lines):
        needed = sum(line.num_bytes for line in lines if line.device == device)
        available = device_bytes(device, machine)
        if needed > _FULL * available:
            yield (
                f"{device} needs about {needed / 2**30:.1f} GiB and has {available / 2**30:.1f} GiB: "
                "lower train.micro_batch_rows, data.seq_len or drafter.num_anchors, or use more devices"
            )


def device_bytes(device: str, machine: Machine) -> int:
    """Memory of a device; for `cpu` this process's equal share of main memory."""
    if device == "cpu":
        return machine.total_memory_bytes // machine.world.local_size
    return machine.gpus[int(device.removeprefix("cuda:"))].memory_bytes


def _on_device(load: Load, device: str) -> Iterator[MemoryLine]:
    target, size = load.target, load.element_bytes
    num_targets, num_drafters = load.target_devices.count(device), load.drafter_devices.count(device)
    tokens = load.rows * load.seq_len
    tables = target.vocab_size * target.hidden_size * (1 if target.tie_word_embeddings else 2) * size
    width = 8 * target.hidden_size + 3 * (target.intermediate_size or target.expert_intermediate_size)
    if num_targets and not load.stored:
        yield MemoryLine(device, "target weights", target_parameters(target) * size)
        yield MemoryLine(device, "target activations", num_targets * tokens * width * size)
    if num_targets:
        yield MemoryLine(device, "features in flight", num_targets * _OUTPUT_SETS * load.feature_bytes)
    if num_drafters:
        if load.stored or not num_targets:
            yield MemoryLine(device, "embedding and head", tables)
        yield MemoryLine(
            device, "drafter weights, gradients, Adam", num_drafters * _BYTES_PER_PARAMETER * load.parameters
        )
        yield MemoryLine(device, "drafter activations and head", num_drafters * load.activation_bytes)
        yield MemoryLine(device, "slots", num_drafters * load.num_slots * load.feature_bytes)
    if device != "cpu":
        yield MemoryLine(device, "CUDA context and workspace", _CUDA_CONTEXT_BYTES)
