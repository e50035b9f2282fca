"""Compiled functions that belong to one thread; the only place that calls torch.compile.

torch keeps compiled code by code object. In torch 2.13 threads that share a warm one miss its guards now and then, and
recompile; a copy of the code object for every thread never does. Configuration of the compiler, too, is a thread's own.
"""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

GRAPH_LIMIT = 64
"""Graphs that one compiled function may have; one more is an error, and a target is then interpreted, and says so.

A run needs few: 3 of a drafter's layer in one thread (training and validation, whole rows and parts), one of a target's
for each kind of layer and window. Torch's own limit of 8 is met by a process that makes several runs of other shapes on
its main thread, such as tests.
"""


_interpreting = threading.Event()


@contextmanager
def interpreted() -> Iterator[None]:
    """Nothing is compiled inside, in any thread; what was compiled before is interpreted as well."""
    torch.compiler.set_stance("force_eager")
    _interpreting.set()
    try:
        yield
    finally:
        _interpreting.clear()
        torch.compiler.set_stance("default")


def is_interpreted() -> bool:
    """Whether some thread is inside of ``interpreted``."""
    return _interpreting.is_set()


def compile_fixed(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``function`` compiled as a whole for fixed shapes, at the first call with each.

    Args:
        function: With a code object of its own, see ``private``.
        options: For ``torch.compile``.
    """
    options = {"fullgraph": True, "dynamic": False, **options}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = GRAPH_LIMIT
    else:  # before torch 2.13 it is a setting of the process; since 2.12 settings are each thread's own
        torch._dynamo.config.recompile_limit = GRAPH_LIMIT
    return torch.compile(function, **options)


class _Compiled(threading.local):
    def __init__(self) -> None:
        self.by_function: dict[Any, Callable[..., Any]] = {}


_COMPILED = _Compiled()


def private(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of ``function`` with a code object of its own."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def compiled_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled for the calling thread, for fixed shapes; the same object at every call."""
    own = _COMPILED.by_function
    if function not in own:
        own[function] = compile_fixed(private(function))
    return own[function]
