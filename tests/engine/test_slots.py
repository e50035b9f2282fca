from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixctl.engine.channel import Cancelled, Channel, OrderedChannel
from helixctl.engine.slots import SlotPool
from tests.engine.threads import Background, FakeClock, until_waiting


def make_pool(num_drafters: int = 2, num_slots: int = 2, first_seq: int = 0) -> SlotPool[str]:
    names = [[f"{drafter}/{slot}" for slot in range(num_slots)] for drafter in range(num_drafters)]
    return SlotPool("slots", names, first_seq=first_seq)


def test_numbers_are_dealt_to_drafters_and_their_slots_in_turn():
    pool = make_pool()
    assert [pool.acquire(seq) for seq in range(4)] == ["0/0", "1/0", "0/1", "1/1"]
    for seq in range(4):
        pool.release(seq)
    assert [pool.acquire(seq) for seq in range(4, 8)] == ["0/0", "1/0", "0/1", "1/1"]
    assert pool.num_slots == 4


def test_a_resumed_run_begins_at_its_first_number():
    pool = make_pool(first_seq=7)
    assert [pool.acquire(seq) for seq in (7, 8)] == ["1/1", "0/0"]
    with pytest.raises(ValueError, match="number 6 was acquired twice"):
        pool.acquire(6)


def test_a_later_number_never_overtakes_although_its_slot_is_free():
    pool = make_pool()
    later = Background(lambda: pool.acquire(1), "reader-1")
    until_waiting(pool)
    (waiter,) = pool.room.waiters()
    assert (waiter.thread, waiter.action) == ("reader-1", "for a slot of 'slots' (number 1, drafter 1)")
    assert pool.acquire(0) == "0/0"
    assert later.result() == "1/0"


def test_acquire_waits_for_its_own_slot():
    pool = make_pool(num_drafters=1)
    pool.acquire(0)
    pool.acquire(1)
    clock = pool.room.clock = FakeClock()
    third = Background(lambda: pool.acquire(2))
    until_waiting(pool)
    clock.advance(4)
    pool.release(1)  # the other slot
    assert len(pool.room.waiters()) == 1
    pool.release(0)
    assert third.result() == "0/0"
    stats = pool.stats()
    assert (stats.acquired, stats.released, stats.wait_s) == (3, 2, 4)


def test_waits_before_the_first_slot_comes_back_are_the_starts():
    pool = make_pool(num_drafters=1, num_slots=1)
    clock = pool.room.clock = FakeClock()
    pool.acquire(0)
    for seq, seconds in ((0, 30), (1, 2), (2, 3)):
        waiting = Background(partial(pool.acquire, seq + 1))
        until_waiting(pool)
        clock.advance(seconds)
        assert pool.room.waits("acquire")["start_wait_s"] == 30
        pool.release(seq)
        waiting.result()
    assert pool.room.waits("acquire") == {"acquire_wait_s": 5, "start_wait_s": 30}
    assert pool.stats().wait_s == 35


def test_only_the_holder_gives_a_slot_back():
    pool = make_pool()
    pool.acquire(0)
    with pytest.raises(ValueError, match="number 4 holds no slot"):
        pool.release(4)  # the same slot, one round later
    pool.release(0)
    with pytest.raises(ValueError, match="number 0 holds no slot"):
        pool.release(0)


def test_cancel_wakes_readers():
    pool = make_pool()
    reader = Background(lambda: pool.acquire(1))
    until_waiting(pool)
    pool.acquire(0)
    reader.result()
    pool.cancel()
    with pytest.raises(Cancelled):
        pool.acquire(2)
    pool.release(0)


def test_every_drafter_needs_a_slot():
    with pytest.raises(ValueError, match=r"got \[1, 0\]"):
        SlotPool("slots", [["a"], []])


@dataclass
class FakePipeline:
    """reader --work--> target --captured--> post --lanes--> drafter, with other threads let in at random places."""

    num_readers: int
    num_targets: int
    num_drafters: int
    num_slots: int
    num_rounds: int
    seed: int
    work: Channel[tuple[int, list[int]]] | OrderedChannel[tuple[int, list[int]]]
    lanes: OrderedChannel[list[int]]
    delivered: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        slots = [[[-1] for _ in range(self.num_slots)] for _ in range(self.num_drafters)]
        self.pool: SlotPool[list[int]] = SlotPool("slots", slots)
        self.captured: list[Channel[tuple[int, list[int]]]] = [
            Channel(f"captured-{i}", 1) for i in range(self.num_targets)
        ]
        self._numbers = iter(range(self.num_rounds * self.num_drafters))
        self._lock = threading.Lock()

    def run(self) -> None:
        """Returns when all is delivered; a hang fails in ``Background.result``."""
        bodies: list[Callable[[Callable[[], None]], list[int] | None]] = [self._read] * self.num_readers
        bodies += [partial(self._target, i) for i in range(self.num_targets)]
        bodies += [partial(self._post, i) for i in range(self.num_targets)]
        bodies += [partial(self._draft, lane) for lane in range(self.num_drafters)]
        threads = [Background(partial(body, self._delay(k))) for k, body in enumerate(bodies)]
        try:
            results = [thread.result() for thread in threads]
        finally:
            for thing in (self.pool, self.work, self.lanes, *self.captured):
                thing.cancel()
        self.delivered = results[-self.num_drafters :]

    def _delay(self, thread: int) -> Callable[[], None]:
        """Other threads go first a random number of times; at times an event is waited for that nobody sets."""
        rng, never = random.Random(self.seed * 1000 + thread), threading.Event()

        def delay() -> None:
            for _ in range(rng.choice((0, 0, 1, 4))):
                never.wait(0)

        return delay

    def _read(self, delay: Callable[[], None]) -> None:
        while True:
            with self._lock:
                seq = next(self._numbers, None)
            if seq is None:
                break
            delay()
            slot = self.pool.acquire(seq)
            delay()
            if isinstance(self.work, OrderedChannel):
                self.work.send(seq, (seq, slot))
            else:
                self.work.send((seq, slot))
        self.work.close()

    def _target(self, i: int, delay: Callable[[], None]) -> None:
        for item in self.work:
            delay()
            self.captured[i].send(item)
        self.captured[i].close()

    def _post(self, i: int, delay: Callable[[], None]) -> None:
        for seq, slot in self.captured[i]:
            delay()
            slot[0] = seq
            self.lanes.send(seq, slot)
        self.lanes.close()

    def _draft(self, lane: int, delay: Callable[[], None]) -> list[int]:
        got = []
        for slot in self.lanes.lane(lane):
            got.append(slot[0])
            delay()
            assert slot[0] == got[-1], "the slot was overwritten while in use"
            self.pool.release(got[-1])
        return got


def expected(num_drafters: int, num_rounds: int) -> list[Sequence[int]]:
    return [list(range(lane, num_rounds * num_drafters, num_drafters)) for lane in range(num_drafters)]


def test_three_targets_two_drafters_two_readers_never_hang():
    """Thousands of rounds with the shape that hangs in 10 of 10 runs when targets take slots as they finish."""
    pipeline = FakePipeline(
        num_readers=2,
        num_targets=3,
        num_drafters=2,
        num_slots=2,
        num_rounds=2000,
        seed=1,
        work=Channel("work", 3, num_senders=2),
        lanes=OrderedChannel("features", 4, 2, num_senders=3),
    )
    pipeline.run()
    assert pipeline.delivered == expected(2, 2000)


@st.composite
def pipelines(draw: st.DrawFn) -> FakePipeline:
    """Both wirings that ``OrderedChannel`` names: a window of all slots, or an order in front of the targets."""
    num_readers, num_targets = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    num_drafters, num_slots = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    work_capacity = draw(st.integers(1, 4))
    work: Channel[tuple[int, list[int]]] | OrderedChannel[tuple[int, list[int]]]
    if draw(st.booleans()):
        work = Channel("work", work_capacity, num_senders=num_readers)
        window = num_slots * num_drafters
    else:
        work = OrderedChannel("work", work_capacity, num_senders=num_readers)
        window = draw(st.integers(1, 3))
    lanes: OrderedChannel[list[int]] = OrderedChannel("features", window, num_drafters, num_senders=num_targets)
    return FakePipeline(
        num_readers, num_targets, num_drafters, num_slots, 12, seed=draw(st.integers(0, 999)), work=work, lanes=lanes
    )


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_no_shape_of_pipeline_hangs(pipeline: FakePipeline):
    pipeline.run()
    assert pipeline.delivered == expected(pipeline.num_drafters, pipeline.num_rounds)
