"""Finds plug-ins by name: a plug-in is a module or folder inside a plug-in package, nothing is registered.

Listing never imports a plug-in, so the command line stays light.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from types import ModuleType

from helixctl.errors import UsageError

DRAFTERS = "helixctl.models.drafters"
FORMATS = "helixctl.data.formats"
SINKS = "helixctl.metrics.sinks"


def plugin_names(package: str) -> tuple[str, ...]:
    """Names of the plug-ins in ``package``, sorted; names that begin with ``_`` are helpers."""
    found = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return tuple(sorted(m.name for m in found if not m.name.startswith("_")))


def load_plugin(package: str, name: str, part: str = "") -> ModuleType:
    """Import plug-in ``name`` of ``package``, or its module ``part``.

    Raises:
        UsageError: no such plug-in; the message suggests the nearest name.
    """
    names = plugin_names(package)
    if name not in names:
        raise UsageError(
            f"there is no {name!r} among the {package.rsplit('.', 1)[1]}",
            fix=suggest(name, names),
        )
    return importlib.import_module(f"{package}.{name}" + (f".{part}" if part else ""))


def suggest(word: str, known: tuple[str, ...]) -> str:
    """A sentence that names the nearest known word, or all of them."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(known)}"
