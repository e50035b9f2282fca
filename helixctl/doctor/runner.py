"""The rules over many files: finding them, sharing the work between processes, remembering results."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from helixctl.doctor.cache import Cache
from helixctl.doctor.config import Config
from helixctl.doctor.finding import Finding
from helixctl.doctor.scan import FileTask, ScanOptions, make_task, scan_content, scan_file
from helixctl.engine.interrupt import interrupts_blocked
from helixctl.errors import UsageError

SUFFIXES = (".py", ".pyi", ".ipynb")
_MIN_FILES_PER_PROCESS = 100
"""A process costs 0.2 s to start, about what 100 files take."""
_CHUNK = 25


@dataclass(frozen=True)
class ScanResult:
    """What was found, and in how many files."""

    findings: tuple[Finding, ...]
    num_files: int
    num_cached: int = 0


Work = tuple[Path, FileTask]


def find_files(paths: Sequence[Path], config: Config) -> list[Path]:
    """Python files and notebooks at `paths`; a file named outright is looked at whatever its suffix and patterns.

    Raises:
        UsageError: a path does not exist; all missing ones are named.
    """
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise UsageError(f"there is no {', no '.join(missing)}", fix="check the path")
    found: dict[Path, None] = {}
    for path in paths:
        for file in [path] if path.is_file() else _below(path, config):
            found.setdefault(file)
    return list(found)


def _below(folder: Path, config: Config) -> Iterator[Path]:
    """Files in a folder, by name. What is excluded counts below the folder that was asked for, not above it."""
    for where, folders, files in os.walk(folder):
        here = Path(where)
        folders[:] = sorted(name for name in folders if not config.is_excluded(_inside(here / name, folder, config)))
        for name in sorted(files):
            if name.endswith(SUFFIXES) and not config.is_excluded(_inside(here / name, folder, config)):
                yield here / name


def _inside(path: Path, folder: Path, config: Config) -> str:
    """The path that patterns see: from the root, but no longer than from the folder asked for where that is outside."""
    absolute, asked = Path(os.path.abspath(path)), Path(os.path.abspath(folder))
    start = config.root if asked.is_relative_to(config.root) else asked
    below_asked = absolute.relative_to(asked).as_posix()
    from_root = absolute.relative_to(start).as_posix()
    return from_root if not config.is_excluded(asked.relative_to(start).as_posix()) else below_asked


def relative_path(path: Path, root: Path) -> str:
    """The path that reports show: from the root where it is below it."""
    absolute = Path(os.path.abspath(path))
    return (absolute.relative_to(root) if absolute.is_relative_to(root) else absolute).as_posix()


def scan(
    paths: Sequence[Path], config: Config, options: ScanOptions, *, jobs: int = 0, cache_folder: Path | None = None
) -> ScanResult:
    """Look at everything at `paths`. `jobs` 0 is one process per core; no cache without a folder.

    Raises:
        UsageError: a path does not exist.
    """
    files = find_files(paths, config)
    work: list[Work] = []
    for file in files:
        relative = relative_path(file, config.root)
        work.append((file, make_task(file, relative, config.ignored_for(relative))))
    cache = Cache(cache_folder, config.root, options) if cache_folder is not None else None
    results: list[list[Finding]] = [[] for _ in work]
    fresh: list[int] = []
    keys: dict[int, str] = {}
    for number, (path, task) in enumerate(work):
        known = None
        if cache is not None and (content := _content(path)) is not None:
            keys[number] = cache.key(task, content)
            known = cache.get(task.relative, keys[number])
        if known is None:
            fresh.append(number)
        else:
            results[number] = known
    for number, findings in zip(fresh, _scan_all([work[n] for n in fresh], options, jobs), strict=True):
        results[number] = findings
        if cache is not None and number in keys:
            cache.put(work[number][1].relative, keys[number], findings)
    if cache is not None:
        cache.save()
    return ScanResult(tuple(f for found in results for f in found), len(work), len(work) - len(fresh))


def scan_texts(texts: Sequence[tuple[FileTask, bytes]], options: ScanOptions) -> list[Finding]:
    """Look at contents that are not on disk, such as those of another revision."""
    return [finding for task, content in texts for finding in scan_content(content, task, options)]


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _scan_all(work: list[Work], options: ScanOptions, jobs: int) -> Iterator[list[Finding]]:
    """Findings per file, in order; in processes of their own where that pays."""
    limit = jobs or len(os.sched_getaffinity(0)) if sys.platform == "linux" else jobs or os.cpu_count() or 1
    num_processes = min(limit, len(work) // _MIN_FILES_PER_PROCESS)
    if num_processes < 2:
        yield from (scan_file(path, task, options) for path, task in work)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        chunks = [work[start : start + _CHUNK] for start in range(0, len(work), _CHUNK)]
        try:
            with interrupts_blocked():  # a process started here inherits the mask: Ctrl-C is the parent's business
                results = pool.map(_scan_chunk, chunks, [options] * len(chunks))
            for found in results:
                yield from found
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _scan_chunk(chunk: list[Work], options: ScanOptions) -> list[list[Finding]]:
    return [scan_file(path, task, options) for path, task in chunk]
