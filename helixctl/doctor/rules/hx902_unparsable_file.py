"""HX902: a file that cannot be read.

What it checks
    Files that are no Python of this interpreter's version, notebooks that are no notebooks.
Why it matters
    No rule has looked at them, so "no findings" means nothing.
Fix
    Mend the file, or exclude it in [tool.helixctl.doctor].
"""

from __future__ import annotations

LEVEL = "error"
