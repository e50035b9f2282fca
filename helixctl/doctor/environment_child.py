"""A look at torch and at CUDA in a process of its own; run as a script, prints one JSON object.

CUDA must not be initialised in the command's own process, and a broken driver may hang or crash. Nothing here is
imported by the rest: `environment_host.py` runs it and reads what it prints.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def look_at_torch() -> dict[str, Any]:
    """Version and build, without a look at the driver."""
    import torch

    return {"version": str(torch.__version__), "cuda": torch.version.cuda, "hip": torch.version.hip}


def look_at_cuda() -> dict[str, Any]:
    """A small product on every GPU, which shows what a version number does not."""
    import torch

    if not torch.cuda.is_available():
        return {"available": False, "devices": [], "archs": torch.cuda.get_arch_list()}
    devices = []
    for i in range(torch.cuda.device_count()):
        entry: dict[str, Any] = {"name": torch.cuda.get_device_name(i)}
        try:
            entry["capability"] = list(torch.cuda.get_device_capability(i))
            ones = torch.ones(64, 64, device=f"cuda:{i}")
            entry["right"] = bool(((ones @ ones) == 64).all().item())
        except RuntimeError as error:
            entry["error"] = str(error).splitlines()[0]
        devices.append(entry)
    return {"available": True, "devices": devices, "archs": torch.cuda.get_arch_list()}


def main() -> None:
    """Print what was asked for, or why it could not be found out."""
    look = {"torch": look_at_torch, "cuda": look_at_cuda}[sys.argv[1]]
    try:
        found = look()
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0], "missing": _is_missing(error)}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


def _is_missing(error: Exception) -> bool:
    """No torch at all, rather than one that does not load."""
    return isinstance(error, ModuleNotFoundError) and error.name == "torch"


if __name__ == "__main__":
    main()
