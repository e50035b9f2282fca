"""Fork guard: refuses `os.fork` in a process that has initialised CUDA.

CUDA does not survive a fork. The child fails at its first CUDA call, or hangs for ever on a lock that a thread of the
parent held; either shows far from the line that forked. An audit hook sees `os.fork` and `os.forkpty` of every library
before they happen. Spawn, forkserver and subprocess do not pass through them and are left alone.

Standard library only, and no other module of this package: `shim/sitecustomize.py` loads this file by its path into
programs whose environment need not have helixctl (`helixctl doctor --run -- CMD`). Audit hooks cannot be removed.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

VARIABLE = "HELIXCTL_FORK_GUARD"
"""1: on; 0: off, also where it is on by default."""
_EVENTS = ("os.fork", "os.forkpty")
_MAX_FRAMES = 24
_SHIM = Path(__file__).with_name("shim")


class ForkRefused(RuntimeError):
    """A fork after CUDA was initialised. The message holds the stack, whoever catches it."""


def install_guard(*, default: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Arm this process, unless HELIXCTL_FORK_GUARD says otherwise; returns whether it is armed.

    Args:
        default: What holds where the variable is unset or neither 0 nor 1.
        environ: The environment.
    """
    wanted = {"0": False, "1": True}.get(environ.get(VARIABLE, ""), default)
    if wanted and not _is_armed():
        sys.addaudithook(_make_hook(cuda_evidence))
    return wanted


def guarded_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with the guard on in every Python that is started in it, except with -I, -E or -S."""
    path = os.pathsep.join([str(_SHIM), *filter(None, [environ.get("PYTHONPATH")])])
    return {**environ, VARIABLE: "1", "PYTHONPATH": path}


def cuda_evidence(proc: Path = Path("/proc/self")) -> str | None:
    """Why this process counts as having initialised CUDA; None where nothing says so. Imports nothing.

    torch's own flag misses pinned memory, `is_available()` and other libraries, hence the driver's open files. NVML
    opens /dev/nvidiactl and the GPUs too, and is harmless; the unified-memory device is CUDA's alone.
    """
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return "torch.cuda is initialised"
    opened = _open_devices(proc / "fd")
    if any(name.startswith("/dev/nvidia-uvm") for name in opened):
        return "the CUDA driver has /dev/nvidia-uvm open"
    if any(name.removeprefix("/dev/nvidia").isdecimal() for name in opened):
        libraries = _read(proc / "maps")
        if "libcuda.so" in libraries and "libnvidia-ml.so" not in libraries:
            return "the CUDA driver is loaded and has a GPU open"
    return None


def chain_sitecustomize(shim: Path, paths: list[str], modules: MutableMapping[str, Any]) -> None:
    """Run the `sitecustomize` that the shim stands in front of, if there is one."""
    import importlib.machinery
    import importlib.util

    others = [path for path in paths if not path or Path(path).resolve() != shim.resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _make_hook(evidence: Callable[[], str | None]) -> Callable[[str, tuple[Any, ...]], None]:
    def refuse_fork(event: str, _arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and (reason := evidence()) is not None:
            raise ForkRefused(_message(event, reason))

    return refuse_fork


def _is_armed() -> bool:
    """Whether this process has the hook already; marks it as having one. The shim has a copy of this module."""
    armed = getattr(sys, "_helixctl_fork_guard", False)
    sys._helixctl_fork_guard = True  # type: ignore[attr-defined]  # the one place that both copies share
    return armed


def _message(event: str, reason: str) -> str:
    frames = traceback.extract_stack()[:-2][-_MAX_FRAMES:]  # without the guard's own frames
    stack = "".join(traceback.format_list(frames))
    return (
        f"{event} refused: {reason}, and CUDA does not survive a fork\n"
        f"  fix: start processes with spawn or forkserver (DataLoader: multiprocessing_context='spawn'), or before\n"
        f"       anything touches CUDA; {VARIABLE}=0 turns this check off\n"
        f"Stack of the fork, innermost last:\n{stack}"
    )


def _open_devices(folder: Path) -> list[str]:
    """Files under /dev/nvidia* that this process has open."""
    found = []
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    for name in names:
        try:
            target = os.readlink(folder / name)
        except OSError:  # the descriptor of the listing itself, or one closed since
            continue
        if target.startswith("/dev/nvidia"):
            found.append(target)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
