"""HX022: a default argument asks for the CUDA device.

What it checks
    Defaults of parameters that create a CUDA context, such as torch.cuda.current_device().
Why it matters
    Defaults are evaluated at import, once: CUDA is initialised there, and every process gets the importing one's
    device.
Fix
    Make the default None, and ask in the function.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.cuda import in_default, is_cuda_call
from helixctl.doctor.finding import Hit
from helixctl.doctor.source import Source

LEVEL = "warning"
MARKERS = (b"torch.cuda", b".cuda(", b'"cuda', b"'cuda", b"import cuda")


def check(source: Source) -> Iterator[Hit]:
    """Calls in defaults."""
    for node in source.index.nodes(ast.Call):
        if is_cuda_call(source, node) and in_default(source, node):
            yield Hit(node, "a default argument is evaluated at import, and this one creates a CUDA context")
