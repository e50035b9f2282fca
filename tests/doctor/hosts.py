"""Made-up machines for the checks of `doctor --env`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helixctl.doctor.environment_host import Host
from helixctl.doctor.probe import Verdict
from tests.doctor.fake_nvml import FakeNvml


class HostMaker:
    """Makes a host whose system files are those given, by path; without a driver and without variables."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, files: dict[str, str] | None = None, **fields: Any) -> Host:
        for name, text in (files or {}).items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return Host(root=self.root, **{"environ": {}, "nvml": FakeNvml(init_error=12), **fields})


def verdicts(found: Any) -> list[Verdict]:
    """All verdicts of a check."""
    return [found] if isinstance(found, Verdict) else list(found)


def one(found: Any) -> Verdict:
    """The only verdict of a check."""
    (verdict,) = verdicts(found)
    return verdict
