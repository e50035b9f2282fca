"""Compiled functions: one place makes them, with a limit of graphs that no run of ours meets and that fails by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import helixctl
from helixctl.models import private
from helixctl.models.private import GRAPH_LIMIT, compile_fixed, compiled_here
from helixctl.models.private import private as own_code


@pytest.fixture(autouse=True)
def _quick_and_clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are traced and counted as ever, and run by the interpreter: no kernels are built."""
    before = torch._dynamo.config.recompile_limit
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = before


def double(x: Tensor) -> Tensor:
    return x * 2


def test_more_shapes_than_torch_allows_by_itself() -> None:
    num_shapes = torch._dynamo.config.recompile_limit + 3
    for length in range(2, 2 + num_shapes):
        assert compiled_here(double)(torch.ones(length)).sum() == 2 * length
    assert num_shapes < GRAPH_LIMIT


def test_one_graph_too_many_is_an_error_and_no_slow_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "GRAPH_LIMIT", 2)
    compiled = compile_fixed(own_code(double))
    for length in (2, 3):
        compiled(torch.ones(length))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        compiled(torch.ones(4))


def test_no_other_module_compiles() -> None:
    """Whoever did would meet torch's own limit, or share a code object with another thread."""
    root = Path(helixctl.__file__).parent
    calls = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sorted(root.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.compile"
    ]
    assert [where.partition(":")[0] for where in calls] == ["models/private.py"] * len(calls) != []
