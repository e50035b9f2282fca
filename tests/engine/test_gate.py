from __future__ import annotations

import pytest

from helixctl.engine.channel import Cancelled
from helixctl.engine.gate import Gate
from helixctl.engine.supervisor import Supervisor
from tests.engine.stages import LIMITS, FakeStage
from tests.engine.threads import Background, until_waiting


def test_opens_only_when_all_are_ready():
    gate = Gate([["drafter-0"], ["target-0"]])
    gate.arrive("drafter-0")
    waiting = Background(gate.wait)
    until_waiting(gate)
    assert gate.late() == ("target-0",)
    with pytest.raises(AssertionError, match="target-0"):
        gate.open()
    gate.arrive("target-0")
    assert waiting.thread.is_alive()
    gate.open()
    waiting.result()


def test_cancel_wakes_who_waits():
    gate = Gate([["drafter-0"]])
    waiting = Background(gate.wait)
    until_waiting(gate)
    gate.cancel()
    with pytest.raises(Cancelled):
        waiting.result()


def test_the_late_ones_are_named_in_order():
    gate = Gate([["drafter-0", "drafter-1"], ["target-0"], ["reader-0"]])
    for name in ("drafter-0", "drafter-1"):
        gate.begin(name)
    gate.arrive("drafter-0")
    assert str(gate.late_error(90)) == (
        "not all stages were ready after 90 s: drafter-1 still in setup; target-0, reader-0 not begun"
    )


def test_stage_names_must_differ():
    with pytest.raises(ValueError, match="must differ"):
        Supervisor([[FakeStage("drafter-0")], [FakeStage("drafter-0")]], [], LIMITS)
