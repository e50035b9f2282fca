"""HX903: a suppression without a reason.

What it checks
    `# helixctl: ignore[HX010]` with nothing behind it.
Why it matters
    The next reader cannot tell whether the reason still holds.
Fix
    Write the reason behind the bracket: # helixctl: ignore[HX010] CPU only, no CUDA in this process.
"""

from __future__ import annotations

LEVEL = "warning"
