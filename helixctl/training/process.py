"""Settings of the whole process that a run needs before its first thread starts."""

from __future__ import annotations

import torch

from helixctl.lm_plan import AnyPlan


def set_up_process(plan: AnyPlan) -> None:
    """Thread count and determinism; a change later would reach some threads only, and recompile others."""
    if plan.threads:
        torch.set_num_threads(plan.threads)
    if plan.recipe.run.deterministic:
        torch.use_deterministic_algorithms(True)
