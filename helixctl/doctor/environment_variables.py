"""Checks of `--env`: environment variables that slow a pipeline down, change its numbers, or break it.

One row per variable. A row says when a value is bad; a variable that is not set is never judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from helixctl.doctor.environment_host import Host
from helixctl.doctor.environment_nvml import NvmlProblem
from helixctl.doctor.probe import State, Verdict, ok

IsBad = Callable[[str, Host], bool]
_TRUE = ("1", "true", "yes", "on", "y")


@dataclass(frozen=True)
class Variable:
    """A variable, when its value is bad, and what it then does."""

    name: str
    is_bad: IsBad
    effect: str
    remedy: str = ""
    """Where empty: unset it."""
    state: State = "warn"


def _on(value: str, _host: Host) -> bool:
    return value.lower() in _TRUE


def _off(value: str, _host: Host) -> bool:
    return value.lower() in ("0", "false", "no", "off", "n")


def _set(value: str, _host: Host) -> bool:
    return bool(value)


def _more_than_cores(value: str, host: Host) -> bool:
    first = value.split(",")[0]
    return not first.isdecimal() or int(first) == 0 or int(first) > host.num_cpus


def _has_gpus(host: Host) -> bool:
    return not isinstance(host.gpus, NvmlProblem) and bool(host.gpus.gpus)


def _hides_gpus(value: str, host: Host) -> bool:
    return value.strip() in ("", "-1", "NoDevFiles") and _has_gpus(host)


def _bad_allocator(value: str, _host: Host) -> bool:
    """`key:value` pairs; values in brackets hold commas of their own."""
    flat = re.sub(r"\[[^\]]*\]", "[]", value)
    return not all(re.fullmatch(r"\w+:[^:]+(:[^:]+)*", part.strip()) for part in flat.split(",") if part.strip())


def _splits_small(value: str, _host: Host) -> bool:
    found = re.search(r"max_split_size_mb:(\d+)", value)
    return bool(found) and int(found[1]) < 64 if found else False


def _is(*bad: str) -> IsBad:
    return lambda value, _host: value.lower() in bad


_SERIAL = "every kernel is waited for: nothing overlaps"
_VARIABLES = (
    Variable(
        "OMP_WAIT_POLICY", _is("active"), "waiting threads spin and take the cores of other stages", "set PASSIVE"
    ),
    Variable("GOMP_SPINCOUNT", _is("infinite", "infinity"), "waiting OpenMP threads spin for ever"),
    Variable("KMP_BLOCKTIME", _is("infinite"), "waiting OpenMP threads spin for ever"),
    Variable("OMP_NUM_THREADS", _more_than_cores, "is no number, or more than there are cores", "set it to the cores"),
    Variable("MKL_NUM_THREADS", _more_than_cores, "is no number, or more than there are cores", "set it to the cores"),
    Variable("OMP_PROC_BIND", _is("true", "close", "spread", "master", "primary"), "pins all stages to the same cores"),
    Variable("TOKENIZERS_PARALLELISM", _on, "tokenizer threads and worker processes fight for the cores", "set false"),
    Variable("CUDA_LAUNCH_BLOCKING", _on, _SERIAL),
    Variable("CUDA_DEVICE_MAX_CONNECTIONS", _is("1"), "streams share one queue: copies wait behind kernels"),
    Variable("CUDA_MODULE_LOADING", _is("eager"), "loads every kernel at the start: slow, and hundreds of MiB"),
    Variable("CUDA_VISIBLE_DEVICES", _hides_gpus, "hides all GPUs"),
    Variable("NVIDIA_TF32_OVERRIDE", _set, "changes the precision of float32 products, the proofs' too"),
    Variable("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _on, "float32 products lose 13 bits, the proofs' too"),
    Variable("PYTORCH_NO_CUDA_MEMORY_CACHING", _on, "every tensor asks the driver for memory, and waits for the GPU"),
    Variable("PYTORCH_CUDA_ALLOC_CONF", _bad_allocator, "torch cannot read it, and CUDA does not start", state="fail"),
    Variable("PYTORCH_ALLOC_CONF", _bad_allocator, "torch cannot read it, and CUDA does not start", state="fail"),
    Variable("PYTORCH_CUDA_ALLOC_CONF", _splits_small, "splits blocks so small that memory fragments", "64 or more"),
    Variable("PYTORCH_ALLOC_CONF", _splits_small, "splits blocks so small that memory fragments", "64 or more"),
    Variable("TORCH_CUDA_SANITIZER", _on, "checks every access: many times slower"),
    Variable("TORCH_SHOW_DISPATCH_TRACE", _on, "prints every operator"),
    Variable("TORCH_DISTRIBUTED_DEBUG", _is("detail"), "checks every collective twice"),
    Variable("TORCH_COMPILE_DEBUG", _on, "writes every graph to disk"),
    Variable("TORCH_LOGS", lambda value, _: "+" in value or "all" in value, "logs in the middle of the hot loop"),
    Variable("TORCHDYNAMO_DISABLE", _on, "turns torch.compile off"),
    Variable("TORCH_COMPILE_DISABLE", _on, "turns torch.compile off"),
    Variable("TORCHINDUCTOR_FORCE_DISABLE_CACHES", _on, "compiles everything anew at every start"),
    Variable("TORCHINDUCTOR_WORKER_START", _is("fork"), "compile workers fork after CUDA started: they may hang"),
    Variable("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", _on, "torch.load runs code from checkpoints", state="warn"),
    Variable("PYTORCH_JIT", _off, "turns TorchScript off"),
    Variable("NCCL_DEBUG", _is("info", "trace"), "NCCL writes to the output all the time", "set WARN"),
    Variable("NCCL_P2P_DISABLE", _on, "GPUs talk through host memory"),
    Variable("NCCL_SHM_DISABLE", _on, "processes of one host talk through the network"),
    Variable("NCCL_IB_DISABLE", _on, "hosts talk through TCP"),
    Variable("NCCL_BLOCKING_WAIT", _on, _SERIAL),
    Variable("TORCH_NCCL_BLOCKING_WAIT", _on, _SERIAL),
    Variable("NCCL_LAUNCH_MODE", _is("group"), "collectives wait for each other's launch"),
    Variable("PYTHONMALLOC", _is("debug", "malloc_debug", "pymalloc_debug"), "Python checks its own memory: slow"),
    Variable("PYTHONTRACEMALLOC", lambda value, _: value != "0", "Python records every allocation: slow"),
    Variable("PYTHONDEVMODE", _on, "Python's checks are on: slow"),
    Variable("MALLOC_CHECK_", lambda value, _: value != "0", "glibc checks its own memory: slow, under a lock"),
    Variable("MALLOC_PERTURB_", lambda value, _: value != "0", "glibc fills all memory that it gives and takes"),
    Variable("HELIXCTL_FORK_GUARD", _off, "a fork after CUDA's start goes unnoticed"),
)


def check_variables(host: Host) -> Iterator[Verdict]:
    """Every bad value; one `ok` where there is none."""
    found = False
    for variable in _VARIABLES:
        value = host.environ.get(variable.name)
        if value is not None and variable.is_bad(value, host):
            found = True
            remedy = f"{variable.name}: {variable.remedy}" if variable.remedy else f"unset {variable.name}"
            yield Verdict(variable.state, f"{variable.name}={value}: {variable.effect}", remedy)
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    values = [host.environ[name] for name in names if host.environ.get(name)]
    if len(set(values)) > 1:
        found = True
        yield Verdict("warn", f"{' and '.join(names)} differ; torch versions disagree about which holds", "unset one")
    if not found:
        yield ok(f"none of {len({v.name for v in _VARIABLES})} known troublemakers is set")
