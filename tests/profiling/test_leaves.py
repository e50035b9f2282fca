from __future__ import annotations

from collections import Counter

import pytest

from helixctl.profiling.leaves import classify, is_wait, shares, top_frames, waiting_frames

CHANNEL = (
    "run (helixctl/training/stages.py:90)",
    "wait_until (helixctl/engine/waiting.py:83)",
    "wait (threading.py:327)",
)
QUALIFIED = (*CHANNEL[:1], "WaitRoom.wait_until (helixctl/engine/waiting.py:83)", "Condition.wait (threading.py:327)")
LOCK = ("run (a.py:1)", "Condition.wait (threading.py:327)")
OPERATION = ("TargetStage.run (helixctl/training/stages.py:95)", "linear (torch/nn/functional.py:20)")
LAUNCH = (
    "at::native::gpu_kernel (libtorch_cuda.so)",
    "cudaLaunchKernel (libcudart.so.12)",
    "0x7f21 (libcuda.so.535.104.05)",
    "0x7f22 (libcuda.so.535.104.05)",
)
"""The driver comes without symbols."""


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        (CHANNEL, "wait.channel"),
        (QUALIFIED, "wait.channel"),
        (LOCK, "wait.lock"),
        (("run (a.py:1)", "get (queue.py:171)"), "wait.queue"),
        (("run (a.py:1)", "Mailbox._wait (helixctl/engine/mailbox.py:67)"), "wait.queue"),
        (("run (a.py:1)", "hrtimer_nanosleep"), "wait.sleep"),
        (("run (a.py:1)", "fsync (atomic.py:3)"), "io"),
        (("run (a.py:1)", "cudaLaunchKernel (libcudart.so.12)"), "cuda.launch"),
        (("run (a.py:1)", "cudaStreamSynchronize (libcudart.so.12)"), "cuda.sync"),
        (("run (a.py:1)", "synchronize (torch/cuda/streams.py:97)"), "cuda.sync"),
        (("run (a.py:1)", "c10::cuda::CUDACachingAllocator::malloc (libc10_cuda.so)"), "cuda.alloc"),
        (("run (a.py:1)", "cudaMemcpyAsync (libcudart.so.12)"), "cuda.copy"),
        (("run (a.py:1)", "compile (torch/_dynamo/eval_frame.py:1)", "x (sympy/core.py:3)"), "compile"),
        (OPERATION, "torch"),
        ((*OPERATION, *LAUNCH), "cuda.launch"),
        ((*OPERATION, *LAUNCH, "pthread_mutex_lock (libc.so.6)"), "cuda.launch"),
        ((*OPERATION, "at::native::empty (libtorch_cpu.so)", "0x7fc5cd8a4193 (libc.so.6)"), "torch"),
        (("run (a.py:1)", "PyEval_RestoreThread (libpython3.11.so.1.0)", "0x7fc5 (libc.so.6)"), "wait.gil"),
        (("run (a.py:1)", "take_gil (libpython3.11.so.1.0)", "pthread_cond_timedwait (libc.so.6)"), "wait.gil"),
        (("run (a.py:1)", "PyThread_acquire_lock_timed (libpython3.11.so.1.0)", "0x7fc5 (libc.so.6)"), "wait.lock"),
        (("run (a.py:1)", "select_poll_poll_impl (selectmodule.c:655)", "poll (libc.so.6)"), "wait.queue"),
        (("linear (torch/nn/functional.py:20)", "fold (a.py:3)", "_PyEval_Frame (libpython3.11.so.1.0)"), "python"),
        (("run (a.py:1)", "encode (tokenizers/__init__.py:1)"), "tokenize"),
        (("run (a.py:1)", "spin (a.py:5)"), "python"),
        ((), "python"),
    ],
)
def test_the_leaf_tells_what_a_thread_does(frames, name):
    assert classify(frames) == name


def test_shares_add_up():
    found = shares(Counter({CHANNEL: 60, OPERATION: 30, ("spin (a.py:5)",): 10}))
    assert found == {"wait.channel": 0.6, "torch": 0.3, "python": 0.1}
    assert [name for name in found if is_wait(name)] == ["wait.channel"]
    assert shares(Counter()) == {}


def test_top_frames_leave_waiting_out_and_name_the_caller_of_an_operation():
    found = top_frames(Counter({CHANNEL: 60, OPERATION: 30, ("spin (a.py:5)",): 10}))
    assert found == [(f"{OPERATION[1]} <- {OPERATION[0]}", 0.3), ("spin (a.py:5)", 0.1)]


def test_who_waits_outside_the_channels_is_named():
    assert waiting_frames(Counter({CHANNEL: 60, LOCK: 40})) == [("run (a.py:1)", 0.4)]
