"""Compiled functions that belong to one thread.

torch keeps compiled code by code object. In torch 2.13 threads that share a warm one miss its guards now and then, and
recompile; a copy of the code object for every thread never does. Configuration of the compiler, too, is a thread's own.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import torch


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


def compiled_here(function: Callable[..., Any], *, fullgraph: bool = True) -> Callable[..., Any]:
    """``function`` compiled for the calling thread, for fixed shapes; the same object at every call."""
    own = _COMPILED.by_function
    if function not in own:
        own[function] = torch.compile(private(function), fullgraph=fullgraph, dynamic=False)
    return own[function]
