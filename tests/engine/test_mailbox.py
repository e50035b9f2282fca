from __future__ import annotations

import os
import signal
import threading
from collections import deque

import pytest

from helixctl.engine.mailbox import Mailbox
from tests.engine.threads import Background


def test_messages_come_in_order_from_before_and_after_entering():
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(0)
    with mailbox:
        sender = Background(lambda: deque(map(mailbox.put, range(1, 2000))))
        got: list[int] = []
        while len(got) < 2000:
            message = mailbox.get(None)
            if message is not None:
                got.append(message)
    sender.result()
    assert got == list(range(2000))
    mailbox.put(1)  # a late thread does no harm


def test_nothing_after_the_timeout():
    with Mailbox[int]() as mailbox:
        assert mailbox.get(0.001) is None


def test_a_signal_that_the_system_gives_to_another_thread_wakes_the_reader():
    """The handler runs on the main thread only; a wait on a lock would not notice the signal."""
    received: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        with Mailbox[int]() as mailbox:
            own = Background(lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))
            while not received:
                assert mailbox.get(20) is None
            own.result()
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_the_old_wakeup_comes_back():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        signal.set_wakeup_fd(writer)
        with Mailbox[int]():
            pass
        assert signal.set_wakeup_fd(-1) == writer
    finally:
        os.close(reader)
        os.close(writer)


def test_works_on_another_thread_where_signals_are_not_its_business():
    def use() -> int | None:
        with Mailbox[int]() as mailbox:
            mailbox.put(7)
            return mailbox.get(None)

    assert Background(use).result() == 7


def test_reading_needs_entering():
    with pytest.raises(AssertionError, match="enter the mailbox first"):
        Mailbox[int]().get(0)
