"""The machine as the checks of `--env` see it: files below a root, variables, and slow facts found out once.

Never imports torch; CUDA and torch are looked at in child processes (`environment_child.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from helixctl import cgroups
from helixctl.doctor.environment_nvml import NvmlFacts, NvmlProblem, read_nvml

_CHILD = Path(__file__).with_name("environment_child.py")
_TORCH_TIMEOUT_S = 120.0
"""A cold import from a network disk takes a minute."""
_CUDA_TIMEOUT_S = 180.0
"""Eight contexts, one after the other."""
UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Space:
    """Of a file system."""

    total_bytes: int
    free_bytes: int


def read_space(path: Path) -> Space:
    """Of the file system that holds `path`, or will hold it."""
    usage = shutil.disk_usage(existing_parent(path))
    return Space(usage.total, usage.free)


def existing_parent(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    path = path.absolute()
    return next((place for place in (path, *path.parents) if place.exists()), Path("/"))


@dataclass
class Host:
    """One machine. Everything that a test replaces is a field."""

    root: Path = Path("/")
    """Where /proc, /sys and /dev are."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    python: str = sys.executable
    space: Callable[[Path], Space] = read_space
    nvml: Any = None
    """Instead of the module `pynvml`."""
    torch_timeout_s: float = _TORCH_TIMEOUT_S
    cuda_timeout_s: float = _CUDA_TIMEOUT_S

    def read(self, path: str) -> str:
        """Text of a small system file without the white space around it; empty where there is none."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def limit(self, name: str) -> int | None:
        """A soft limit from /proc/self/limits, in its unit; None where it is not listed."""
        for line in self.read("proc/self/limits").splitlines():
            if line.startswith(name):
                word = line[len(name) :].split()[0]
                return UNLIMITED if word == "unlimited" else int(word)
        return None

    def status(self, name: str) -> str:
        """A field of /proc/self/status."""
        for line in self.read("proc/self/status").splitlines():
            if line.startswith(f"{name}:"):
                return line.split(":", 1)[1].strip()
        return ""

    @cached_property
    def num_cpus(self) -> int:
        """Cores in this process's affinity mask."""
        listed = self.status("Cpus_allowed_list")
        ranges = [part.split("-") for part in listed.split(",") if part]
        return sum(int(ends[-1]) - int(ends[0]) + 1 for ends in ranges) or os.cpu_count() or 1

    @cached_property
    def cpu_quota(self) -> float | None:
        """Cores' worth of time that control groups give, the smallest of all levels; None without a limit."""
        return cgroups.cpu_quota(self.root)

    @cached_property
    def torch(self) -> dict[str, Any]:
        """What `environment_child.look_at_torch` found, or `error`."""
        return self.look("torch", self.torch_timeout_s)

    @cached_property
    def cuda(self) -> dict[str, Any]:
        """What `environment_child.look_at_cuda` found, or `error`."""
        return self.look("cuda", self.cuda_timeout_s)

    @cached_property
    def gpus(self) -> NvmlFacts | NvmlProblem:
        """The driver's view."""
        return read_nvml(self.nvml)

    def look(self, what: str, timeout_s: float) -> dict[str, Any]:
        """Run `environment_child.py`; a crash or a hang is an `error` too."""
        command = [self.python, "-P", str(_CHILD), what]
        try:
            done = subprocess.run(
                command,
                env=dict(self.environ),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no answer within {timeout_s:g} s"}
        except OSError as error:
            return {"error": f"{self.python} cannot be started: {error.strerror}"}
        try:
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            return {"error": f"the process ended with {done.returncode}: {last}"}
        return found
