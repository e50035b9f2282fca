"""Traces of kernels made by hand, in the form that torch.profiler writes; a real one on a GPU where there is one."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixctl.profiling.bottleneck import judge
from helixctl.profiling.cuda import CudaUse, call_kind, read_trace
from helixctl.profiling.cuda_request import TraceRequest
from helixctl.training.cuda_trace import NO_GPU, TRACE, traced_on_request
from tests.engine.threads import until
from tests.profiling.subjects import TARGET_BOUND, facts, stage_facts

TARGET, DRAFTER, BACKWARD = 100, 101, 102
OWNERS = {TARGET: "target-0", DRAFTER: "drafter-0", BACKWARD: "drafter-0"}


class Trace:
    """Events as they come; instants and lengths in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._count = 0

    def range(self, name: str, start: float, end: float, thread: int = TARGET) -> None:
        self._add("user_annotation", name, start, end, thread)

    def call(self, name: str, start: float, end: float, thread: int = TARGET) -> int:
        self._count += 1
        self._add("cuda_runtime", name, start, end, thread, correlation=self._count)
        return self._count

    def kernel(self, start: float, end: float, correlation: int, device: int = 0) -> None:
        self._add("kernel", "gemm", start, end, 7, correlation=correlation, device=device, stream=7)

    def launch(self, at: float, start: float, end: float, thread: int = TARGET, device: int = 0) -> None:
        """A call of 2 µs that ends before its kernel starts."""
        self.kernel(start, end, self.call("cudaLaunchKernel", at, at + 2, thread), device)

    def read(self) -> CudaUse:
        use = read_trace(self.events, lambda thread: OWNERS.get(thread, "other"))
        assert use is not None
        return use

    def _add(self, category: str, name: str, start: float, end: float, thread: int, **args: int) -> None:
        event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "tid": thread}
        self.events.append({**event, "args": args})


def small_kernels(gap_us: float, kernel_us: float, count: int = 50) -> Trace:
    """A stage at work that launches a kernel every ``gap_us``, which starts 3 µs later or behind its forerunner."""
    trace, free_at = Trace(), 0.0
    for i in range(count):
        at = i * gap_us
        start = max(at + 3, free_at)
        free_at = start + kernel_us
        trace.launch(at, start, free_at)
    trace.range("target-0", -1, free_at + 1)
    return trace


def test_a_gpu_that_waits_for_launches_of_a_stage_at_work():
    use = small_kernels(gap_us=20, kernel_us=4).read()
    (device,), target = use.devices, use.stages["target-0"]
    assert device.busy_share == pytest.approx(0.2, abs=0.01)
    assert device.idle_shares["launch"] == pytest.approx(0.8, abs=0.02)
    assert target.idle_shares["launch"] == device.idle_shares["launch"]
    assert target.call_shares["launch"] == pytest.approx(0.1, abs=0.01)
    assert target.kernels_per_s == pytest.approx(50_000, rel=0.03) and target.mean_kernel_us == pytest.approx(4)
    assert use.busy_share(["target-0"]) == device.busy_share and use.busy_share(["reader-0"]) is None


def test_kernels_that_queue_leave_no_idle_time():
    (device,) = small_kernels(gap_us=5, kernel_us=40).read().devices
    assert device.busy_share > 0.99 and device.idle_shares["launch"] == 0


def test_between_two_micro_batches_a_gpu_waits_for_work_and_not_for_launches():
    trace = Trace()
    trace.launch(0, 3, 10)
    trace.range("target-0", 0, 9)
    trace.launch(101, 104, 110)  # its range began after the GPU had fallen idle
    trace.range("target-0", 100, 111)
    idle = trace.read().stages["target-0"].idle_shares
    assert set(idle) == {"work"} and idle["work"] == pytest.approx(94 / 110)


def test_what_was_launched_before_waits_for_the_device():
    trace = Trace()
    trace.launch(0, 3, 10)
    trace.launch(4, 50, 60)
    trace.range("target-0", 0, 61)
    (device,) = trace.read().devices
    assert device.idle_shares == {"launch": 0, "work": 0, "device": pytest.approx(40 / 60)}


def test_the_backward_on_a_native_thread_counts_to_its_drafter_and_its_device():
    trace = Trace()
    trace.range("drafter-0 train", 0, 100, DRAFTER)
    trace.launch(0, 3, 10, DRAFTER, device=1)
    trace.launch(48, 51, 60, BACKWARD, device=1)
    trace.launch(0, 3, 90, TARGET, device=0)
    use = trace.read()
    assert use.stages["drafter-0"].devices == (1,) and use.stages["target-0"].devices == (0,)
    assert use.stages["drafter-0"].idle_shares == {"launch": pytest.approx(41 / 90)}
    assert [device.device for device in use.devices] == [0, 1]


def test_kernels_of_a_captured_graph_have_one_launch_and_calls_inside_calls_count_once():
    trace = Trace()
    launched = trace.call("cudaGraphLaunch", 0, 10)
    trace._add("cuda_driver", "cuGraphLaunch", 1, 9, TARGET)
    for i in range(5):
        trace.kernel(12 + 10 * i, 22 + 10 * i, launched)
    trace.call("cudaStreamSynchronize", 10, 62)
    use = trace.read().stages["target-0"]
    assert use.call_shares == {"launch": pytest.approx(10 / 62), "sync": pytest.approx(52 / 62)}
    assert use.kernels_per_s == pytest.approx(5 / 62e-6)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudaLaunchKernelExC", "launch"),
        ("cuLaunchKernelEx", "launch"),
        ("cudaDeviceSynchronize", "sync"),
        ("cudaStreamWaitEvent", "other"),
        ("cudaMallocAsync", "alloc"),
        ("cudaFreeHost", "alloc"),
        ("cuMemSetAccess", "alloc"),
        ("cuMemsetD32Async", "other"),
        ("cudaMemcpyAsync", "copy"),
        ("cudaEventRecord", "other"),
    ],
)
def test_kinds_of_calls(name: str, kind: str):
    assert call_kind(name) == kind


TASKS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12), st.integers(0, 20)), min_size=1, max_size=25)


@given(tasks=TASKS, work=st.tuples(st.integers(0, 40), st.integers(1, 60)))
def test_busy_and_idle_equal_a_count_microsecond_by_microsecond(
    tasks: list[tuple[int, int, int]], work: tuple[int, int]
):
    trace = Trace()
    trace.range("target-0", work[0], sum(work))
    for start, length, early in tasks:
        trace.launch(start - early - 2, start, start + length)
    (device,) = trace.read().devices
    first, last = min(s - e - 2 for s, _, e in tasks), max(s + n for s, n, _ in tasks)
    began = min(s for s, _, _ in tasks)
    kinds = {"busy": 0, "launch": 0, "work": 0, "device": 0}
    idle_from = began
    for instant in range(began, last):
        if any(s <= instant < s + n for s, n, _ in tasks):
            kinds["busy"] += 1
            idle_from = instant + 1
            continue
        s, _, early = min((task for task in tasks if task[0] > instant), key=lambda task: task[0])
        launched = s - early <= idle_from
        kinds["device" if launched else "launch" if work[0] <= idle_from < sum(work) else "work"] += 1
    ties = len({s for s, _, _ in tasks}) < len(tasks)  # which of two that start together ends an idle stretch is open
    assert device.busy_share == pytest.approx(kinds.pop("busy") / (last - first))
    assert sum(device.idle_shares.values()) == pytest.approx(sum(kinds.values()) / (last - first))
    if not ties:
        assert device.idle_shares == {kind: pytest.approx(n / (last - first)) for kind, n in kinds.items()}


def test_what_was_recorded_before_the_stretch_asked_for_is_left_out():
    trace = small_kernels(gap_us=20, kernel_us=4, count=50)
    use = read_trace(trace.events, lambda thread: OWNERS[thread], last_s=500e-6)
    assert use is not None and use.seconds == pytest.approx(500e-6, rel=0.05)
    assert use.devices[0].num_kernels == 25
    assert use.devices[0].idle_shares["launch"] == pytest.approx(0.8, abs=0.03)


def test_no_kernels_are_no_trace():
    assert read_trace([], lambda thread: "") is None
    trace = Trace()
    trace.call("cudaMalloc", 0, 5)
    assert read_trace(trace.events, lambda thread: "") is None


def traced(trace: Trace) -> dict[str, Any]:
    use = trace.read()
    stages = {
        name: stage_facts(name, cuda=use.stages.get(name), on_cpu_share=0.9).with_measured_calls()
        for name in ("target-0", "drafter-0")
    }
    return {"stages": stages, "cuda": use}


def test_the_verdict_rests_on_the_trace_where_there_is_one():
    verdict = judge(facts(TARGET_BOUND, **traced(small_kernels(gap_us=20, kernel_us=4))))
    assert verdict.cause is not None and (verdict.cause.code, verdict.cause.title) == ("V1b", "launch-bound")
    assert verdict.cause.numbers["gpu_idle_for_launches_share"] == pytest.approx(0.8, abs=0.02)
    assert not any("--cuda" in what for what in verdict.unknown)
    full = judge(facts(TARGET_BOUND, **traced(small_kernels(gap_us=5, kernel_us=40))))
    assert full.cause is not None and full.cause.code == "V1a"


def test_a_trace_that_slowed_the_run_down_is_not_taken_for_exact():
    verdict = judge(facts(TARGET_BOUND, **traced(small_kernels(20, 4)), cuda_slowdown_share=0.3))
    assert any("30 % slower while they were traced" in what for what in verdict.unknown)


def ask(run_dir: Path, seconds: float = 0.01) -> Any:
    request = TraceRequest(run_dir, seconds)
    answers: list[Any] = []

    def answered() -> bool:
        answers.append(request.answer())
        return answers[-1] is not None

    until(answered)
    return answers[-1]


def test_a_run_without_a_gpu_answers_why_there_is_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with traced_on_request(tmp_path):
        assert ask(tmp_path).problem == NO_GPU
        assert ask(tmp_path).problem == NO_GPU  # and again, if asked again
    assert threading.active_count() == 1 or all(t.name != "cuda-trace" for t in threading.enumerate())


def test_a_profiler_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr("helixctl.training.cuda_trace.trace", fail)
    with traced_on_request(tmp_path):
        assert "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES" in ask(tmp_path).problem


def test_a_trace_is_read_from_beside_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def write(path: Path, seconds: float, ended: threading.Event) -> dict[str, Any]:
        path.write_text(json.dumps({"traceEvents": small_kernels(20, 4).events}))
        return {"problem": None}

    monkeypatch.setattr("helixctl.training.cuda_trace.trace", write)
    with traced_on_request(tmp_path):
        found = ask(tmp_path)
    assert len(found.events) == 101 and found.text == (tmp_path / TRACE).read_bytes()


@pytest.mark.gpu
def test_gpu_tiny_kernels_of_a_thread_are_launch_bound_and_big_ones_are_not(tmp_path: Path):
    import torch

    def shares(size: int) -> CudaUse:
        ended, native = threading.Event(), []

        def work() -> None:
            native.append(threading.get_native_id())
            x = torch.randn(size, size, device="cuda")
            while not ended.is_set():
                with torch.profiler.record_function("target-0"):
                    for _ in range(200):
                        x = torch.tanh(x)
                    torch.cuda.current_stream().synchronize()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            until(lambda: torch.cuda.is_initialized())
            with traced_on_request(tmp_path):
                found = ask(tmp_path, 0.5)
        finally:
            ended.set()
            thread.join()
        use = read_trace(found.events, lambda tid: "target-0" if tid in native else "other")
        assert found.problem is None and use is not None and "target-0" in use.stages, found.problem
        return use

    tiny, big = shares(8), shares(8192)
    assert tiny.stages["target-0"].idle_shares.get("launch", 0.0) > 0.3, tiny
    assert big.devices[0].busy_share > 0.8, big
