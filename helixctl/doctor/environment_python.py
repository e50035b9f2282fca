"""Checks of `--env`: Python, torch, the driver, and whether a profiler may look into a process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from helixctl.doctor.environment_host import Host
from helixctl.doctor.environment_nvml import NvmlProblem
from helixctl.doctor.probe import Verdict, fail, ok, skip, warn

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)
"""Of helixctl, and of py-spy 0.4."""
_CAP_SYS_PTRACE = 1 << 19
_DUMP_TIMEOUT_S = 20.0
_WATCHED = "helixctl_doctor_watched"
_CHILD = f"""
import ctypes, sys
if "open" in sys.argv:
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
def {_WATCHED}():
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    sys.stdin.read()
{_WATCHED}()
"""
"""Waits until its input is closed; with `open` it first lets any process of this user look at it (PR_SET_PTRACER)."""
_NVML_REMEDIES = {
    4: "give this user access to /dev/nvidia*",
    9: "load the driver: modprobe nvidia",
    15: "a GPU fell off the bus: look at `dmesg`, then reboot",
    18: "the driver was updated under a running kernel: reboot, or reload the nvidia modules",
    999: "look at `dmesg` and reboot",
}
_NO_DRIVER = 12


def check_python(host: Host) -> Verdict:
    """The version, and that the GIL is on, which py-spy and torch count on."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < OLDEST_PYTHON:
        return fail(f"Python {version}", f"use Python {'.'.join(map(str, OLDEST_PYTHON))} or newer")
    if sys.version_info[:2] > NEWEST_PYTHON:
        return warn(f"Python {version} is newer than any that py-spy 0.4 reads", "use Python 3.14 or older to profile")
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return warn(f"Python {version} runs without the GIL; py-spy cannot read it", "use the ordinary build")
    return ok(f"Python {version}")


def check_torch(host: Host) -> Verdict:
    """That it loads, in a child process."""
    found = host.torch
    if found.get("missing"):
        return skip("torch is not installed", "pip install torch")
    if "error" in found:
        return fail(f"torch does not load: {found['error']}", "install torch again, for this Python and this driver")
    build = f"CUDA {found['cuda']}" if found["cuda"] else f"ROCm {found['hip']}" if found["hip"] else "CPU only"
    return ok(f"torch {found['version']}, {build}")


def check_nvml(host: Host) -> Verdict:
    """That the driver answers."""
    found = host.gpus
    if isinstance(found, NvmlProblem):
        if found.code is None:
            return skip(found.text, "pip install nvidia-ml-py")
        if found.code == _NO_DRIVER:
            return skip("there is no NVIDIA driver on this machine")
        return fail(f"NVML: {found.text}", _NVML_REMEDIES.get(found.code, "reinstall the NVIDIA driver"))
    count = len(found.gpus)
    cuda = f"{found.cuda[0]}.{found.cuda[1]}"
    return ok(f"driver {found.driver}, CUDA up to {cuda}, {count} GPU{'s' * (count != 1)}")


def check_pynvml_package(host: Host) -> Verdict:
    """The old package of that name only warns and gets in the way."""
    try:
        version = metadata.version("pynvml")
    except metadata.PackageNotFoundError:
        return ok("the module pynvml comes from nvidia-ml-py, or is absent")
    return warn(f"the deprecated package pynvml {version} is installed", "pip uninstall pynvml")


def check_cuda(host: Host) -> Iterator[Verdict]:
    """A small product on every GPU, in a child process."""
    if "error" in host.torch:
        yield skip("torch does not load")
        return
    gpus = host.gpus
    if isinstance(gpus, NvmlProblem) and gpus.code == _NO_DRIVER:
        yield skip("there is no NVIDIA driver on this machine")
        return
    if not host.torch["cuda"]:
        yield _no_cuda_build(host)
        return
    if not isinstance(gpus, NvmlProblem):
        yield from _check_driver_age(host.torch["cuda"], gpus.cuda)
    found = host.cuda
    if "error" in found:
        yield fail(f"CUDA: {found['error']}", "look at `nvidia-smi` and `dmesg`; then install torch for this driver")
    elif not found["available"]:
        fix = "look at CUDA_VISIBLE_DEVICES; in a container start it with --gpus all"
        yield fail(f"torch {host.torch['version']} sees no GPU", fix)
    for index, device in enumerate(found.get("devices", ())):
        yield _judge_device(index, device)


def check_pyspy(host: Host) -> Verdict:
    """A real dump of a process of ours; files and capabilities tell less."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(host.python).parent))
    if program is None:
        return skip("py-spy is not installed; `--env` cannot tell whether profiling works", "pip install py-spy")
    problem = _dump_problem(program, host, declared=False)
    if problem is None:
        return ok("py-spy reads a process of ours")
    if _dump_problem(program, host, declared=True) is None:
        fix = "run `sysctl kernel.yama.ptrace_scope=0`, or profile as root; runs that helixctl starts are not affected"
        return warn("py-spy reads only processes that allow it", fix)
    return warn(f"py-spy cannot read a process of ours: {problem}", _PTRACE_FIX)


def check_ptrace(host: Host) -> Verdict:
    """Yama's scope and the capability; what they mean in the end is for py-spy's own test to say."""
    capable = bool(int(host.status("CapEff") or "0", 16) & _CAP_SYS_PTRACE)
    scope = host.read("proc/sys/kernel/yama/ptrace_scope") or "0"
    filtered = ", behind a seccomp filter" if host.status("Seccomp") == "2" else ""
    rights = f"ptrace scope {scope}, {'with' if capable else 'without'} CAP_SYS_PTRACE{filtered}"
    if scope == "3":
        return warn(f"{rights}: no process may look into another", "set kernel.yama.ptrace_scope below 3 and reboot")
    if scope == "0" or capable:
        return ok(rights)
    return warn(f"{rights}: only a parent may look into its children", _PTRACE_FIX)


def check_schedstat(host: Host) -> Verdict:
    """Times on and waiting for a core, from which the profiler tells starved threads."""
    words = host.read("proc/self/schedstat").split()
    if len(words) != 3:
        return warn("/proc/self/schedstat is missing: no run-queue times", "use a kernel with CONFIG_SCHED_INFO")
    if not int(words[0]):
        return warn("/proc/self/schedstat stands still: no run-queue times", "profile outside of this sandbox")
    return ok("the kernel tells how long threads wait for a core")


_PTRACE_FIX = "docker run --cap-add SYS_PTRACE; elsewhere: sysctl kernel.yama.ptrace_scope=0, or profile as root"


def _no_cuda_build(host: Host) -> Verdict:
    gpus = host.gpus
    if isinstance(gpus, NvmlProblem) or not gpus.gpus or host.torch["hip"]:
        return skip(f"torch {host.torch['version']} was built without CUDA")
    text = f"torch {host.torch['version']} was built without CUDA, and there are {len(gpus.gpus)} GPUs"
    return fail(text, "install the CUDA build of torch")


def _check_driver_age(build: str, driver: tuple[int, int]) -> Iterator[Verdict]:
    """A driver runs any minor version of its own major one."""
    if int(build.split(".")[0]) > driver[0]:
        text = f"torch was built for CUDA {build}, the driver knows {driver[0]}.{driver[1]}"
        yield fail(text, "update the driver, or install torch for an older CUDA")


def _judge_device(index: int, device: dict[str, Any]) -> Verdict:
    name = f"cuda:{index} {device['name']}"
    if "error" in device:
        return fail(f"{name}: {device['error']}", "install torch for this GPU; if it once worked, look at `dmesg`")
    if not device["right"]:
        return fail(f"{name} computes wrong products", "take this GPU out of use")
    return ok(f"{name} computes, capability {'.'.join(map(str, device['capability']))}")


def _dump_problem(program: str, host: Host, *, declared: bool) -> str | None:
    """Why py-spy cannot dump a child of ours; None where it can."""
    command = [host.python, "-I", "-c", _CHILD, *(["open"] if declared else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdout.readline()
            done = subprocess.run(
                [program, "dump", "--json", "--pid", str(child.pid)],
                capture_output=True,
                text=True,
                timeout=_DUMP_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {_DUMP_TIMEOUT_S:g} s"
        finally:
            # py-spy leaves its target stopped where it is killed itself; a stopped child would never end.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGCONT)
            child.stdin.close()
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    frames = [frame["name"] for thread in json.loads(done.stdout) for frame in thread["frames"]]
    return None if any(_WATCHED in name for name in frames) else "the dump does not show the child's function"
