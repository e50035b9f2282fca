from __future__ import annotations

import re
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from helixctl.engine.channel import Cancelled, Channel, Closed, OrderedChannel
from helixctl.engine.gate import SETUP_LOCK, StartTimeout
from helixctl.engine.meeting import Meeting
from helixctl.engine.slots import SlotPool
from helixctl.engine.supervisor import Limits, Progress, StallError, Supervisor
from helixctl.engine.waiting import Cancellable
from helixctl.errors import StageFailed
from tests.engine.stages import LIMITS, FakeStage, raising
from tests.engine.threads import FakeClock, until, until_waiting


@pytest.fixture(autouse=True)
def no_thread_survives():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def send_for_ever(channel: Channel[int]) -> None:
    for number in count():
        channel.send(number)


def test_a_pipeline_runs_to_its_end():
    first: Channel[int] = Channel("tokens", 2)
    second: Channel[int] = Channel("features", 2)
    got: list[int] = []

    def read() -> None:
        for number in range(100):
            first.send(number)
        first.close()

    def work() -> None:
        for number in first:
            second.send(number * number)
        second.close()

    stages = [FakeStage("drafter-0", lambda: got.extend(second)), FakeStage("target-0", work)]
    Supervisor([stages, [FakeStage("reader-0", read)]], [first, second], LIMITS).run()
    assert got == [n * n for n in range(100)]


def test_set_up_in_order_then_on_open_then_run_in_own_threads():
    log: list[str] = []
    threads: dict[str, set[str]] = {}

    def note(name: str):
        def see() -> None:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            assert not threading.current_thread().daemon

        return see

    def locked(name: str):
        def see() -> None:
            assert SETUP_LOCK.locked()
            note(name)()

        return see

    names = ["drafter-0", "drafter-1", "target-0", "reader-0"]
    stages = [FakeStage(name, note(name), locked(name), note(name), log) for name in names]

    def on_open() -> None:
        assert threading.current_thread() is threading.main_thread()
        log.append("open")

    Supervisor([stages[:2], stages[2:3], stages[3:]], [], LIMITS, on_open=on_open).run()
    assert log[:5] == [*(f"{name} setup" for name in names), "open"]
    assert sorted(log[5:]) == sorted(f"{name} {part}" for name in names for part in ("run", "teardown"))
    assert threads == {name: {name} for name in names}


def test_threads_are_named_for_the_operating_system():
    seen: list[str] = []

    def read_name() -> None:
        seen.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip())

    stages = [FakeStage("target-0-post", read_name), FakeStage("a-name-of-more-than-15", read_name)]
    Supervisor([stages], [], LIMITS).run()
    assert sorted(seen) == ["a-name-of-more-", "target-0-post"]


def test_consumer_failure_frees_a_blocked_producer_and_is_the_error():
    channel: Channel[int] = Channel("features", 1)

    def fail() -> None:
        until_waiting(channel)
        raise KeyError("loss_mask")

    producer = FakeStage("target-0", lambda: send_for_ever(channel))
    with pytest.raises(StageFailed, match="stage 'drafter-0' failed: KeyError: 'loss_mask'") as caught:
        Supervisor([[FakeStage("drafter-0", fail)], [producer]], [channel], LIMITS).run()
    assert isinstance(caught.value.__cause__, KeyError)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)]
    assert frames[-1] == "fail"
    assert producer.log == ["target-0 setup", "target-0 run", "target-0 teardown"]
    assert not hasattr(caught.value, "__notes__")  # the producer's Cancelled is not a failure


@pytest.mark.parametrize("where", ["channel", "lanes", "slots", "meeting"])
def test_a_failure_frees_whoever_waits_anywhere_within_a_second(where):
    channel: Channel[int] = Channel("tokens", 1)
    lanes: OrderedChannel[int] = OrderedChannel("features", 1, 2)
    slots: SlotPool[int] = SlotPool("slots", [[0]])
    slots.acquire(0)
    meeting: Meeting[int, int] = Meeting("gradients", 2)
    waits: dict[str, tuple[Cancellable, Callable[[], int]]] = {
        "channel": (channel, channel.receive),
        "lanes": (lanes, lambda: lanes.receive(1)),
        "slots": (slots, lambda: slots.acquire(1)),
        "meeting": (meeting, lambda: meeting.meet(1, 0, sum)),
    }
    place, wait = waits[where]
    failed_at: list[float] = []

    def fail() -> None:
        until_waiting(place)
        failed_at.append(time.monotonic())
        raise ValueError("no")

    with pytest.raises(StageFailed, match="'reader-0' failed: ValueError: no"):
        Supervisor([[FakeStage("waits", wait)], [FakeStage("reader-0", fail)]], [place], LIMITS).run()
    assert time.monotonic() - failed_at[0] < 1.0


@pytest.mark.parametrize(
    "error", [SystemExit(0), KeyboardInterrupt(), MemoryError(), GeneratorExit(), OSError(28, "full")]
)
def test_whatever_a_stage_raises_is_a_failure(error):
    channel: Channel[int] = Channel("features", 1)
    stages = [FakeStage("drafter-0", raising(error)), FakeStage("target-0", lambda: send_for_ever(channel))]
    with pytest.raises(StageFailed, match=f"'drafter-0' failed: {type(error).__name__}") as caught:
        Supervisor([stages], [channel], LIMITS).run()
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("role", ["reader-0", "target-0", "target-0-post", "drafter-0"])
def test_the_failing_stage_is_named_whichever_it_is(role):
    """Every role in turn, the postprocess thread included, fails in the middle of a running pipeline."""
    work: Channel[int] = Channel("work", 1)
    captured: Channel[int] = Channel("target-0-out", 1)
    lanes: OrderedChannel[int] = OrderedChannel("features", 1)

    def check(name: str, number: int) -> int:
        if name == role and number == 20:
            raise RuntimeError("at number 20")
        return number

    def move(name: str, inbox: Iterable[int], send: Callable[[int], object]) -> None:
        for number in inbox:
            send(check(name, number))

    read = partial(move, "reader-0", count(), work.send)
    target = partial(move, "target-0", work, captured.send)
    post = partial(move, "target-0-post", captured, lambda number: lanes.send(number, number))
    draft = partial(move, "drafter-0", lanes, bool)
    stages = [
        FakeStage("drafter-0", draft),
        FakeStage("target-0", target),
        FakeStage("target-0-post", post),
        FakeStage("reader-0", read),
    ]
    with pytest.raises(StageFailed, match=f"stage '{role}' failed: RuntimeError: at number 20") as caught:
        Supervisor([stages], [work, captured, lanes], LIMITS).run()
    assert caught.value.stage == role


def test_failing_setup_means_nothing_runs_and_those_set_up_are_torn_down():
    log: list[str] = []
    stages = [
        FakeStage("drafter-0", log=log),
        FakeStage("target-0", on_setup=raising(OSError("no weights")), log=log),
        FakeStage("reader-0", log=log),
    ]
    opened: list[bool] = []
    with pytest.raises(StageFailed, match="'target-0' failed: OSError: no weights"):
        Supervisor([[stage] for stage in stages], [], LIMITS, on_open=lambda: opened.append(True)).run()
    assert log[:2] == ["drafter-0 setup", "target-0 setup"]
    assert sorted(log[2:]) == ["drafter-0 teardown", "target-0 teardown"]
    assert not opened


def test_failing_on_open_means_nothing_runs():
    log: list[str] = []
    with pytest.raises(LookupError, match="stance"):
        Supervisor([[FakeStage("drafter-0", log=log)]], [], LIMITS, on_open=raising(LookupError("stance"))).run()
    assert log == ["drafter-0 setup", "drafter-0 teardown"]


def test_the_first_failure_wins_and_later_ones_are_notes(caplog):
    channel: Channel[int] = Channel("features", 1)

    def fail_late() -> None:
        try:
            channel.receive()
        except Cancelled:
            raise RuntimeError("second") from None

    def fail_first() -> None:
        until_waiting(channel)
        raise ValueError("first")

    late = FakeStage("drafter-0", fail_late, on_teardown=raising(KeyError("third")))
    early = FakeStage("target-0", fail_first, on_teardown=raising(KeyError("fourth")))
    with pytest.raises(StageFailed, match="'target-0' failed: ValueError: first") as caught:
        Supervisor([[late], [early]], [channel], LIMITS).run()
    assert sorted(caught.value.__notes__) == [
        "stage 'drafter-0' failed as well: KeyError: 'third'",
        "stage 'drafter-0' failed as well: RuntimeError: second",
        "stage 'target-0' failed as well: KeyError: 'fourth'",
    ]
    assert caplog.text.count("failed as well") == 3


def test_a_failing_teardown_alone_is_a_failure():
    with pytest.raises(StageFailed, match="'drafter-0' failed: OSError"):
        Supervisor([[FakeStage("drafter-0", on_teardown=raising(OSError("flush")))]], [], LIMITS).run()


def test_except_exception_in_a_stage_cannot_swallow_cancellation():
    channel: Channel[int] = Channel("tokens", 1)

    def careless() -> None:
        while True:
            try:
                channel.receive()
            except Closed:
                return
            except Exception:
                continue

    def fail() -> None:
        until_waiting(channel)
        raise ValueError("no")

    with pytest.raises(StageFailed, match="'reader-0' failed"):
        Supervisor([[FakeStage("drafter-0", careless), FakeStage("reader-0", fail)]], [channel], LIMITS).run()


def test_a_stage_may_end_the_others_without_a_failure():
    """A drafter that was asked to stop cancels the channels in front of it."""
    channel: Channel[int] = Channel("features", 1)

    def stop_early() -> None:
        channel.receive()
        channel.cancel()

    stages = [FakeStage("drafter-0", stop_early), FakeStage("target-0", lambda: send_for_ever(channel))]
    Supervisor([stages], [channel], LIMITS).run()


def test_cancellation_during_set_up_is_a_failure_and_not_a_hang():
    channel: Channel[int] = Channel("features", 1)
    channel.cancel()
    with pytest.raises(StageFailed, match="'drafter-0' failed: Cancelled: 'features' was cancelled"):
        Supervisor([[FakeStage("drafter-0", on_setup=channel.receive)]], [channel], LIMITS).run()


def test_the_gate_names_the_late_stages():
    clock, freed = FakeClock(), threading.Event()

    def slow() -> None:
        clock.advance(61)
        supervisor.wake()
        freed.wait()

    stages = [FakeStage("drafter-0"), FakeStage("target-0", on_setup=slow), FakeStage("reader-0")]
    limits = Limits(start_timeout_s=60, stall_timeout_s=None, join_timeout_s=5)
    supervisor = Supervisor([[s] for s in stages], [], limits, progress=Progress(clock))
    ends: list[int] = []

    def hard_exit(code: int) -> None:
        ends.append(code)
        freed.set()

    def outwait() -> None:
        until(lambda: supervisor._given_up)
        clock.advance(6)
        supervisor.wake()

    helper = threading.Thread(target=outwait)
    helper.start()
    with pytest.raises(StartTimeout, match="ready after 60 s: target-0 still in setup; reader-0 not begun"):
        supervisor.run(hard_exit=hard_exit)
    helper.join()
    for thread in supervisor._threads.values():
        thread.join()
    assert ends == [1]
    assert stages[2].log == []


def test_a_stage_stuck_in_c_code_ends_the_process_with_all_stacks(capfd):
    entered, freed, ends = threading.Event(), threading.Event(), list[int]()

    def stuck_in_a_kernel() -> None:
        entered.set()
        freed.wait()

    def fail() -> None:
        entered.wait()
        raise ValueError("refused: {'HF_TOKEN': 'abc'}")

    stages = [FakeStage("drafter-0", stuck_in_a_kernel), FakeStage("target-0", fail)]
    supervisor = Supervisor([stages], [], Limits(start_timeout_s=20, stall_timeout_s=20, join_timeout_s=0.02))

    def hard_exit(code: int) -> None:
        ends.append(code)
        freed.set()

    with pytest.raises(StageFailed):
        supervisor.run(hard_exit=hard_exit)
    for thread in supervisor._threads.values():
        thread.join()
    assert ends == [1]
    err = capfd.readouterr().err
    assert re.search(
        r"drafter-0.* did not end 0.02 s after cancellation", err
    )  # a loaded machine may be late elsewhere
    assert "in stuck_in_a_kernel" in err  # the stacks
    # the failure, which would be lost otherwise, without what is secret
    assert "ValueError: refused: {'HF_TOKEN': '(hidden)'}" in err


def test_a_stall_says_who_waits_for_what():
    clock = FakeClock()
    tokens: Channel[int] = Channel("tokens", 1)
    features: OrderedChannel[int] = OrderedChannel("features", 1)

    def drive() -> None:
        """Waits for no channel; lets the clock run when the others wait, and ends when the run is given up."""
        until_waiting(tokens)
        until_waiting(features)
        progress.beat("reader-0")
        clock.advance(299)
        supervisor.wake()
        clock.advance(1)
        supervisor.wake()
        until(lambda: supervisor._given_up)

    stages = [
        FakeStage("drafter-0", features.receive),
        FakeStage("target-0", lambda: send_for_ever(tokens)),
        FakeStage("reader-0", drive),
    ]
    progress = Progress(clock)
    limits = Limits(start_timeout_s=60, stall_timeout_s=300)
    supervisor = Supervisor([stages], [tokens, features], limits, progress=progress)
    with pytest.raises(StallError) as caught:
        supervisor.run()
    message = caught.value.message
    assert message.startswith("nothing moved for 300 s: ")
    assert set(message.removeprefix("nothing moved for 300 s: ").split("; ")) == {
        "drafter-0 has waited 300 s to receive from 'features'",
        "target-0 has waited 300 s to send to 'tokens'",
        "reader-0 waits for no channel (last heartbeat 300 s ago)",
    }


@pytest.mark.parametrize("sign", ["heartbeat", "channel", "slot", "meeting"])
def test_any_progress_puts_the_stall_off(sign):
    clock = FakeClock()
    progress = Progress(clock)
    channel: Channel[int] = Channel("tokens", 100)
    slots: SlotPool[int] = SlotPool("slots", [[0] * 100])
    meeting: Meeting[int, int] = Meeting("gradients", 1)
    seqs = count()
    signs = {
        "heartbeat": lambda: progress.beat("drafter-0"),
        "channel": lambda: channel.send(0),
        "slot": lambda: slots.acquire(next(seqs)),
        "meeting": lambda: meeting.meet(0, 0, sum),
    }

    def work() -> None:
        for _ in range(5):
            clock.advance(200)
            signs[sign]()
            supervisor.wake()

    limits = Limits(start_timeout_s=60, stall_timeout_s=300)
    supervisor = Supervisor([[FakeStage("drafter-0", work)]], [channel, slots, meeting], limits, progress=progress)
    supervisor.run()
