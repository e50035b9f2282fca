"""HX010: a DataLoader starts its workers by whatever method is the default.

What it checks
    DataLoader with num_workers that is not 0 and without multiprocessing_context. An error where CUDA was touched
    before in the same file's flow, or where the dataset or collate_fn touches CUDA; a warning elsewhere.
Why it matters
    The default is fork up to Python 3.13. Workers forked after CUDA was initialised fail or hang: typically those of
    the validation loader, so that validation stands at 0 % for ever.
Fix
    Pass multiprocessing_context="spawn" if num_workers > 0 else None. Then dataset and collate_fn must pickle, see
    HX011.
"""

from __future__ import annotations

from collections.abc import Iterator

from helixctl.doctor.cuda import cuda_flow, global_method, loader_context, loader_functions, loaders
from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "warning"
MARKERS = (b"DataLoader",)


def check(source: Source) -> Iterator[Hit]:
    """Loaders with workers and no context."""
    found = [call for call, _ in loaders(source) if loader_context(source, call) is None]
    if not found or global_method(source) not in (None, "fork"):
        return
    flow = cuda_flow(source)
    for call in found:
        touch = flow.before(call.node)
        inside = next((first for f in loader_functions(source, call) if (first := flow.first(f)) is not None), None)
        if touch is not None:
            yield Hit(call.node, f"workers are forked after CUDA was touched in line {touch.lineno}", "error")
        elif inside is not None:
            yield Hit(call.node, f"forked workers touch CUDA in line {inside.lineno}", "error")
        else:
            yield Hit(call.node, "workers are started by the default method, which is fork before Python 3.14")
