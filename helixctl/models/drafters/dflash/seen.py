"""A published folder as the rules of ``check.py`` see it: configuration, headers, and the target where it is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from helixctl.models.drafters._findings import TensorInfo
from helixctl.models.drafters.dflash.formats import zlab
from helixctl.models.drafters.dflash.published import own_tensor_name
from helixctl.models.facts import TargetFacts

ZLAB, VLLM, SGLANG, SPECULATORS, SPECFORGE = "z-lab dflash", "vLLM", "SGLang", "speculators", "SpecForge"


@dataclass(frozen=True)
class Seen:
    """What stands in the folder."""

    format: str
    raw: Mapping[str, Any]
    """config.json as it is."""
    flat: Mapping[str, Any]
    """The same in z-lab's keys."""
    tensors: Mapping[str, TensorInfo]
    target: TargetFacts | None

    @property
    def section(self) -> Mapping[str, Any]:
        """``dflash_config``."""
        return self.flat.get(zlab.SECTION) or {}

    def value(self, key: str) -> Any:
        """A key of the section, else of the top."""
        return zlab.value(self.flat, key)

    @cached_property
    def own_tensors(self) -> dict[str, TensorInfo]:
        """Under our names, copies of the target's left out."""
        named = {own_tensor_name(name): info for name, info in self.tensors.items()}
        return {name: info for name, info in named.items() if name is not None}

    @cached_property
    def foreign_tensors(self) -> tuple[str, ...]:
        """Names of tensors that are the target's."""
        return tuple(sorted(name for name in self.tensors if own_tensor_name(name) is None))

    @property
    def num_target_layers(self) -> int | None:
        """From the target where it is known, else from the configuration."""
        return self.target.num_layers if self.target else self.value("num_target_layers")

    @property
    def embedding_scale(self) -> float:
        """What the drafter's inputs are multiplied by."""
        return float(self.value("input_embedding_scale") or 1.0)
