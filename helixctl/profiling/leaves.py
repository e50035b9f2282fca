"""What a thread was doing when it was seen, by the innermost frames of its stack.

The table knows Python's names, and the symbols that py-spy shows with ``--native``. Order matters: the first that
matches decides. Waiting for one of our channels is told apart from all other waiting. Below a symbol that says what is
going on (``cudaLaunchKernel``) native stacks have frames that say nothing, as the driver and the C library come without
symbols: the innermost frame that says something decides, and a CUDA call inside of which a lock is taken stays one, as
does a wait for the GIL.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping

from helixctl.profiling.pyspy import Frames

CHANNEL = "wait.channel"
GIL = "wait.gil"
"""Seen in native stacks only."""
PYTHON = "python"
TORCH = "torch"

_ANYWHERE = (
    (CHANNEL, re.compile(r"wait_until \(.*waiting\.py")),
    ("compile", re.compile(r"torch[/._]_(dynamo|inductor)|/triton/")),
)
"""Looked for in the whole stack."""

_LEAF = (
    (
        "wait.queue",
        re.compile(
            r"(^|\.)_?(get|put|get_nowait|wait|recv_bytes|recv|poll|select) \(.*(queue|mailbox|selectors|connection)"
        ),
    ),
    ("wait.sleep", re.compile(r"(^|[._])(nano)?sleep\b")),
    (
        "wait.lock",
        re.compile(r"(^|\.)(wait|wait_for|join|acquire|_wait_for_tstate_lock|_shutdown|__enter__) \(.*threading\.py"),
    ),
    (GIL, re.compile(r"^(take_gil|PyEval_(RestoreThread|AcquireThread))\b")),
    ("wait.lock", re.compile(r"futex|pthread_(cond|mutex)|sem_(timed|clock)?wait|PyThread_acquire_lock")),
    ("wait.queue", re.compile(r"^(p?poll|epoll_wait|select) \(lib")),
    ("cuda.sync", re.compile(r"cuda\w*Synchronize|cuStreamSynchronize|cuEventSynchronize")),
    ("cuda.sync", re.compile(r"(^|\.)(synchronize|item|cpu|tolist) \(")),
    ("cuda.launch", re.compile(r"cudaLaunch\w*|cuLaunch\w*|cudaGraphLaunch")),
    ("cuda.alloc", re.compile(r"CUDACachingAllocator|cuda(Host)?(Malloc|Free)|cuMem(Alloc|Free)|empty_cache")),
    ("cuda.copy", re.compile(r"cudaMemcpy|cuMemcpy")),
    ("nccl", re.compile(r"nccl|ProcessGroupNCCL", re.IGNORECASE)),
    ("tokenize", re.compile(r"tokeniz", re.IGNORECASE)),
    ("gc", re.compile(r"(^|\.)(gc_collect|collect \(.*\bgc)")),
    (
        "io",
        re.compile(r"(^|\.)(read|write|fsync|recv|send|readinto|pread|open) \((?!.*threading)|^__(GI_)?_?(read|write)"),
    ),
    (TORCH, re.compile(r"\(.*\btorch/|\(torch[/.]|at::native|\btorch::|\(lib(torch|c10)")),
)
"""Looked for in the innermost frame, and with native stacks in all frames below the innermost one of Python's."""

_NATIVE = re.compile(r"\((lib[^/]*|[^/()]*)\.so[.\d]*\)$|^0x[0-9a-f]+ \(")
"""A frame without a Python file."""

_FRAMES_OF_WAITING = re.compile(r"\((threading|queue|selectors)\.py")


def classify(frames: Frames) -> str:
    """The class of a stack: wait.*, io, cuda.*, nccl, compile, tokenize, gc, torch, or python."""
    for name, pattern in _ANYWHERE:
        if any(pattern.search(frame) for frame in reversed(frames)):
            return name
    classes = [_class_of(frame) for frame in _innermost(frames)]
    telling = next((name for name in classes if name.startswith(("cuda.", "nccl", GIL))), None)
    return telling or next((name for name in classes if name != PYTHON), PYTHON)


def _innermost(frames: Frames) -> list[str]:
    """Native frames from the innermost one outwards, and the Python frame that called them."""
    found = []
    for frame in reversed(frames):
        found.append(frame)
        if not _NATIVE.search(frame):
            break
    return found


@functools.lru_cache(100_000)
def _class_of(frame: str) -> str:
    return next((name for name, pattern in _LEAF if pattern.search(frame)), PYTHON)


def is_wait(name: str) -> bool:
    """True for classes in which a thread asks for no core."""
    return name == "io" or name.startswith("wait.")


def shares(stacks: Mapping[Frames, int]) -> dict[str, float]:
    """Share of the samples of each class, largest first."""
    counts: Counter[str] = Counter()
    for frames, count in stacks.items():
        counts[classify(frames)] += count
    total = sum(counts.values())
    return {name: count / total for name, count in counts.most_common()} if total else {}


def top_frames(stacks: Mapping[Frames, int], limit: int = 5) -> list[tuple[str, float]]:
    """The frames in which the thread itself spends most time, waits left out, with their share of all samples.

    A frame of the standard library or of torch says little, so the frame that called it is named too.
    """
    counts: Counter[str] = Counter()
    total = 0
    for frames, count in stacks.items():
        total += count
        if frames and not is_wait(classify(frames)):
            counts[_label(frames)] += count
    return [(frame, count / total) for frame, count in counts.most_common(limit)]


def waiting_frames(stacks: Mapping[Frames, int], limit: int = 3) -> list[tuple[str, float]]:
    """Who waits outside the pipeline's channels: the innermost frame above the waiting itself, with its share."""
    counts: Counter[str] = Counter()
    total = 0
    for frames, count in stacks.items():
        total += count
        kind = classify(frames)
        if is_wait(kind) and kind != CHANNEL:
            own = [frame for frame in frames if not _FRAMES_OF_WAITING.search(frame)]
            counts[own[-1] if own else frames[-1]] += count
    return [(frame, count / total) for frame, count in counts.most_common(limit)]


def _label(frames: Frames) -> str:
    leaf = frames[-1]
    if classify(frames) != TORCH:
        return leaf
    own = next((frame for frame in reversed(frames) if "torch/" not in frame and "torch." not in frame), None)
    return f"{leaf} <- {own}" if own and own != leaf else leaf
