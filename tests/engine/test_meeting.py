from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import pytest

from helixctl.engine.channel import Cancelled
from helixctl.engine.meeting import Meeting
from tests.engine.threads import Background, FakeClock, until_waiting


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_leave_every_round_with_the_values_in_rank_order(size):
    meeting: Meeting[int, tuple[int, ...]] = Meeting("gradients", size)

    def rounds(rank: int) -> list[tuple[int, ...]]:
        return [meeting.meet(rank, 10 * turn + rank, tuple) for turn in range(200)]

    ranks = [Background(partial(rounds, rank)) for rank in range(size)]
    for rank in ranks:
        assert rank.result() == [tuple(10 * turn + r for r in range(size)) for turn in range(200)]
    assert meeting.stats().rounds == 200


def test_the_action_runs_in_rank_zero_before_anybody_leaves():
    meeting: Meeting[str, str] = Meeting("gradients", 2)
    actors: list[str] = []

    def combine(values: Sequence[str]) -> str:
        actors.append(threading.current_thread().name)
        return "".join(values)

    first = Background(lambda: meeting.meet(0, "a", combine), "drafter-0")
    until_waiting(meeting)
    assert actors == []
    assert meeting.meet(1, "b", combine) == "ab"
    assert first.result() == "ab"
    assert actors == ["drafter-0"]


def test_cancel_wakes_everybody():
    meeting: Meeting[int, int] = Meeting("gradients", 3)
    ranks = [Background(partial(meeting.meet, rank, 0, sum)) for rank in (0, 2)]
    until_waiting(meeting, 2)
    assert {waiter.action for waiter in meeting.room.waiters()} == {"for others at 'gradients'"}
    meeting.cancel()
    for rank in ranks:
        with pytest.raises(Cancelled):
            rank.result()
    with pytest.raises(Cancelled):
        meeting.meet(1, 0, sum)


def test_a_failing_action_is_rank_zeros_error_and_frees_the_others():
    meeting: Meeting[int, int] = Meeting("gradients", 2)

    def fail(values: object) -> int:
        raise KeyError("grad")

    other = Background(lambda: meeting.meet(1, 0, fail))
    until_waiting(meeting)
    with pytest.raises(KeyError):
        meeting.meet(0, 0, fail)
    with pytest.raises(Cancelled):
        other.result()


def test_waits_are_seconds():
    meeting: Meeting[int, int] = Meeting("gradients", 2)
    clock = meeting.room.clock = FakeClock()
    early = Background(lambda: meeting.meet(1, 1, sum))
    until_waiting(meeting)
    clock.advance(6)
    assert meeting.meet(0, 1, sum) == 2
    assert early.result() == 2
    assert meeting.stats().wait_s == 6


def test_size_must_be_positive():
    with pytest.raises(ValueError, match="size=0"):
        Meeting("gradients", 0)
