"""What `profile` shows: tables of at most 100 columns, and the lines of a verdict. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from helixctl.cli.values import format_bytes

if TYPE_CHECKING:
    from helixctl.profiling.compare import Change, Comparison
    from helixctl.profiling.live import Look

_LEVEL_STYLES = {"high": "bold red", "moderate": "bold yellow", "note": "bold green"}
_SHOWN_THREADS = 40
_BUSY_CORES = 0.005
_FRAME_WIDTH = 25
_PERCENT_WIDTH = 5


def profile_blocks(report: dict[str, Any], files: Sequence[str]) -> Iterator[RenderableType]:
    """A whole report: verdict, stages, channels, GPUs, what was measured and where it lies."""
    yield from verdict_lines(report["verdict"])
    yield Text()
    yield stage_table(report["stages"])
    if report["channels"]:
        yield Text()
        yield channel_table(report["channels"])
    if report["gpus"]:
        yield Text()
        yield gpu_table(report["gpus"])
    if (report.get("cuda") or {}).get("devices"):
        yield Text()
        yield cuda_table(report)
    yield Text()
    yield from (Text(line, style="dim") for line in footer(report))
    if files:
        yield Text(f"written: {', '.join(files)}")


def verdict_lines(verdict: dict[str, Any]) -> Iterator[RenderableType]:
    """The headline, and what fired with its numbers and advice."""
    style = _LEVEL_STYLES[verdict["level"]]
    yield Text.assemble(("VERDICT  ", "bold"), (verdict["title"], style))
    yield Text(f"         confidence {verdict['confidence']} ({verdict['basis']})", style="dim")
    for finding in verdict["findings"]:
        yield Text.assemble(
            "  ",
            (f"{finding['code']:<6}", "bold"),
            (finding["title"], _LEVEL_STYLES[finding["level"]]),
            f" ({finding['level']})" if finding["level"] == "moderate" else "",
        )
        numbers = ", ".join(f"{_words(name)} {_number(name, value)}" for name, value in finding["numbers"].items())
        yield from (Padding(Text(part), (0, 0, 0, 8)) for part in (numbers, *finding["detail"]) if part)
        yield Padding(Text.assemble(("advice", "bold green"), f": {finding['advice']}"), (0, 0, 0, 8))
    for what in verdict["unknown"]:
        yield Padding(Text(f"cannot tell {what}", style="yellow"), (0, 0, 0, 2))


def stage_table(stages: Sequence[dict[str, Any]]) -> Table:
    """Stages along the pipeline, then other threads that used a core."""
    table = _table("stage", "thr", "cores", "usr/sys", "runq", "blocked", "GIL", "items/s", "starved", "held")
    table.add_column("busiest frame", no_wrap=True, max_width=_FRAME_WIDTH)
    for stage in stages:
        if stage["cores"] < _BUSY_CORES and "busy_share" not in stage:
            continue
        system = round(100 * stage["system_share"])
        frames = stage["top_frames"] or stage["waiting_frames"]
        table.add_row(
            stage["name"],
            str(stage["num_threads"]),
            f"{stage['cores']:.2f}",
            f"{100 - system}/{system}" if stage["cores"] >= _BUSY_CORES else "-",
            _share(stage["run_queue_share"]),
            _share(stage["blocked_share"]),
            _share(stage["gil_share"]),
            f"{stage['items_per_s']:.3g}" if "items_per_s" in stage else "-",
            _share(stage.get("in_wait_share")),
            _share(stage.get("out_wait_share")),
            Text(frames[0][0] if frames else "", style="dim"),
        )
    return table


def channel_table(channels: Sequence[dict[str, Any]]) -> Table:
    """How full channels are, and who waits at them."""
    table = _table("channel", "capacity", "held", "empty", "full", "items/s", "senders wait", "receivers wait")
    for channel in channels:
        table.add_row(
            channel["name"],
            str(channel["capacity"]),
            f"{channel['mean_held']:.1f}",
            _share(channel["empty_share"]),
            _share(channel["full_share"]),
            f"{channel['items_per_s']:.3g}",
            _share(channel["send_wait_share"]),
            _share(channel["receive_wait_share"]),
        )
    return table


def gpu_table(gpus: Sequence[dict[str, Any]]) -> Table:
    """Means over the window; what a GPU does not tell is n/a."""
    table = _table("GPU", "util", "SM", "tensor", "memory", "power", "clock", "PCIe rx", "throttled")
    for gpu in gpus:
        means = gpu["means"]
        table.add_row(
            gpu["name"][:20],
            _mean(means, "util_pct", "{:.0f} %"),
            _mean(means, "sm_util_pct", "{:.0f} %"),
            _mean(means, "tensor_util_pct", "{:.0f} %"),
            format_bytes(means["used_bytes"]) if "used_bytes" in means else "n/a",
            _mean(means, "power_w", "{:.0f} W"),
            _mean(means, "sm_clock_mhz", "{:.0f} MHz"),
            f"{format_bytes(means['pcie_rx_bytes_per_s'])}/s" if "pcie_rx_bytes_per_s" in means else "n/a",
            _share(gpu["throttled_share"]),
        )
    return table


def cuda_table(report: dict[str, Any]) -> Table:
    """What the trace of kernels and CUDA calls says: a line for each GPU, then one for each stage that used one."""
    idle_for, calls_of = ("launch", "work", "device"), ("launch", "sync", "alloc")
    table = _table("traced", "busy", "idle: launch", *idle_for[1:], "kernels/s", "µs each", "in launch", *calls_of[1:])
    for gpu in report["cuda"]["devices"]:
        idle = [_share(gpu["idle_shares"][kind]) for kind in idle_for]
        table.add_row(f"cuda:{gpu['device']}", _share(gpu["busy_share"]), *idle, *[""] * 5)
    for stage in report["stages"]:
        if (own := stage["cuda"]) is not None:
            idle = [_share(own["idle_shares"].get(kind, 0.0)) for kind in idle_for]
            calls = [_share(own["call_shares"].get(kind, 0.0)) for kind in calls_of]
            rates = (f"{own['kernels_per_s']:,.0f}", f"{own['mean_kernel_us']:.3g}")
            table.add_row(stage["name"], "", *idle, *rates, *calls)
    return table


def footer(report: dict[str, Any]) -> Iterator[str]:
    """What was left out, what profiling cost, and what could not be read."""
    window, cost, flow = report["window"], report["cost"], report["pipeline"]
    line = f"window {window['seconds']:.1f} s"
    if window["set_up_s"] or window["warm_up_s"]:
        line += f"; left out: set-up {window['set_up_s']:.1f} s, warm-up {window['warm_up_s']:.1f} s"
    yield line
    if flow is not None:
        yield (
            f"speed {flow['tokens_per_s']:,.0f} tokens/s, {flow['steps_per_s']:.3g} steps/s; "
            f"waits for a slot {flow['slot_wait_s']:.1f} s of {flow['num_slots']} slots"
        )
    text = f"cost of profiling: {100 * cost['share_of_machine']:.1f} % of the machine's cores"
    if cost["slowdown_share"] is not None:
        text += f"; speed against the {window['baseline_s']:.0f} s before {-100 * cost['slowdown_share']:+.1f}"
        text += f" ± {100 * cost['slowdown_error_share']:.1f} %"
    yield text
    if (cuda := report.get("cuda")) is not None and cuda["problem"] is None:
        speed = f"speed meanwhile {-100 * cuda['slowdown_share']:+.0f} %"
        yield f"kernels and CUDA calls traced for {cuda['seconds']:.1f} s after the window; {speed}"
    if report["gpu_problem"]:
        yield f"GPUs: {report['gpu_problem']}"
    for gpu in report["gpus"]:
        yield from (f"{gpu['name']}: no {metric}: {reason}" for metric, reason in gpu["missing"].items())
    yield from report["about"]["notes"]


def thread_table(threads: Sequence[dict[str, Any]]) -> Table:
    """Every thread, busiest first; seconds are of the wall clock, counts per second."""
    table = _table("tid", "stage", "name", "cpu", "usr", "sys", "runq", "blocked", "vol/s", "inv/s", "flt/s", "majflt")
    for use in threads[:_SHOWN_THREADS]:
        table.add_row(
            str(use["thread_id"]),
            use["owner"],
            use["name"],
            _share(use["on_cpu_share"]),
            _share(use["user_share"]),
            _share(use["system_share"]),
            _share(use["run_queue_share"]),
            _share(use["blocked_share"]),
            f"{use['voluntary_per_s']:.0f}",
            f"{use['involuntary_per_s']:.0f}",
            f"{use['minor_faults_per_s']:.0f}",
            f"{use['major_faults_per_s']:.0f}",
        )
    if len(threads) > _SHOWN_THREADS:
        table.add_row("", Text(f"and {len(threads) - _SHOWN_THREADS} more", style="dim"))
    return table


def live_view(look: Look, title: str) -> Group:
    """One look as a full screen."""
    from dataclasses import asdict

    blocks: list[RenderableType] = [Text(title, style="bold")]
    if look.pipeline is not None:
        use = look.pipeline
        blocks.append(Text(f"step {look.step}, {use.tokens_per_s:,.0f} tokens/s, {use.steps_per_s:.3g} steps/s"))
        blocks += [Text(), channel_table([asdict(channel) for channel in use.channels])]
    blocks += [Text(), thread_table([{"owner": owner, **asdict(use)} for owner, use in look.uses])]
    return Group(*blocks)


def comparison_blocks(comparison: Comparison) -> Iterator[RenderableType]:
    """Two headlines, and the numbers side by side."""
    yield Text.assemble(("before  ", "bold"), comparison.titles[0])
    yield Text.assemble(("after   ", "bold"), comparison.titles[1])
    table = _table("", "before", "after", "factor")
    for change in comparison.changes:
        factor = change.factor
        cells = (_value(change, change.before), _value(change, change.after))
        table.add_row(change.what, *cells, f"{factor:.2f}x" if factor is not None else "-")
    yield Text()
    yield table


def _value(change: Change, value: float | None) -> str:
    if value is None:
        return "-"
    return _share(value) if change.unit == "share" else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _table(first: str, *others: str) -> Table:
    """Columns as wide as their headings and a percentage at least; only names on the left may be cut."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True, min_width=6)
    left = ("stage", "name", "GPU", "traced")
    for name in others:
        width = max(len(name), _PERCENT_WIDTH)
        table.add_column(name, no_wrap=True, justify="left" if name in left else "right", min_width=width)
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %" if 0 < value < 0.0995 else f"{100 * value:.0f} %"


def _mean(means: dict[str, float], name: str, form: str) -> str:
    return form.format(means[name]) if name in means else "n/a"


def _words(name: str) -> str:
    return name.removesuffix("_share").removesuffix("_pct").replace("_per_s", "/s").replace("_", " ")


def _number(name: str, value: float | int | str) -> str:
    if isinstance(value, str):
        return value
    if name.endswith("_share"):
        return _share(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"
