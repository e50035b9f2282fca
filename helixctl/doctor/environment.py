"""The checks of `helixctl doctor --env`, in the order in which they run: quick ones first.

A new check is a function of a `Host` in one of the `environment_*.py` files, and a row here.
"""

from __future__ import annotations

from helixctl.doctor import environment_gpu as gpu
from helixctl.doctor import environment_limits as limits
from helixctl.doctor import environment_python as python
from helixctl.doctor.environment_host import Host
from helixctl.doctor.environment_variables import check_variables
from helixctl.doctor.probe import Probe

ENVIRONMENT: tuple[Probe[Host], ...] = (
    Probe("ENV001", "Python", python.check_python),
    Probe("ENV003", "NVIDIA driver", python.check_nvml),
    Probe("ENV004", "package pynvml", python.check_pynvml_package),
    Probe("ENV011", "ptrace rights", python.check_ptrace),
    Probe("ENV012", "scheduler statistics", python.check_schedstat),
    Probe("ENV020", "open files", limits.check_open_files),
    Probe("ENV021", "shared memory", limits.check_shared_memory),
    Probe("ENV022", "CPU budget", limits.check_cpu_budget),
    Probe("ENV023", "processes and threads", limits.check_threads),
    Probe("ENV024", "locked memory", limits.check_locked_memory),
    Probe("ENV030", "compile cache", limits.check_compile_cache),
    Probe("ENV031", "environment variables", check_variables),
    Probe("ENV032", "C compiler", limits.check_compiler),
    Probe("ENV033", "disk space", limits.check_disk),
    Probe("ENV040", "GPU memory", gpu.on_gpus(gpu.check_memory)),
    Probe("ENV041", "GPU modes", gpu.on_gpus(gpu.check_modes)),
    Probe("ENV042", "GPU clocks", gpu.on_gpus(gpu.check_clocks)),
    Probe("ENV043", "PCIe lanes", gpu.on_gpus(gpu.check_lanes)),
    Probe("ENV044", "GPU persistence", gpu.on_gpus(gpu.check_persistence)),
    Probe("ENV045", "GPU health", gpu.on_gpus(gpu.check_health)),
    Probe("ENV046", "GPU peers", gpu.check_peers),
    Probe("ENV047", "GPU order", gpu.on_gpus(gpu.check_same_kind)),
    Probe("ENV010", "py-spy", python.check_pyspy),
    Probe("ENV002", "torch", python.check_torch),
    Probe("ENV005", "CUDA", python.check_cuda),
)
