from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixctl.engine.channel import Cancelled, Channel, Closed, OrderedChannel
from tests.engine.threads import Background, FakeClock, until_waiting


def send_all(channel: Channel[int], items: range) -> None:
    for item in items:
        channel.send(item)
    channel.close()


def test_items_come_out_in_order_and_never_more_than_capacity():
    channel: Channel[int] = Channel("numbers", 3)
    sender = Background(lambda: send_all(channel, range(500)))
    assert list(channel) == list(range(500))
    sender.result()
    stats = channel.stats()
    assert (stats.sent, stats.received) == (500, 500)
    assert 1 <= stats.max_occupancy <= 3
    assert len(stats.occupancy) == 4


def test_send_waits_while_full():
    channel: Channel[int] = Channel("numbers", 1)
    channel.send(0)
    sender = Background(lambda: channel.send(1), "target-0")
    until_waiting(channel)
    (waiter,) = channel.room.waiters()
    assert (waiter.thread, waiter.action) == ("target-0", "to send to 'numbers'")
    assert channel.stats().sent == 1
    assert channel.receive() == 0
    sender.result()
    assert channel.receive() == 1


def test_closes_when_every_sender_has_closed():
    channel: Channel[int] = Channel("numbers", 4, num_senders=3)
    senders = [Background(partial(send_all, channel, range(k, 300, 3))) for k in range(3)]
    assert sorted(channel) == list(range(300))
    for sender in senders:
        sender.result()
    with pytest.raises(Closed, match="'numbers' is closed and empty"):
        channel.receive()


def test_close_wakes_waiting_receivers():
    channel: Channel[int] = Channel("numbers", 1)
    receivers = [Background(channel.receive) for _ in range(3)]
    until_waiting(channel, 3)
    channel.close()
    for receiver in receivers:
        with pytest.raises(Closed):
            receiver.result()


def test_a_closed_channel_takes_nothing_and_cannot_be_closed_again():
    channel: Channel[int] = Channel("numbers", 1)
    channel.close()
    with pytest.raises(Closed, match="nothing can be sent"):
        channel.send(1)
    with pytest.raises(AssertionError, match="more often than it has senders"):
        channel.close()


def test_close_frees_a_blocked_sender():
    channel: Channel[int] = Channel("numbers", 1)
    channel.send(0)
    sender = Background(lambda: channel.send(1))
    until_waiting(channel)
    channel.close()
    with pytest.raises(Closed):
        sender.result()


def test_cancel_wakes_everybody_and_wins_over_items():
    full: Channel[int] = Channel("full", 1)
    full.send(0)
    empty: Channel[int] = Channel("empty", 1)
    blocked = [Background(lambda: full.send(1)), Background(empty.receive)]
    until_waiting(full)
    until_waiting(empty)
    for channel in (full, empty):
        channel.cancel()
        channel.cancel()
    for thread in blocked:
        with pytest.raises(Cancelled):
            thread.result()
    with pytest.raises(Cancelled, match="'full' was cancelled"):
        full.receive()
    full.close()  # a stage's `finally: close()` is harmless
    with pytest.raises(Cancelled):
        full.send(2)


def test_except_exception_cannot_swallow_cancellation():
    channel: Channel[int] = Channel("numbers", 1)

    def careless() -> None:
        while True:
            try:
                channel.receive()
            except Exception:
                continue

    thread = Background(careless)
    until_waiting(channel)
    channel.cancel()
    with pytest.raises(Cancelled):
        thread.result()


def test_bytes_are_bounded():
    channel: Channel[str] = Channel("features", 8, max_bytes=10)
    channel.send("a", num_bytes=6)
    channel.send("b", num_bytes=4)
    sender = Background(lambda: channel.send("c", num_bytes=1))
    until_waiting(channel)
    assert channel.receive() == "a"
    sender.result()
    assert channel.stats().held_bytes == 5
    assert channel.stats().max_held_bytes == 10


def test_an_item_larger_than_the_limit_is_admitted_when_empty():
    channel: Channel[str] = Channel("features", 8, max_bytes=10)
    channel.send("small", num_bytes=1)
    sender = Background(lambda: channel.send("huge", num_bytes=1000))
    until_waiting(channel)
    assert channel.receive() == "small"
    sender.result()
    assert channel.receive() == "huge"


def test_a_large_item_is_not_overtaken_by_small_ones():
    channel: Channel[str] = Channel("features", 8, max_bytes=10)
    channel.send("first", num_bytes=5)
    large = Background(lambda: channel.send("large", num_bytes=10))
    until_waiting(channel, 1)
    small = Background(lambda: channel.send("small", num_bytes=1))  # would fit
    until_waiting(channel, 2)
    assert [channel.receive() for _ in range(3)] == ["first", "large", "small"]
    large.result()
    small.result()


def test_waits_and_occupancy_are_seconds():
    channel: Channel[int] = Channel("numbers", 2)
    clock = channel.room.clock = FakeClock()
    clock.advance(50)  # before the first send nothing counts
    channel.send(0)
    clock.advance(3)
    channel.send(1)
    sender = Background(lambda: channel.send(2))
    until_waiting(channel)
    clock.advance(5)
    assert channel.stats().send_wait_s == 5  # a wait that goes on is included
    channel.receive()
    sender.result()
    channel.receive()
    channel.receive()
    clock.advance(7)
    receiver = Background(channel.receive)
    until_waiting(channel)
    clock.advance(2)
    channel.send(3)
    receiver.result()
    stats = channel.stats()
    assert stats.occupancy == (9, 3, 5)
    assert (stats.send_wait_s, stats.receive_wait_s) == (5, 2)
    assert (stats.sent, stats.received, stats.max_occupancy) == (4, 4, 2)


@pytest.mark.parametrize("bad", [{"capacity": 0}, {"capacity": 1, "max_bytes": 0}, {"capacity": 1, "num_senders": 0}])
def test_limits_must_be_positive(bad):
    with pytest.raises(ValueError, match="must be positive"):
        Channel("numbers", **bad)


def test_many_senders_and_receivers_lose_nothing():
    channel: Channel[int] = Channel("numbers", 2, num_senders=4)
    senders = [Background(partial(send_all, channel, range(k, 2000, 4))) for k in range(4)]
    receivers = [Background(lambda: list(channel)) for _ in range(3)]
    got = [item for receiver in receivers for item in receiver.result()]
    assert sorted(got) == list(range(2000))
    for sender in senders:
        sender.result()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(0, 5), st.randoms(use_true_random=False))
def test_ordered_deals_every_number_once_and_in_order(num_senders, lanes, capacity, first, rng: random.Random):
    """Senders take numbers in order and send them in any order; what comes out does not depend on it."""
    end = first + 60
    channel: OrderedChannel[int] = OrderedChannel(
        "features", capacity, lanes, first_seq=first, max_bytes=rng.choice([None, 1, 7]), num_senders=num_senders
    )
    numbers, lock = iter(range(first, end)), threading.Lock()
    sizes = [rng.randrange(9) for _ in range(end)]

    def send() -> None:
        while True:
            with lock:
                seq = next(numbers, None)
            if seq is None:
                break
            channel.send(seq, seq, num_bytes=sizes[seq])
        channel.close()

    senders = [Background(send) for _ in range(num_senders)]
    receivers = [Background(partial(lambda lane: list(channel.lane(lane)), lane)) for lane in range(lanes)]
    for lane, receiver in enumerate(receivers):
        assert receiver.result() == [seq for seq in range(first, end) if seq % lanes == lane]
    for sender in senders:
        sender.result()
    assert channel.stats().max_occupancy <= capacity


def test_ordered_sender_waits_only_when_too_far_ahead():
    channel: OrderedChannel[str] = OrderedChannel("features", 2, 2)
    channel.send(1, "one")
    ahead = Background(lambda: channel.send(2, "two"), "target-1-post")
    until_waiting(channel)
    assert "target-1-post has waited 0 s to send to 'features' (number 2)" in map(str, channel.room.waiters())
    assert channel.receive(1) == "one"  # lane 1 may go ahead of lane 0; 0 is still the oldest
    channel.send(0, "zero")
    assert channel.receive(0) == "zero"
    ahead.result()
    assert channel.receive(0) == "two"


def test_the_sender_of_the_oldest_number_never_waits_for_bytes():
    channel: OrderedChannel[str] = OrderedChannel("features", 4, max_bytes=10)
    channel.send(1, "one", num_bytes=10)
    channel.send(0, "zero", num_bytes=10)
    assert [channel.receive(), channel.receive()] == ["zero", "one"]


def test_several_receivers_may_share_a_lane():
    channel: OrderedChannel[int] = OrderedChannel("work", 2)
    receivers = [Background(lambda: list(channel)) for _ in range(3)]
    for seq in range(300):
        channel.send(seq, seq)
    channel.close()
    shares = [receiver.result() for receiver in receivers]
    assert sorted(seq for share in shares for seq in share) == list(range(300))
    assert all(share == sorted(share) for share in shares)


def test_a_number_sent_twice_is_a_bug():
    channel: OrderedChannel[int] = OrderedChannel("features", 4)
    channel.send(0, 0)
    with pytest.raises(ValueError, match="number 0 was sent twice"):
        channel.send(0, 0)
    channel.receive()
    with pytest.raises(ValueError, match="number 0 was sent twice"):
        channel.send(0, 0)


def test_a_missing_number_is_named_when_the_channel_closes():
    channel: OrderedChannel[int] = OrderedChannel("features", 4, 2)
    channel.send(0, 0)
    channel.send(3, 3)
    channel.close()
    assert channel.receive(0) == 0
    with pytest.raises(RuntimeError, match="number 1 never came"):
        channel.receive(1)
    with pytest.raises(RuntimeError, match="number 2 never came"):
        channel.receive(0)


def test_ordered_close_and_cancel():
    channel: OrderedChannel[int] = OrderedChannel("features", 4, 2)
    channel.send(0, 0)
    channel.close()
    assert list(channel.lane(0)) == [0]
    with pytest.raises(Closed, match="number 1 will not come"):
        channel.receive(1)
    with pytest.raises(Closed):
        channel.send(1, 1)
    channel.cancel()
    with pytest.raises(Cancelled):
        channel.receive(0)


def test_lanes_cannot_be_iterated_as_one():
    with pytest.raises(TypeError, match="has 2 lanes"):
        iter(OrderedChannel("features", 1, 2))
    with pytest.raises(ValueError, match="num_lanes=0"):
        OrderedChannel("features", 1, 0)


@pytest.mark.parametrize("ordered", [False, True])
def test_waits_before_the_first_item_are_the_starts(ordered):
    channel: Any = OrderedChannel("c", 3) if ordered else Channel("c", 3)
    clock = channel.room.clock = FakeClock()
    for seq, seconds in ((0, 60), (1, 4)):
        receiving = Background(channel.receive)
        until_waiting(channel)
        clock.advance(seconds)
        channel.send(*([seq, "item"] if ordered else ["item"]))
        receiving.result()
    assert channel.room.waits("send", "receive") == {"send_wait_s": 0, "receive_wait_s": 4, "start_wait_s": 60}
    assert channel.stats().receive_wait_s == 64
