"""Checks of `--env`: the state of every GPU. Nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from helixctl.doctor.environment_host import Host
from helixctl.doctor.environment_nvml import GpuState, NvmlProblem
from helixctl.doctor.probe import Verdict, fail, ok, skip, warn

_SLOWED = {
    0x8: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power brake of the machine",
}
_CAPPED = {0x4: "the power cap", 0x2: "clocks set by the user", 0x10: "sync boost"}
_BUSY_SHARE = 0.05
_EXCLUSIVE, _PROHIBITED = (1, 3), 2
_SLOW_FIX = "look at cooling and power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE"


def check_memory(host: Host) -> Iterator[Verdict]:
    """Memory that others hold is missing in every estimate."""
    for gpu in _gpus(host):
        if gpu.total_bytes is None or gpu.used_bytes is None:
            continue
        used = f"{gpu.used_bytes / 2**30:.1f} of {gpu.total_bytes / 2**30:.1f} GiB"
        if gpu.used_bytes > _BUSY_SHARE * gpu.total_bytes:
            yield warn(f"{_name(gpu)}: {used} are in use", "see who holds it: nvidia-smi --query-compute-apps=pid,name")
        else:
            yield ok(f"{_name(gpu)}: {used} in use")


def check_modes(host: Host) -> Iterator[Verdict]:
    """MIG and compute mode decide who may use a GPU at all."""
    for gpu in _gpus(host):
        if gpu.compute_mode == _PROHIBITED:
            yield fail(f"{_name(gpu)}: computing is prohibited", f"nvidia-smi -i {gpu.index} -c DEFAULT")
        elif gpu.compute_mode in _EXCLUSIVE:
            text = f"{_name(gpu)}: exclusive, one process only; loaders and profilers that touch CUDA fail"
            yield warn(text, f"nvidia-smi -i {gpu.index} -c DEFAULT")
        if gpu.is_mig:
            text = f"{_name(gpu)}: MIG is on; a process sees one slice, and no utilisation"
            yield warn(text, "name the slice in CUDA_VISIBLE_DEVICES (nvidia-smi -L), or turn MIG off")


def check_clocks(host: Host) -> Iterator[Verdict]:
    """Reasons why a GPU runs below its clocks now; that it idles is none."""
    for gpu in _gpus(host):
        if gpu.slowed is None:
            continue
        slowed = [text for bit, text in _SLOWED.items() if gpu.slowed & bit]
        capped = [text for bit, text in _CAPPED.items() if gpu.slowed & bit]
        if slowed:
            yield warn(f"{_name(gpu)}: slowed down by {', '.join(slowed)}", _SLOW_FIX)
        else:
            held = f"; held by {', '.join(capped)}" if capped else ""
            yield ok(f"{_name(gpu)}: not slowed down{held}")


def check_lanes(host: Host) -> Iterator[Verdict]:
    """Half the lanes is half the bandwidth between host and GPU. The generation drops at idle, so it is not judged."""
    for gpu in _gpus(host):
        if gpu.lanes is None or gpu.max_lanes is None:
            continue
        text = f"{_name(gpu)}: PCIe x{gpu.lanes} of x{gpu.max_lanes}"
        if gpu.lanes < gpu.max_lanes:
            yield warn(text, "look again under load; if it stays, reseat the card or use another slot")
        else:
            yield ok(text)


def check_persistence(host: Host) -> Iterator[Verdict]:
    """Without it every first process of a while starts the driver anew, for seconds."""
    off = [str(gpu.index) for gpu in _gpus(host) if gpu.is_persistent is False]
    if off:
        yield warn(f"persistence mode is off on GPU {', '.join(off)}", "nvidia-smi -pm 1, or run nvidia-persistenced")


def check_health(host: Host) -> Iterator[Verdict]:
    """Memory errors that the GPU counted."""
    for gpu in _gpus(host):
        if gpu.remap_failed:
            yield fail(f"{_name(gpu)}: a row of its memory could not be replaced", "have the card replaced")
        elif gpu.remap_pending:
            yield warn(f"{_name(gpu)}: rows of its memory wait to be replaced", "stop all work on it and reset the GPU")
        if gpu.uncorrected_errors:
            text = f"{_name(gpu)}: {gpu.uncorrected_errors} uncorrected memory errors since the last boot"
            yield fail(text, "reset the GPU; have it replaced if they come back")


def check_peers(host: Host) -> Verdict:
    """Features cross GPUs directly where they can read each other's memory."""
    found = host.gpus
    if isinstance(found, NvmlProblem) or len(found.gpus) < 2:
        return skip("there are no two GPUs")
    if not found.strangers:
        return ok("all GPUs can read each other's memory")
    pairs = ", ".join(f"{one}-{other}" for one, other in found.strangers[:6])
    text = f"{len(found.strangers)} pairs of GPUs cannot read each other's memory: {pairs}"
    return warn(text, "features go through pinned host memory there; look at `nvidia-smi topo -p2p r` and at IOMMU/ACS")


def check_same_kind(host: Host) -> Iterator[Verdict]:
    """CUDA counts the fastest first, NVML by slot: with different GPUs `cuda:0` may be another one than in the plan."""
    names = {gpu.name for gpu in _gpus(host)}
    if len(names) > 1 and host.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield warn(f"different GPUs: {', '.join(sorted(names))}", "set CUDA_DEVICE_ORDER=PCI_BUS_ID")


def on_gpus(check: Callable[[Host], Iterator[Verdict]]) -> Callable[[Host], Iterator[Verdict]]:
    """The check with one `skip` where there is no GPU, and one `ok` where it has nothing to say."""

    def run(host: Host) -> Iterator[Verdict]:
        if not _gpus(host):
            yield skip("there is no NVIDIA GPU")
            return
        found = list(check(host))
        yield from found or [ok("nothing unusual")]

    return run


def _gpus(host: Host) -> tuple[GpuState, ...]:
    found = host.gpus
    return () if isinstance(found, NvmlProblem) else found.gpus


def _name(gpu: GpuState) -> str:
    return f"GPU {gpu.index} {gpu.name}"
