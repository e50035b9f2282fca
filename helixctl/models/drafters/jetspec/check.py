"""Judges a published JetSpec drafter: by the rules for DFlash, whose engines run it. Never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helixctl.models.drafters._findings import EngineView, Finding, TensorInfo
from helixctl.models.drafters.dflash import check as dflash
from helixctl.models.drafters.dflash.seen import SGLANG, SPECFORGE
from helixctl.models.facts import TargetFacts

_CAUSAL = Finding(
    "warning",
    "blocks are causal; which versions read that was not checked",
    (SGLANG, SPECFORGE),
    "compare the acceptance length that is served with the one of `helixctl validate`",
)


def check(
    format_name: str, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], target: TargetFacts | None
) -> tuple[tuple[Finding, ...], tuple[EngineView, ...]]:
    """Everything found, worst first, and what each engine would do; see DFlash's."""
    findings, engines = dflash.check(format_name, config, tensors, target)
    errors = sum(finding.severity == "error" for finding in findings)
    return (*findings[:errors], _CAUSAL, *findings[errors:]), engines
