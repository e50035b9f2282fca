"""The processes that train together: joined by torch.distributed, started by torchrun, on one host or many.

Gradients and sums go through the data group (NCCL between GPUs, gloo between CPUs), flags and start values through a
gloo group, so that no device is waited for. What the main threads tell each other once (where to resume, counts,
failures) goes through torchrun's store. A process that fails says so in the store before it ends; the others name it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from helixctl.engine.waiting import WaitRoom
from helixctl.errors import HelixError, Interrupted
from helixctl.lm_plan import AnyPlan
from helixctl.machine import World
from helixctl.training.roll_call import NotAllCame, call_roll

_LOOK_S = 0.25
"""Between two looks at whether the others are alive, while the main thread waits for what they will say."""
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_FIND_OUT_S = 2.0
"""For the process that failed to have said so, once a connection to it broke."""


_LAST_WORDS_S = 1.0
"""For the others to read why rank 0 failed, where the store is its own and not torchrun's."""


class ProcessLost(HelixError):
    """Another process of the run failed, was killed, or does not answer."""


class Processes(Protocol):
    """How a process works with the others of its run."""

    @property
    def world(self) -> World:
        """Which of how many this one is."""

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace float32 tensors, all on one device, by their sums over the processes. Called by one thread."""

    def any(self, flag: bool) -> bool:
        """True in all processes if it is true in one. Called by the thread that calls ``sum_``."""

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors by those of rank 0."""

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What ``make`` returned in rank 0, plain JSON values; it is called nowhere else."""

    def gather(self, value: Any) -> list[Any]:
        """The plain JSON values of all processes in the order of their ranks; returns when all have come."""


class OneProcess:
    """A run of one process."""

    world = World()

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """The sum over one."""

    def any(self, flag: bool) -> bool:
        """The flag itself."""
        return flag

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """They are the first one's."""

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What ``make`` returns."""
        return make()

    def gather(self, value: Any) -> list[Any]:
        """The value alone."""
        return [value]


class ProcessGroup:
    """Several processes. Use ``joined_processes``.

    Args:
        world: which of how many this one is.
        store: reaches all of them.
        timeout_s: for the others to say what is waited for.
    """

    def __init__(self, world: World, store: Store, timeout_s: float) -> None:
        self.world = world
        self.name = "processes"
        self.room = WaitRoom(self.name)
        self._store = store
        self._timeout_s = timeout_s
        self._buffer: Tensor | None = None
        self._data: dist.ProcessGroup | None = None
        self._control: dist.ProcessGroup | None = None
        self._turn = 0
        self._peers: list[_Peer] = []
        self._peers = [_Peer(**peer) for peer in self.gather(_describe(psutil.Process()))]

    def connect(self, device: torch.device, timeout_s: float) -> None:
        """Make the groups; ``timeout_s`` is how long one process may wait for the others in a sum."""
        rank, size, timeout = self.world.rank, self.world.size, timedelta(seconds=timeout_s)
        backend = "nccl" if device.type == "cuda" else "gloo"
        with self._explained("connecting the processes"):
            dist.init_process_group(
                backend, store=PrefixStore("groups", self._store), rank=rank, world_size=size, timeout=timeout
            )
            self._data = dist.group.WORLD
            self._control = self._data if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """One flat buffer, one reduction; its order depends on the number of processes only."""
        total = sum(t.numel() for t in tensors)
        if self._buffer is None or self._buffer.numel() < total:
            self._buffer = torch.empty(total, dtype=torch.float32, device=tensors[0].device)
        flat, parts = self._buffer[:total], [t.reshape(-1) for t in tensors]
        torch.cat(parts, out=flat)
        with self._waiting("to add up with the other processes"):
            dist.all_reduce(flat, group=self._data)
        torch._foreach_copy_(parts, list(flat.split([p.numel() for p in parts])))

    def any(self, flag: bool) -> bool:
        """Through the gloo group: no device is waited for."""
        value = torch.tensor([int(flag)], dtype=torch.int32)
        with self._waiting("for the other processes at the end of a step"):
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self._control)
        return bool(value)

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Through main memory; at the start only."""
        for tensor in tensors:
            copy = tensor.detach().cpu().contiguous()
            with self._waiting("for the first process's weights"):
                dist.broadcast(copy, 0, group=self._control)
            tensor.detach().copy_(copy)

    def from_first(self, make: Callable[[], Any]) -> Any:
        """See ``Processes``.

        Raises:
            ProcessLost: rank 0 failed, or says nothing.
        """
        self._turn += 1
        key = f"first/{self._turn}"
        if self.world.rank == 0:
            self._store.set(key, json.dumps(make()))
        return self._await(key, 0)

    def gather(self, value: Any) -> list[Any]:
        """See ``Processes``.

        Raises:
            ProcessLost: a process failed, or says nothing.
        """
        self._turn += 1
        self._store.set(f"all/{self._turn}/{self.world.rank}", json.dumps(value))
        return [self._await(f"all/{self._turn}/{rank}", rank) for rank in range(self.world.size)]

    def announce(self, error: BaseException) -> None:
        """Tell the others why this process ends."""
        if _is_own(error):
            with suppress(Exception):  # the store may be gone with the process that held it
                self._store.set(f"failed/{self.world.rank}", _first_line(error))
        self.leave()
        if _is_own(error) and self.world.rank == 0 and os.environ.get(_AGENT_STORE) != str(True):
            others = [f"heard/{rank}" for rank in range(1, self.world.size)]
            with suppress(Exception):  # the store ends with this process: give the others time to read
                self._store.wait(others, timedelta(seconds=_LAST_WORDS_S))

    def cancel(self) -> None:
        """End every wait of the stages for other processes."""
        self.room.cancel()
        self.leave()

    def leave(self) -> None:
        """Close the connections; the others' waits for this process fail."""
        groups, self._data, self._control = {self._data, self._control}, None, None
        for group in groups - {None}:
            with suppress(Exception):  # it may have failed by itself
                group.abort()  # type: ignore[union-attr]
        if groups != {None}:
            with suppress(Exception):
                dist.destroy_process_group()

    def _await(self, key: str, rank: int) -> Any:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                self._store.wait([key], timedelta(seconds=_LOOK_S))
                return json.loads(self._store.get(key))
            except dist.DistStoreError:
                lost = self._find_lost()
                if lost is None and time.monotonic() > deadline:
                    lost = f"rank {rank} did not answer for {self._timeout_s:g} s"
                if lost is not None:
                    raise self._error(lost) from None
            except (dist.DistNetworkError, RuntimeError) as error:
                raise self._error(self._find_lost() or f"the store is gone: {_first_line(error)}") from error

    @contextmanager
    def _waiting(self, action: str) -> Iterator[None]:
        with self.room.waiting(action, "processes"), self._explained("the connection"):
            yield

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn what torch.distributed raises into the name of the process that is gone."""
        try:
            yield
        except RuntimeError as error:
            with self.room:
                self.room.check()  # cancelled: not the other's fault
            deadline = time.monotonic() + _FIND_OUT_S
            while (lost := self._find_lost()) is None and time.monotonic() < deadline:
                threading.Event().wait(_LOOK_S / 10)  # a death is no event; nothing else waits for this thread
            raise self._error(lost or f"{what} broke: {_first_line(error)}") from error

    def _find_lost(self) -> str | None:
        """Who failed, by what it said or by its absence from this host."""
        others = [(rank, peer) for rank, peer in enumerate(self._peers) if rank != self.world.rank]
        with suppress(Exception):  # the store may be gone too
            for rank, peer in others:
                if self._store.check([f"failed/{rank}"]):
                    reason = self._store.get(f"failed/{rank}").decode()
                    return f"rank {rank} (process {peer.pid} on {peer.host}) failed: {reason}"
        for rank, peer in others:
            if peer.is_near and not peer.is_alive():
                return f"rank {rank} (process {peer.pid} on {peer.host}) is gone: killed, or it crashed"
        return None

    def _error(self, lost: str) -> ProcessLost:
        me = f"rank {self.world.rank} of {self.world.size}"
        with suppress(Exception):
            self._store.set(f"heard/{self.world.rank}", "")
        return ProcessLost(f"{me} stops: {lost}", fix="look at the messages of that process; go on with --resume")


@contextmanager
def joined_processes(plan: AnyPlan) -> Iterator[Processes]:
    """Join the processes of the plan's world, and part from them at the end.

    Raises:
        ProcessLost: they did not all come within ``pipeline.start_timeout_s``.
    """
    if plan.world.size == 1:
        yield OneProcess()
        return
    options = plan.recipe.pipeline
    timeout = timedelta(seconds=options.start_timeout_s)
    try:
        shared, _, _ = next(iter(rendezvous("env://", timeout=timeout)))
        store = call_roll(PrefixStore("helixctl", shared), plan.world, options.start_timeout_s)
    except (RuntimeError, ValueError, NotAllCame) as error:
        fix = "start the run with torchrun; MASTER_ADDR and MASTER_PORT must be reachable from every host"
        raise ProcessLost(f"the processes cannot find each other: {_first_line(error)}", fix=fix) from error
    group = ProcessGroup(plan.world, store, options.start_timeout_s)
    try:
        group.connect(torch.device(plan.trainer_devices[0]), options.stall_timeout_s)
        yield group
    except BaseException as error:
        group.announce(error)
        raise
    finally:
        group.leave()


class _Peer:
    """Another process, as its host's process table shows it."""

    def __init__(self, host: str, pid: int, namespace: str, started_at: float) -> None:
        self.host = host
        self.pid = pid
        self.is_near = (host, namespace) == (socket.gethostname(), _pid_namespace())
        self._started_at = started_at

    def is_alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self._started_at and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def _describe(process: psutil.Process) -> dict[str, Any]:
    place = {"host": socket.gethostname(), "namespace": _pid_namespace()}
    return {**place, "pid": process.pid, "started_at": process.create_time()}


def _pid_namespace() -> str:
    """Two containers may share a name, and then not their process numbers."""
    return os.readlink("/proc/self/ns/pid")


def _is_own(error: BaseException) -> bool:
    """Whether this process failed by itself, and not because another one did."""
    return not isinstance(error, Interrupted) and not isinstance(error.__cause__ or error, ProcessLost)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
