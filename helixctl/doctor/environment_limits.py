"""Checks of `--env`: what the kernel, a container or a file system may run out of."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from helixctl import cgroups
from helixctl.doctor.environment_host import UNLIMITED, Host, existing_parent
from helixctl.doctor.probe import Verdict, fail, ok, warn

_GIB = 1 << 30
SHM_BYTES = _GIB
FILES, THREADS, LOCKED_BYTES = 4096, 4096, 64 << 20
CACHE_BYTES, DISK_BYTES = 2 * _GIB, 10 * _GIB
_REMOTE = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "glusterfs", "fuse.sshfs", "9p", "afs")


def check_shared_memory(host: Host) -> Verdict:
    """Loader processes and NCCL pass tensors through it, and die with a bus error when it is full."""
    folder = host.root / "dev/shm"
    if not folder.is_dir():
        return warn("there is no /dev/shm: loader processes and NCCL need it", "mount a tmpfs there")
    space = host.space(folder)
    if space.total_bytes < SHM_BYTES:
        return warn(f"/dev/shm has {_size(space.total_bytes)}", "docker run --shm-size=8g, or --ipc=host")
    if space.free_bytes < SHM_BYTES // 4:
        return warn(f"/dev/shm has only {_size(space.free_bytes)} left", "remove what ended processes left in /dev/shm")
    return ok(f"/dev/shm has {_size(space.free_bytes)} of {_size(space.total_bytes)} free")


def check_open_files(host: Host) -> Verdict:
    """Loader processes need a descriptor per tensor in flight."""
    limit = host.limit("Max open files")
    if limit is not None and limit < FILES:
        return warn(f"{limit} open files at most (ulimit -n)", "ulimit -n 65536; docker run --ulimit nofile=65536")
    return ok(f"{_count(limit)} open files (ulimit -n)")


def check_threads(host: Host) -> Verdict:
    """Threads count as processes; every library has a pool."""
    limit = host.limit("Max processes")
    if limit is not None and limit < THREADS:
        return warn(f"{limit} processes and threads at most (ulimit -u)", "ulimit -u 65536")
    pids = cgroups.process_limit(host.root)
    if pids is not None and pids < THREADS:
        fix = "docker run --pids-limit=-1; systemd: TasksMax=infinity"
        return warn(f"the container allows {pids} processes and threads", fix)
    return ok(f"{_count(limit)} processes and threads (ulimit -u)")


def check_locked_memory(host: Host) -> Verdict:
    """InfiniBand registers its buffers as locked memory; pinned memory of CUDA does not count."""
    limit = host.limit("Max locked memory")
    cards = host.root / "sys/class/infiniband"
    if limit is not None and limit < LOCKED_BYTES and cards.is_dir() and any(cards.iterdir()):
        text = f"{_size(limit)} of locked memory (ulimit -l), and there are InfiniBand cards"
        return warn(text, "ulimit -l unlimited; docker run --ulimit memlock=-1")
    return ok(f"{'unlimited' if limit is None or limit >= UNLIMITED else _size(limit)} locked memory (ulimit -l)")


def check_cpu_budget(host: Host) -> Verdict:
    """A quota smaller than the affinity mask stops all threads together when it is used up."""
    cpus, quota = host.num_cpus, host.cpu_quota
    if quota is not None and quota < cpus:
        fix = "raise the container's CPU limit, or pin it to whole cores (docker run --cpuset-cpus)"
        return warn(f"{cpus} cores may be used, but only {quota:g} cores' worth of time", fix)
    return ok(f"{cpus} cores{'' if quota is None else f', quota {quota:g}'}")


def check_compile_cache(host: Host) -> Iterator[Verdict]:
    """Where torch.compile and Triton keep what they compiled."""
    for name, folder in cache_folders(host).items():
        parent = existing_parent(folder)
        fix = f"set {name} to a folder on a local disk"
        if not os.access(parent, os.W_OK | os.X_OK):
            yield fail(f"{folder} cannot be written", fix)
        elif (kind := file_system(host, parent)) in _REMOTE:
            yield warn(f"{folder} is on {kind}: slow, and locks may fail", fix)
        elif (space := host.space(folder)).free_bytes < CACHE_BYTES:
            yield warn(f"{folder} has only {_size(space.free_bytes)} left", fix)
        else:
            yield ok(f"{folder} can be written, {_size(space.free_bytes)} free")


def check_compiler(host: Host) -> Verdict:
    """torch.compile builds C++ on a CPU, and Triton its launchers everywhere."""
    import shutil

    wanted = [word for name in ("CC", "CXX") if (word := host.environ.get(name))]
    found = [path for name in [*wanted, "gcc", "cc", "clang"] if (path := shutil.which(name))]
    return (
        ok(found[0]) if found else warn("there is no C compiler: torch.compile cannot work", "apt-get install gcc g++")
    )


def check_disk(host: Host) -> Iterator[Verdict]:
    """Room here and for temporary files."""
    for folder in dict.fromkeys((Path.cwd(), Path(tempfile.gettempdir()))):
        space = host.space(folder)
        text = f"{folder} has {_size(space.free_bytes)} free"
        if space.free_bytes < DISK_BYTES:
            yield warn(text, "make room; `--recipe` says how much the checkpoints of a recipe need")
        else:
            yield ok(text)


def cache_folders(host: Host) -> dict[str, Path]:
    """Folders of compiled code by the variable that moves them."""
    home = Path(host.environ.get("HOME", str(Path.home())))
    inductor = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    defaults = {"TORCHINDUCTOR_CACHE_DIR": inductor, "TRITON_CACHE_DIR": home / ".triton/cache"}
    return {name: Path(host.environ.get(name) or folder) for name, folder in defaults.items()}


def file_system(host: Host, path: Path) -> str:
    """Type of the file system that holds an existing path; empty where it is not listed."""
    place, best, kind = path.resolve(), -1, ""
    for line in host.read("proc/self/mounts").splitlines():
        words = line.split()
        mount = Path(words[1].replace("\\040", " "))
        if (mount == place or mount in place.parents) and len(mount.parts) >= best:
            best, kind = len(mount.parts), words[2]
    return kind


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / 2**20:.0f} MiB"


def _count(limit: int | None) -> str:
    return "unlimited" if limit is None or limit >= UNLIMITED else f"{limit:,}"
