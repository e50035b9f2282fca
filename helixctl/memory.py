"""How much memory a run will need, device by device, and what to do where it is too much: arithmetic on sizes.

Every item is counted from the code that allocates it; docs/plan.md says how, and how near the counts came to
measurements. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from helixctl.devices import DtypeName
from helixctl.errors import Problem
from helixctl.machine import Machine
from helixctl.models.drafters._memory import StepBytes
from helixctl.models.facts import DTYPE_BYTES, TargetFacts, table_parameters
from helixctl.models.float8_format import Float8, weight_bytes
from helixctl.recipe.schema import ValidationOptions

CUDA_LINE = "CUDA context and workspace"
"""The line that torch's own count of allocated bytes does not hold."""
_CUDA_CONTEXT_BYTES = 1 << 30
"""Driver context, libraries' workspaces and the allocator's slack."""
PROCESS_LINE = "the process itself"
"""Python and its libraries: ``Machine.process_bytes``."""
_CPU_CHUNK_ROWS = 512
"""Slots whose logits validation computes at once on a CPU."""
_LIVE_PROMPTS, _LIVE_TOKENS = 8, 48
"""Most prompts, and tokens of an answer, of live decoding during training."""
_TIGHT = 0.95
_TOO_MUCH = 1.1
"""A run is refused when it needs this share of a device: estimates were up to a tenth off."""
_OUTPUT_SETS = 2
"""A target computes one micro-batch while the last one is copied out."""
_MASTER_BYTES = 8
"""float32 weights and their gradients, per parameter."""
_MOMENT_BYTES = 8
"""Two float32 moments of Adam, per parameter."""


@dataclass(frozen=True)
class MemoryLine:
    """One item on one device."""

    device: str
    name: str
    num_bytes: int
    setting: str = ""
    """Key of the recipe that shrinks it most."""
    fix: str = ""
    """What to do with that key."""


@dataclass(frozen=True)
class Load:
    """What will be put on the devices. R rows, S tokens per row, K taps."""

    target: TargetFacts
    target_spans: tuple[tuple[str, ...], ...]
    """Devices of each target loop, in the order of its layers; features come out on the last."""
    drafter_devices: tuple[str, ...]
    target_dtype: DtypeName
    rows: int
    pass_rows: int
    """Of a drafter's forward and backward."""
    seq_len: int
    num_taps: int
    num_slots: int
    last_hidden: bool
    """The last hidden state is captured beside the taps."""
    parameters: int
    """Of one drafter, trained."""
    frozen_parameters: int
    """Of one drafter, not trained."""
    step: Mapping[str, StepBytes]
    """Of one drafter's micro-batch, by device."""
    stored: bool = False
    """Features are read from disk: no target is loaded."""
    validation: ValidationOptions | None = None
    """What is validated and decoded between steps."""
    cache_limit_bytes: int = 0
    """Of one target loop's cache of features."""
    seen_tokens: int | None = None
    """Of the documents that one target loop sees, each once; None where that is unknown."""
    process_bytes: int = 0
    """Main memory of a process before anything of the run is there."""
    num_processes: int = 1
    """Processes that add up gradients."""
    float8: Float8 | None = None
    """How the products of the target's layers are done; None: in its dtype."""

    @property
    def target_devices(self) -> tuple[str, ...]:
        """Where the features of each target loop come out."""
        return tuple(span[-1] for span in self.target_spans)

    def weights_share(self, device: str) -> float:
        """Of the target's weights on ``device``: loops with the same devices share theirs."""
        return sum(span.count(device) / len(span) for span in set(self.target_spans))

    @property
    def element_bytes(self) -> int:
        """Of target weights that are not float8, features and slots."""
        return DTYPE_BYTES[self.target_dtype]

    @property
    def saved_bytes(self) -> int:
        """Of one checkpoint: float32 weights and, of those trained, two moments."""
        return (4 + _MOMENT_BYTES) * self.parameters + 4 * self.frozen_parameters

    @property
    def token_bytes(self) -> int:
        """Features of one token: K x [H], and the last hidden state where it is captured."""
        return (self.num_taps + self.last_hidden) * self.target.hidden_size * self.element_bytes

    @property
    def feature_bytes(self) -> int:
        """Of one micro-batch, R x S tokens."""
        return self.rows * self.seq_len * self.token_bytes

    @property
    def cache_bytes(self) -> int:
        """What one target loop keeps of the documents that it has seen."""
        known = self.cache_limit_bytes if self.seen_tokens is None else self.seen_tokens * self.token_bytes
        return min(self.cache_limit_bytes, known)


def estimate_memory(load: Load) -> tuple[MemoryLine, ...]:
    """Every item on every device that the run uses."""
    devices = dict.fromkeys([*(device for span in load.target_spans for device in span), *load.drafter_devices])
    return tuple(line for device in devices for line in _on_device(load, device) if line.num_bytes)


def memory_warnings(lines: tuple[MemoryLine, ...], machine: Machine) -> Iterator[str]:
    """One sentence per device that the run fills nearly, or may more than fill."""
    for device, needed, available in _needs(lines, machine):
        if _TIGHT * available < needed <= _TOO_MUCH * available:
            largest = _largest(lines, device)
            yield (
                f"{device} needs about {_gib(needed)} and has {_gib(available)}: {largest.fix or 'use more devices'}; "
                f"the largest part is {largest.name}, {_gib(largest.num_bytes)}"
            )


def memory_problems(lines: tuple[MemoryLine, ...], machine: Machine) -> Iterator[Problem]:
    """Devices that cannot hold the run, each with its largest item and the setting that shrinks it."""
    for device, needed, available in _needs(lines, machine):
        if needed > _TOO_MUCH * available:
            largest = _largest(lines, device)
            message = (
                f"{device} needs about {_gib(needed)} and has {_gib(available)}; the largest part is {largest.name}, "
                f"{_gib(largest.num_bytes)}"
            )
            yield Problem(largest.setting, message, fix=largest.fix)


def device_bytes(device: str, machine: Machine) -> int:
    """Memory of a device; for `cpu` this process's equal share of main memory."""
    if device == "cpu":
        return machine.total_memory_bytes // machine.world.local_size
    return machine.gpus[int(device.removeprefix("cuda:"))].memory_bytes


def predicted_peaks(lines: Iterable[MemoryLine]) -> dict[str, int]:
    """Bytes by device as a run measures them: those of torch's allocator on a GPU, of the process on a CPU."""
    peaks: dict[str, int] = {}
    for line in lines:
        if line.name != CUDA_LINE:
            peaks[line.device] = peaks.get(line.device, 0) + line.num_bytes
    return peaks


def process_share(lines: Iterable[MemoryLine]) -> int:
    """Bytes of the prediction that are there before anything of the run is; 0 where no CPU trains."""
    return sum(line.num_bytes for line in lines if line.name == PROCESS_LINE)


def _needs(lines: tuple[MemoryLine, ...], machine: Machine) -> Iterator[tuple[str, int, int]]:
    for device in dict.fromkeys(line.device for line in lines):
        needed = sum(line.num_bytes for line in lines if line.device == device)
        yield device, needed, device_bytes(device, machine)


def _largest(lines: tuple[MemoryLine, ...], device: str) -> MemoryLine:
    """The item to shrink: the largest that a setting reaches."""
    own = [line for line in lines if line.device == device]
    return max([line for line in own if line.setting] or own, key=lambda line: line.num_bytes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _on_device(load: Load, device: str) -> Iterator[MemoryLine]:
    if any(device in span for span in load.target_spans):
        yield from _target_lines(load, device)
    if device in load.drafter_devices:
        yield from _drafter_lines(load, device)
    if device == "cpu":
        yield MemoryLine(device, "validation and live decoding", _between_steps(load))
        yield MemoryLine(device, PROCESS_LINE, load.process_bytes)
    else:
        yield MemoryLine(device, CUDA_LINE, _CUDA_CONTEXT_BYTES)


def _between_steps(load: Load) -> int:
    """On a CPU, whose allocator finds no room for it in what training has left; a GPU's does."""
    options, target, size = load.validation, load.target, load.element_bytes
    if options is None or not options.every_steps:
        return 0
    num_bytes = _CPU_CHUNK_ROWS * target.vocab_size * size
    if options.live_prompts and not (load.stored or target.recurrent):
        tokens = min(options.live_prompts, _LIVE_PROMPTS) * (load.seq_len // 4 + _LIVE_TOKENS)
        num_bytes += tokens * target.num_layers * 2 * target.num_kv_heads * target.head_dim * size
        num_bytes += (load.parameters + load.frozen_parameters) * size  # a snapshot of the drafter
    return num_bytes


def _target_lines(load: Load, device: str) -> Iterator[MemoryLine]:
    target, size, count = load.target, load.element_bytes, load.target_devices.count(device)
    passes = sum(device in span for span in load.target_spans)
    rows = ("train.micro_batch_rows", f"lower train.micro_batch_rows ({load.rows}) or data.seq_len ({load.seq_len})")
    if not load.stored:
        apart = "pipeline.targets", "use a smaller target, target.dtype: bfloat16, or a device that it has to itself"
        whole = table_parameters(target) * size + weight_bytes(target, size, load.float8)
        num_bytes = round(load.weights_share(device) * whole)
        yield MemoryLine(device, "target weights", num_bytes, *apart)
        width = 8 * target.hidden_size + 3 * (target.intermediate_size or target.expert_intermediate_size)
        yield MemoryLine(device, "target activations", passes * load.rows * load.seq_len * width * size, *rows)
    yield MemoryLine(device, "features in flight", count * _OUTPUT_SETS * load.feature_bytes, *rows)
    cache = "target.feature_cache_mib", "lower target.feature_cache_mib"
    yield MemoryLine(device, "feature cache", count * load.cache_bytes, *cache)


def _drafter_lines(load: Load, device: str) -> Iterator[MemoryLine]:
    target, count, step = load.target, load.drafter_devices.count(device), load.step[device]
    if load.stored or device not in load.target_devices:
        yield MemoryLine(device, "embedding and head", table_parameters(target) * load.element_bytes)
    layers = "drafter.num_layers", "lower drafter.num_layers or drafter.intermediate_size"
    masters = _MASTER_BYTES * load.parameters + _MASTER_BYTES // 2 * load.frozen_parameters  # these have no gradient
    yield MemoryLine(device, "drafter masters and gradients", count * masters, *layers)
    yield MemoryLine(device, "optimizer state", count * _MOMENT_BYTES * load.parameters, *layers)
    yield MemoryLine(device, "low-precision weights", count * step.copies, *layers)
    if load.num_processes > 1:
        yield MemoryLine(device, "gradients of all processes", _MASTER_BYTES // 2 * load.parameters, *layers)
    shape = (
        "train.micro_batch_rows",
        f"lower train.micro_batch_rows ({load.rows}), drafter.num_anchors or drafter.block_size, and raise "
        "train.grad_accum_steps by as much",
    )
    if load.pass_rows > 1:
        shape = "train.pass_rows", f"lower train.pass_rows ({load.pass_rows}); steps stay the same"
    yield MemoryLine(device, "drafter activations", count * step.kept, *shape)
    yield MemoryLine(device, "logits or gradients in flight", count * step.passing, *shape)
    slots = "pipeline.slots", f"lower pipeline.slots ({load.num_slots}) or train.micro_batch_rows ({load.rows})"
    yield MemoryLine(device, "slots", count * load.num_slots * load.feature_bytes, *slots)
