from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from itertools import count

import pytest

from helixctl.engine.channel import Channel
from helixctl.engine.interrupt import InterruptFlag
from helixctl.engine.supervisor import Supervisor
from helixctl.errors import Interrupted
from tests.engine.stages import LIMITS, FakeStage
from tests.engine.threads import until, until_waiting


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def test_old_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with InterruptFlag() as flag:
        assert signal.getsignal(signal.SIGTERM) not in before
        assert (flag.requested, flag.urgent, flag.signal_number) == (False, False, None)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_first_signal_sets_the_flag_and_the_second_raises_where_nobody_listens():
    with InterruptFlag() as flag:
        kill(signal.SIGTERM)
        assert (flag.requested, flag.urgent, flag.signal_number) == (True, False, signal.SIGTERM)
        with pytest.raises(Interrupted, match="stopped at once by SIGTERM") as caught:
            kill(signal.SIGINT)
    assert caught.value.exit_code == 143


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_once_lets_the_step_finish(number, exit_code):
    channel: Channel[int] = Channel("features", 1)
    steps: list[int] = []

    def draft() -> None:
        for step in count():
            channel.receive()
            if step == 3:
                kill(number)
                until(lambda: flag.requested)  # the handler runs on the main thread, which waits in Supervisor.run()
            steps.append(step)
            if flag.requested:
                steps.append(-1)  # saved
                channel.cancel()
                return

    def produce() -> None:
        for n in count():
            channel.send(n)

    with InterruptFlag() as flag:
        stages = [FakeStage("drafter-0", draft), FakeStage("target-0", produce)]
        with pytest.raises(Interrupted, match=f"stopped by {signal.Signals(number).name}") as caught:
            Supervisor([stages], [channel], LIMITS, interrupt=flag).run()
    assert steps == [0, 1, 2, 3, -1]
    assert caught.value.exit_code == exit_code


def test_twice_cancels_now_and_ends_all_threads():
    channel: Channel[int] = Channel("features", 1)
    before = threading.active_count()

    def impatient() -> None:
        until_waiting(channel, 2)
        kill(signal.SIGINT)
        until(lambda: flag.requested)
        kill(signal.SIGINT)
        channel.receive()  # never ends by itself

    with InterruptFlag() as flag:
        stages = [FakeStage(name, channel.receive) for name in ("drafter-0", "drafter-1")]
        with pytest.raises(Interrupted, match="stopped at once by SIGINT"):
            Supervisor([stages, [FakeStage("reader-0", impatient)]], [channel], LIMITS, interrupt=flag).run()
    assert threading.active_count() == before


def test_a_signal_during_set_up_ends_the_start():
    log: list[str] = []

    def press() -> None:
        kill(signal.SIGINT)
        until(lambda: flag.requested)

    with InterruptFlag() as flag:
        stages = [FakeStage("drafter-0", on_setup=press, log=log), FakeStage("target-0", log=log)]
        with pytest.raises(Interrupted):
            Supervisor([stages], [], LIMITS, interrupt=flag).run()
    assert log == ["drafter-0 setup", "drafter-0 teardown"]


def test_without_a_flag_ctrl_c_still_ends_all_threads():
    channel: Channel[int] = Channel("features", 1)
    before = threading.active_count()

    def press() -> None:
        until_waiting(channel)
        kill(signal.SIGINT)
        channel.receive()

    with pytest.raises(KeyboardInterrupt):
        stages = [FakeStage("drafter-0", channel.receive), FakeStage("reader-0", press)]
        Supervisor([stages], [channel], LIMITS).run()
    assert threading.active_count() == before


PROGRAM = """
import sys
from helixctl.engine.channel import Channel
from helixctl.engine.interrupt import InterruptFlag
from helixctl.engine.supervisor import Supervisor
from tests.engine.stages import LIMITS, FakeStage

channel = Channel("features", 1)
def wait():
    print("running", flush=True)
    channel.receive()

with InterruptFlag() as flag:
    try:
        Supervisor([[FakeStage("drafter-0", wait)]], [channel], LIMITS, interrupt=flag).run()
    except BaseException as error:
        sys.exit(error.exit_code)
"""


def test_a_real_process_ends_on_the_second_signal():
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) in (130, 143)  # which of two signals sent at once arrives first is up to the system
    process.stdout.close()
