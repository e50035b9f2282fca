"""Results of earlier runs, by the content of each file, the rules and the settings; a torn cache is no cache."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from functools import cache
from pathlib import Path

from helixctl.doctor.finding import Finding, from_cache
from helixctl.doctor.scan import FileTask, ScanOptions

_FORMAT = 1


@cache
def rules_version() -> str:
    """A hash of the doctor's own source: another rule, another cache."""
    digest = hashlib.sha256(repr((_FORMAT, sys.version_info[:3])).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def default_folder() -> Path:
    """Where results are kept unless told otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "helixctl" / "doctor"


class Cache:
    """Findings of the files below one root; one JSON file."""

    def __init__(self, folder: Path, root: Path, options: ScanOptions) -> None:
        key = hashlib.sha256(repr((str(root), rules_version(), options)).encode()).hexdigest()[:20]
        self._path = folder / f"{key}.json"
        self._entries: dict[str, tuple[str, list[dict[str, object]]]] = {}
        self._changed = False
        try:
            self._entries = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._changed = True

    @staticmethod
    def key(task: FileTask, content: bytes) -> str:
        """What the findings of a file depend on, beside rules and settings."""
        digest = hashlib.sha256(content)
        digest.update(repr((task.module, task.ignored)).encode())
        return digest.hexdigest()

    def get(self, relative: str, key: str) -> list[Finding] | None:
        """What was found in that very content; None where nobody has looked."""
        entry = self._entries.get(relative)
        if entry is None or entry[0] != key:
            return None
        return [from_cache(values) for values in entry[1]]

    def put(self, relative: str, key: str, findings: list[Finding]) -> None:
        """Keep what was found."""
        self._entries[relative] = (key, [dataclasses.asdict(finding) for finding in findings])
        self._changed = True

    def save(self) -> None:
        """Write to the disk; a cache that cannot be written is not worth an error."""
        if not self._changed:
            return
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(self._entries), encoding="utf-8")
            temporary.replace(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
