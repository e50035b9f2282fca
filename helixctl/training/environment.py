"""What a run ran on, for its report: written once at its start. Names no user, host or place."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

from helixctl.machine import read_machine
from helixctl.version import __version__

FILE = "environment.json"
_PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "numpy")


def describe_environment() -> dict[str, Any]:
    """Versions and hardware."""
    machine = read_machine()
    return {
        "helixctl": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        **{name: _version(name) for name in _PACKAGES},
        "cpus": machine.num_cpus,
        "memory_bytes": machine.total_memory_bytes,
        "gpus": [gpu.name for gpu in machine.gpus],
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
