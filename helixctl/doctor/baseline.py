"""Known findings: a file that lets a project with old sins take the doctor into its CI today.

A finding is known by rule, path and the text of its line, not by its number, so edits elsewhere do not bring it back;
the same line twice in a file counts twice. What is mended drops out at the next --write-baseline, and never grows by
itself.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from helixctl.doctor.finding import Finding
from helixctl.errors import UsageError

_VERSION = 1


def write_baseline(path: Path, findings: Iterable[Finding]) -> int:
    """Write all findings to `path`; returns how many."""
    from helixctl.checkpoint.atomic import write_output

    counted = Counter((f.path, f.code, f.text) for f in findings)
    entries = [{"path": p, "code": c, "text": t, "count": n} for (p, c, t), n in sorted(counted.items())]
    text = json.dumps({"version": _VERSION, "findings": entries}, indent=1) + "\n"
    write_output(path, text, "--baseline", parents=True)
    return counted.total()


def read_baseline(path: Path) -> Counter[tuple[str, str, str]]:
    """Known findings, counted.

    Raises:
        UsageError: the file is not there or is no baseline.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != _VERSION:
            raise ValueError(f"its version is {content['version']}")
        entries = content["findings"]
        return Counter({(e["path"], e["code"], e["text"]): int(e["count"]) for e in entries})
    except FileNotFoundError as error:
        raise UsageError(f"there is no baseline {path}", fix="make it with --write-baseline") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no baseline: {error}", fix="make it again with --write-baseline") from error


def subtract(findings: Sequence[Finding], known: Counter[tuple[str, str, str]]) -> list[Finding]:
    """Findings that are not known."""
    left = Counter(known)
    new = []
    for finding in findings:
        key = (finding.path, finding.code, finding.text)
        if left[key] > 0:
            left[key] -= 1
        else:
            new.append(finding)
    return new


def count_known(findings: Iterable[Finding]) -> Counter[tuple[str, str, str]]:
    """Findings of another run as what is known."""
    return Counter((f.path, f.code, f.text) for f in findings)
