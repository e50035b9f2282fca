"""Arms the fork guard in every Python that finds this folder in PYTHONPATH; see `doctor/guard.py`.

Loads the guard by its path, because the program's environment need not have helixctl. Then runs the `sitecustomize`
that would have run without this one.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_here = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("_helixctl_fork_guard", _here.parent / "guard.py")
assert _spec is not None and _spec.loader is not None
_guard = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_guard)
_guard.install_guard(default=False)
_guard.chain_sitecustomize(_here, sys.path, sys.modules)
