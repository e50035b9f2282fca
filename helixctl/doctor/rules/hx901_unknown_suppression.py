"""HX901: a suppression of no known rule.

What it checks
    `# helixctl: ignore` without rules, or with a code or name that no rule has.
Why it matters
    It suppresses nothing, whatever its author meant.
Fix
    Name the rules: # helixctl: ignore[HX010] reason. `helixctl doctor --list-rules` knows them.
"""

from __future__ import annotations

LEVEL = "warning"
