"""``export --check``: judges a published drafter, ours or not, without loading its weights. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from helixctl.checkpoint.published import open_published
from helixctl.models.drafters._findings import EngineView, Finding
from helixctl.models.facts import TargetFacts
from helixctl.plugins import DRAFTERS, load_plugin


@dataclass(frozen=True)
class CheckResult:
    """What a folder holds, what is wrong with it, and what each engine would do with it."""

    dir: str
    algorithm: str
    format: str
    tensors: int
    parameters: int
    findings: tuple[Finding, ...]
    engines: tuple[EngineView, ...]

    @property
    def sound(self) -> bool:
        """Nothing is wrong for everybody, and some engine reads it."""
        fatal = any(finding.severity == "error" and not finding.engines for finding in self.findings)
        return not fatal and any(view.reads for view in self.engines)


def check_published(folder: Path, target: TargetFacts | None = None) -> CheckResult:
    """Judge the drafter in ``folder``; with the facts of its target more can be judged.

    Raises:
        CheckpointError: no configuration, no weights, or of no format that a plug-in knows.
    """
    found = open_published(folder)
    check = load_plugin(DRAFTERS, found.algorithm, "check").check
    findings, engines = check(found.format, found.config, found.tensors, target)
    sizes = [_product(info.shape) for info in found.tensors.values()]
    return CheckResult(str(folder), found.algorithm, found.format, len(sizes), sum(sizes), findings, engines)


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
