"""Channels between stages: bounded by items and bytes, closable, cancellable, and measured.

``Channel`` hands items out in the order they came; ``OrderedChannel`` in the order of their numbers, dealt to lanes.
Neither copies an item. Both are always measured: a send or receive costs a few dictionary operations under one lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from helixctl.engine.waiting import Cancelled, WaitRoom

__all__ = ["Cancelled", "Channel", "ChannelStats", "Closed", "OrderedChannel"]

T = TypeVar("T")


class Closed(Exception):
    """The channel is closed: nothing more will come out of it, or it takes nothing more."""


@dataclass(frozen=True)
class ChannelStats:
    """What went through a channel so far."""

    name: str
    capacity: int
    sent: int
    received: int
    send_wait_s: float
    """Seconds that senders waited for room, added over senders; waits that go on now are included."""
    receive_wait_s: float
    """Seconds that receivers waited for an item, added over receivers; waits that go on now are included."""
    occupancy: tuple[float, ...]
    """``occupancy[n]``: seconds for which the channel held n items, counted from the first send; capacity + 1 long."""
    max_occupancy: int
    held_bytes: int
    max_held_bytes: int


class _Ledger:
    """Counts of one channel. All methods need the channel's lock held."""

    def __init__(self, capacity: int, max_bytes: int | None, num_senders: int) -> None:
        if capacity < 1 or num_senders < 1 or (max_bytes is not None and max_bytes < 1):
            raise ValueError(
                f"capacity={capacity}, num_senders={num_senders} and max_bytes={max_bytes} must be positive"
            )
        self.capacity = capacity
        self.max_bytes = max_bytes
        self.open_senders = num_senders
        self.sent = self.received = self.max_held = self.held_bytes = self.max_held_bytes = 0
        self._occupied_s = [0.0] * (capacity + 1)
        self._level_since: float | None = None

    @property
    def held(self) -> int:
        return self.sent - self.received

    @property
    def closed(self) -> bool:
        return self.open_senders == 0

    def fits_bytes(self, num_bytes: int) -> bool:
        """An item larger than the whole limit fits an empty channel, so that it can never block for ever."""
        return self.max_bytes is None or self.held == 0 or self.held_bytes + num_bytes <= self.max_bytes

    def put(self, num_bytes: int, now: float) -> None:
        self._leave_level(now)
        self._level_since = now
        self.sent += 1
        self.held_bytes += num_bytes
        self.max_held = max(self.max_held, self.held)
        self.max_held_bytes = max(self.max_held_bytes, self.held_bytes)

    def take(self, num_bytes: int, now: float) -> None:
        self._leave_level(now)
        self.received += 1
        self.held_bytes -= num_bytes

    def close_one(self, name: str) -> None:
        if self.closed:
            raise AssertionError(f"channel {name!r} was closed more often than it has senders")
        self.open_senders -= 1

    def stats(self, room: WaitRoom) -> ChannelStats:
        self._leave_level(room.clock())
        return ChannelStats(
            name=room.name,
            capacity=self.capacity,
            sent=self.sent,
            received=self.received,
            send_wait_s=room.waited_s("send"),
            receive_wait_s=room.waited_s("receive"),
            occupancy=tuple(self._occupied_s),
            max_occupancy=self.max_held,
            held_bytes=self.held_bytes,
            max_held_bytes=self.max_held_bytes,
        )

    def _leave_level(self, now: float) -> None:
        if self._level_since is not None:
            self._occupied_s[self.held] += now - self._level_since
            self._level_since = now


class _Measured:
    """What both channels are made of: a room to wait in and a ledger. Everything but sending and receiving."""

    def __init__(self, name: str, capacity: int, max_bytes: int | None, num_senders: int) -> None:
        self.name = name
        self.room = WaitRoom(name)
        self._ledger = _Ledger(capacity, max_bytes, num_senders)

    def close(self) -> None:
        """One sender is finished; the channel is closed when all are. Harmless after ``cancel()``."""
        with self.room:
            self._ledger.close_one(self.name)
            self.room.moved()

    def cancel(self) -> None:
        """Give up: everybody who waits here, or comes later, gets ``Cancelled``."""
        self.room.cancel()

    def stats(self) -> ChannelStats:
        """Counts and seconds so far."""
        with self.room:
            return self._ledger.stats(self.room)


class Channel(_Measured, Generic[T]):
    """First in, first out, between any number of senders and receivers.

    Senders that wait for room are served in the order they came, so a large item is not overtaken for ever.

    Args:
        name: shown in statistics and when somebody waits for too long.
        capacity: items held at most.
        max_bytes: bytes held at most, as told to ``send``; a larger single item is admitted when the channel is empty.
        num_senders: how many ``close()`` calls end the channel.
    """

    def __init__(self, name: str, capacity: int, *, max_bytes: int | None = None, num_senders: int = 1) -> None:
        super().__init__(name, capacity, max_bytes, num_senders)
        self._items: deque[tuple[T, int]] = deque()
        self._queue: deque[object] = deque()  # tickets of the senders that wait, oldest first

    def send(self, item: T, *, num_bytes: int = 0) -> None:
        """Hand over ``item``; waits while the channel is full.

        Raises:
            Closed: every sender has closed the channel.
            Cancelled: the channel has been cancelled.
        """
        ledger, ticket = self._ledger, object()

        def admitted() -> bool:
            first = self._queue[0] is ticket
            return ledger.closed or (first and ledger.held < ledger.capacity and ledger.fits_bytes(num_bytes))

        with self.room:
            self._queue.append(ticket)
            try:
                self.room.wait_until(admitted, f"to send to {self.name!r}", "send")
                if ledger.closed:
                    raise Closed(f"channel {self.name!r} is closed; nothing can be sent")
                ledger.put(num_bytes, self.room.clock())
                self._items.append((item, num_bytes))
            finally:
                self._queue.remove(ticket)
                self.room.moved()

    def receive(self) -> T:
        """The oldest item; waits while there is none.

        Raises:
            Closed: the channel is closed and empty.
            Cancelled: the channel has been cancelled, whatever it still holds.
        """
        ledger = self._ledger
        with self.room:
            self.room.wait_until(
                lambda: bool(self._items) or ledger.closed, f"to receive from {self.name!r}", "receive"
            )
            if not self._items:
                raise Closed(f"channel {self.name!r} is closed and empty")
            item, num_bytes = self._items.popleft()
            ledger.take(num_bytes, self.room.clock())
            self.room.passed()
            self.room.moved()
            return item

    def __iter__(self) -> Iterator[T]:
        """Items until the channel is closed and empty."""
        while True:
            try:
                item = self.receive()
            except Closed:
                return
            yield item


class OrderedChannel(_Measured, Generic[T]):
    """Hands numbered items out in the order of their numbers, whatever order they came in.

    With M lanes, lane j gets those numbers s with s mod M == j, each exactly once and in order. Several receivers may
    share a lane. Numbers have no holes: what must be skipped is sent as an empty item.

    A sender may be at most ``capacity`` numbers ahead: number s waits while s >= oldest + capacity, where ``oldest`` is
    the oldest number that no lane has received. The sender of the oldest number never waits, neither for room nor for
    bytes; hence no deadlock as long as somebody holds or makes the oldest number. If the stage in front can hold newer
    numbers in *all* its threads while the oldest is still behind them, it must not block here: give the channel between
    them an order too, or this one a capacity of all slots (``SlotPool.num_slots``), which never blocks.

    Args:
        name: shown in statistics and when somebody waits for too long.
        capacity: how far ahead of the oldest undelivered number a sender may put; also the most items held.
        num_lanes: M, the number of lanes.
        first_seq: the first number; a resumed run does not begin at 0.
        max_bytes: bytes held at most, as told to ``send``; the oldest number is admitted beyond it.
        num_senders: how many ``close()`` calls end the channel.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        num_lanes: int = 1,
        *,
        first_seq: int = 0,
        max_bytes: int | None = None,
        num_senders: int = 1,
    ) -> None:
        if num_lanes < 1:
            raise ValueError(f"num_lanes={num_lanes} must be positive")
        super().__init__(name, capacity, max_bytes, num_senders)
        self._items: dict[int, tuple[T, int]] = {}
        self._next = [first_seq + (lane - first_seq) % num_lanes for lane in range(num_lanes)]  # per lane, undelivered
        self._end = first_seq  # one more than the largest number sent

    def send(self, seq: int, item: T, *, num_bytes: int = 0) -> None:
        """Hand over number ``seq``; waits while it is too far ahead of the oldest undelivered number.

        Raises:
            Closed: every sender has closed the channel.
            Cancelled: the channel has been cancelled.
            ValueError: ``seq`` was sent before (a bug).
        """
        ledger = self._ledger

        def admitted() -> bool:
            oldest = min(self._next)
            in_window = seq < oldest + ledger.capacity
            return ledger.closed or seq <= oldest or (in_window and ledger.fits_bytes(num_bytes))

        with self.room:
            self.room.wait_until(admitted, f"to send to {self.name!r} (number {seq})", "send")
            if ledger.closed:
                raise Closed(f"channel {self.name!r} is closed; number {seq} cannot be sent")
            if seq in self._items or seq < self._next[seq % len(self._next)]:
                raise ValueError(f"number {seq} was sent twice to channel {self.name!r}, or lies before its first")
            ledger.put(num_bytes, self.room.clock())
            self._items[seq] = (item, num_bytes)
            self._end = max(self._end, seq + 1)
            self.room.moved()

    def receive(self, lane: int = 0) -> T:
        """The next number of ``lane``; waits until it is there.

        Raises:
            Closed: the channel is closed and no number of this lane is left.
            Cancelled: the channel has been cancelled, whatever it still holds.
            RuntimeError: the channel was closed although a number below one that was sent never came (a bug).
        """
        ledger = self._ledger
        action = f"to receive from {self.name!r}" + (f" (lane {lane})" if len(self._next) > 1 else "")
        with self.room:
            self.room.wait_until(lambda: self._next[lane] in self._items or ledger.closed, action, "receive")
            seq = self._next[lane]
            if seq not in self._items:
                self._raise_closed(seq)
            item, num_bytes = self._items.pop(seq)
            self._next[lane] = seq + len(self._next)
            ledger.take(num_bytes, self.room.clock())
            self.room.passed()
            self.room.moved()
            return item

    def lane(self, lane: int) -> Iterator[T]:
        """Items of ``lane`` until the channel is closed and the lane is empty."""
        while True:
            try:
                item = self.receive(lane)
            except Closed:
                return
            yield item

    def __iter__(self) -> Iterator[T]:
        """Items of the only lane; use ``lane()`` where there are several."""
        if len(self._next) > 1:
            raise TypeError(f"channel {self.name!r} has {len(self._next)} lanes; iterate over one of them")
        return self.lane(0)

    def _raise_closed(self, seq: int) -> None:
        if seq < self._end:
            raise RuntimeError(f"channel {self.name!r} was closed and number {seq} never came")
        raise Closed(f"channel {self.name!r} is closed; number {seq} will not come")
