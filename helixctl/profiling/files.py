"""The files of a profile: report.json, CSVs, collapsed stacks, a speedscope file, and one self-contained page."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from helixctl.errors import UsageError
from helixctl.metrics.page import STYLE
from helixctl.profiling.facts import Facts
from helixctl.profiling.pyspy import Frames
from helixctl.profiling.recording import Recording
from helixctl.profiling.report import SCHEMA_VERSION, Json

REPORT = "report.json"
PAGE = "profile.html"
TRACE = "cuda-trace.json.gz"
"""For ui.perfetto.dev and other viewers of Chrome's format."""
_SMALLEST_SHARE = 0.0005
"""Frames with less of all samples are left out of the page."""

OwnedStacks = dict[str, Counter[Frames]]


def write_files(folder: Path, report: Json, seen: Recording, facts: Facts) -> dict[str, Path]:
    """Write everything to ``folder``; returns what was written, by kind.

    Raises:
        UsageError: the folder cannot be written.
    """
    stacks = owned_stacks(seen, facts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        _write_csv(folder / "threads.csv", report["threads"])
        _write_csv(folder / "stages.csv", [_flat(stage) for stage in report["stages"]])
        _write_csv(folder / "channels.csv", [_flat(channel) for channel in report["channels"]])
        _write_csv(folder / "gpu.csv", _gpu_rows(report))
        (folder / "stacks.collapsed").write_text(collapsed(stacks), encoding="utf-8")
        speedscope = json.dumps(make_speedscope(stacks, seen.stacks.rate_hz or 1))
        (folder / "profile.speedscope.json").write_text(speedscope, encoding="utf-8")
        (folder / PAGE).write_text(make_page(report, stacks), encoding="utf-8")
        if seen.cuda is not None and seen.cuda.text:
            (folder / TRACE).write_bytes(gzip.compress(seen.cuda.text, 1))
    except OSError as error:
        raise UsageError(
            f"the report cannot be written: {error.filename or folder}: {error.strerror or error}",
            fix="choose another folder with --output",
        ) from error
    names = (REPORT, PAGE, "stages.csv", "threads.csv", "channels.csv", "gpu.csv", "stacks.collapsed")
    more = [TRACE] if seen.cuda is not None and seen.cuda.text else []
    return {name: folder / name for name in (*names, "profile.speedscope.json", *more)}


def owned_stacks(seen: Recording, facts: Facts) -> OwnedStacks:
    """Stacks of every stage, or of every other thread by its Python name."""
    found: OwnedStacks = {}
    stages = facts.crew.by_thread_id or {}
    for thread_id, stacks in seen.stacks.by_thread.items():
        name = stages.get(thread_id) or seen.stacks.names.get(thread_id, str(thread_id))
        found.setdefault(name, Counter()).update(stacks)
    return dict(sorted(found.items()))


def collapsed(stacks: OwnedStacks) -> str:
    """A line for each stack: frames from the outside in, parted by semicolons, and its samples."""
    lines = [
        f"{';'.join((name, *frames))} {count}"
        for name, own in stacks.items()
        for frames, count in sorted(own.items(), key=lambda item: -item[1])
    ]
    return "".join(line + "\n" for line in lines)


def make_speedscope(stacks: OwnedStacks, rate_hz: int) -> Json:
    """The file format of speedscope.app: a profile for each thread; the order of samples is not kept."""
    frames: dict[str, int] = {}
    profiles: list[Json] = []
    for name, own in stacks.items():
        ordered = sorted(own.items(), key=lambda item: item[0])
        samples = [[frames.setdefault(frame, len(frames)) for frame in stack] for stack, _ in ordered]
        weights = [count / rate_hz for _, count in ordered]
        profiles.append(
            {
                "type": "sampled",
                "name": name,
                "unit": "seconds",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": samples,
                "weights": weights,
            }
        )
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "exporter": f"helixctl profile {SCHEMA_VERSION}",
        "shared": {"frames": [{"name": frame} for frame in frames]},
        "profiles": profiles,
    }


def make_page(report: Json, stacks: OwnedStacks) -> str:
    """One HTML page with the report and the flame graph inside; it loads nothing from anywhere."""
    template = files("helixctl.profiling").joinpath("page.html").read_text(encoding="utf-8").replace("/*STYLE*/", STYLE)
    data = json.dumps({"report": report, "flames": flame_tree(stacks)})
    safe = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return template.replace("/*DATA*/null", safe)


def flame_tree(stacks: OwnedStacks) -> Json:
    """Stacks merged from the outside in: name, samples, children; what is too small to see is left out."""
    root: Json = {"n": "all threads", "v": 0, "c": {}}
    for name, own in stacks.items():
        for frames, count in own.items():
            node = root
            node["v"] += count
            for frame in (name, *frames):
                node = node["c"].setdefault(frame, {"n": frame, "v": 0, "c": {}})
                node["v"] += count
    return _pruned(root, max(root["v"] * _SMALLEST_SHARE, 1))


def _pruned(root: Json, smallest: float) -> Json:
    """Children as lists, largest first; without recursion, as stacks may be deep."""
    todo = [root]
    while todo:
        node = todo.pop()
        kept = sorted((c for c in node["c"].values() if c["v"] >= smallest), key=lambda c: (-c["v"], c["n"]))
        node["c"] = kept
        todo += kept
    return root


def _flat(row: Json) -> Json:
    """Lists as text: a cell of a table holds one value."""
    return {name: "; ".join(map(str, v)) if isinstance(v, (list, tuple)) else v for name, v in row.items()}


def _gpu_rows(report: Json) -> list[Json]:
    return [
        {"uuid": uuid, "at_s": at_s, **{name: values[i] for name, values in series["metrics"].items()}}
        for uuid, series in report["series"]["gpus"].items()
        for i, at_s in enumerate(series["at_s"])
    ]


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
