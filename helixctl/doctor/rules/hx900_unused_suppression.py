"""HX900: a suppression that suppresses nothing.

What it checks
    `# helixctl: ignore[...]` for rules that find nothing on that line.
Why it matters
    It hides the next mistake on the line, and tells readers of a problem that is gone.
Fix
    Remove it. `--fix` does.
"""

from __future__ import annotations

LEVEL = "warning"
