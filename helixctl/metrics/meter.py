"""Meters: sums kept where they arise, read once per window.

``Meter.add`` never waits for a device; ``Meter.flush`` is the only place that does. A value that is not finite makes
its mean not finite: it is shown, never dropped. A meter belongs to one thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from helixctl.metrics import names

Scalar = float | Tensor

_MANY = 1024
"""Tensors that a sum keeps before it adds them up."""


class Meter:
    """Means as sums of numerators over sums of denominators, and plain sums, over a window.

    Whatever the number of ``add`` calls per step, the mean is over everything added since the last flush.
    """

    def __init__(self) -> None:
        self._means: dict[str, tuple[_Sum, _Sum]] = {}
        self._totals: dict[str, _Sum] = {}
        self._latest: dict[str, Scalar] = {}

    def add(self, name: str, numerator: Scalar, denominator: Scalar = 1.0) -> None:
        """Add to a mean. Tensors hold one element, on any device; nobody overwrites them before the next flush."""
        top, bottom = self._means.setdefault(name, (_Sum(), _Sum()))
        top.add(numerator)
        bottom.add(denominator)

    def add_total(self, name: str, amount: Scalar) -> None:
        """Add to a sum, such as a count."""
        self._totals.setdefault(name, _Sum()).add(amount)

    def set(self, name: str, value: Scalar) -> None:
        """Report the last value of the window, such as a learning rate."""
        self._latest[name] = value.detach().clone() if isinstance(value, Tensor) else value

    def flush(self) -> dict[str, float]:
        """Read the window and begin the next; waits once per device.

        Returns:
            Mean, sum or last value per name. A mean over nothing (0 / 0) is NaN.
        """
        cells: list[Scalar] = [part for pair in self._means.values() for total in pair for part in total.parts()]
        cells += [part for total in self._totals.values() for part in total.parts()]
        cells += self._latest.values()
        read = iter(_read(cells))
        values: dict[str, float] = {}
        for name, (top, bottom) in self._means.items():
            numerator = _take(read, len(top.parts()))
            values[name] = _divide(numerator, _take(read, len(bottom.parts())))
        for name, total in self._totals.items():
            values[name] = _take(read, len(total.parts()))
        values.update((name, next(read)) for name in self._latest)
        self._means, self._totals, self._latest = {}, {}, {}
        return values


class Throughput:
    """Tokens and steps per second of a window; pauses do not count.

    The window begins when the meter is made and at every flush.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begin()

    def step(self) -> None:
        """Count one optimizer step."""
        self.num_steps += 1

    def pause(self, seconds: float) -> None:
        """Leave out ``seconds`` that have just passed."""
        self._paused_s += seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of this block: validation, checkpoints."""
        began_at = self._clock()
        try:
            yield
        finally:
            self.pause(self._clock() - began_at)

    @property
    def elapsed_s(self) -> float:
        """Seconds of the window so far, pauses left out."""
        return self._clock() - self._started_at - self._paused_s

    def flush(self, num_tokens: float) -> dict[str, float]:
        """Rates of the window, in which ``num_tokens`` real tokens were trained; begins the next.

        No step counted means no entry.
        """
        elapsed_s, num_steps = self.elapsed_s, self.num_steps
        self._begin()
        if not num_steps:
            return {}
        return {
            names.PERF_TOKENS_PER_S: _divide(num_tokens, elapsed_s),
            names.PERF_STEP_MS: 1000.0 * elapsed_s / num_steps,
        }

    def _begin(self) -> None:
        self._started_at = self._clock()
        self._paused_s = 0.0
        self.num_steps = 0


class _Sum:
    """A float64 sum of Python numbers and one per device of tensors."""

    def __init__(self) -> None:
        self._number = 0.0
        self._tensors: list[Tensor] = []  # read at the flush: adding here would cost a few launches a step

    def add(self, value: Scalar) -> None:
        if not isinstance(value, Tensor):
            self._number += value
            return
        assert value.numel() == 1, f"a metric is one number, not a tensor of shape {tuple(value.shape)}"
        self._tensors.append(value.detach())
        if len(self._tensors) == _MANY:
            self._tensors = list(_by_device_sum(self._tensors))

    def parts(self) -> list[Scalar]:
        return [self._number, *self._tensors]


def _read(cells: list[Scalar]) -> list[float]:
    """All cells as floats, with one copy per device."""
    by_device: dict[torch.device, list[int]] = {}
    result = [0.0] * len(cells)
    for index, cell in enumerate(cells):
        if isinstance(cell, Tensor):
            by_device.setdefault(cell.device, []).append(index)
        else:
            result[index] = float(cell)
    for indices in by_device.values():
        stacked = _stacked([torch.as_tensor(cells[i]) for i in indices])
        for index, value in zip(indices, stacked.tolist(), strict=True):  # the window's only wait for the device
            result[index] = value
    return result


def _stacked(tensors: list[Tensor]) -> Tensor:
    """float64 [n] of tensors on one device: one launch for all of a type."""
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) == 1:
        return torch.stack([tensor.detach().reshape(()) for tensor in tensors]).to(torch.float64)
    return torch.stack([tensor.detach().reshape(()).to(torch.float64) for tensor in tensors])


def _by_device_sum(tensors: list[Tensor]) -> Iterator[Tensor]:
    for device in {tensor.device for tensor in tensors}:
        yield _stacked([tensor for tensor in tensors if tensor.device == device]).sum()


def _take(read: Iterator[float], count: int) -> float:
    return sum(next(read) for _ in range(count))


def _divide(numerator: float, denominator: float) -> float:
    if denominator != 0.0:
        return numerator / denominator
    return math.nan if numerator == 0.0 or math.isnan(numerator) else math.copysign(math.inf, numerator)
