"""``helixctl report``: one self-contained page about a run: curves, positions, waits, memory, recipe, environment.

Nothing is fetched and nothing leaves the page; whatever a run wrote is escaped. Never imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from helixctl.errors import UsageError
from helixctl.metrics import names
from helixctl.metrics.charts import bar_chart, line_chart
from helixctl.metrics.history import History, read_history
from helixctl.training.environment import FILE as ENVIRONMENT_FILE
from helixctl.training.runs import RunSummary, is_run, read_json, summarise
from helixctl.version import __version__

FILE = "report.html"
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1360px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1rem; margin: 0 0 .5rem; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1rem; }
section { border: 1px solid var(--line); border-radius: 8px; padding: 1rem; min-width: 0; }
section.wide { grid-column: 1 / -1; }
table { border-collapse: collapse; width: 100%; } td { padding: .1rem .5rem .1rem 0; vertical-align: top; }
td:first-child { color: var(--dim); white-space: nowrap; } td:nth-child(2) { overflow-wrap: anywhere; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: currentColor; }
.bar { width: 45%; } .bar i { display: block; height: .8em; margin-top: .35em; background: #2563eb; }
.grid { stroke: var(--line); } .legend { margin: .2rem 0 0; display: flex; flex-wrap: wrap; gap: 0 1rem; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
pre { overflow-x: auto; font-size: 13px; } .failed { color: #dc2626; } p.note { color: var(--dim); margin: 0 0 .5rem; }
"""
_CURVES: dict[str, tuple[str, ...]] = {
    "Loss": (names.TRAIN_LOSS, names.VAL_LOSS),
    "Acceptance length": (names.TRAIN_ACCEPT_LEN, names.VAL_ACCEPT_LEN, names.LIVE_ACCEPT_LEN),
    "Accuracy": (names.TRAIN_ACCURACY,),
    "Throughput, tokens per second": (names.PERF_TOKENS_PER_S,),
    "Learning rate": (names.TRAIN_LEARNING_RATE,),
    "Gradient norm": (names.TRAIN_GRAD_NORM,),
    "Peak memory of the drafter's device, bytes": (names.MEMORY_PEAK_BYTES,),
}
_NOTES = {"Acceptance length": "tokens per forward of the target, the target's own next token counted"}


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write the page about a run; returns where it is.

    Raises:
        UsageError: not a run's directory, or the page cannot be written.
    """
    if not is_run(run_dir):
        raise UsageError(f"{run_dir} is no run", fix="name a run's directory; `helixctl runs FOLDER` lists them")
    path = output or run_dir / FILE
    try:
        path.write_text(make_page(run_dir), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", fix="choose another file: --output") from error
    return path


def make_page(run_dir: Path) -> str:
    """The page's text."""
    run, history = summarise(run_dir), read_history(run_dir)
    title = f"{run_dir.name}: {run.state}"
    body = "\n".join(_sections(run_dir, run, history))
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # A page that people pass on: nothing in it may call out, whatever a run wrote.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n<main>\n{body}\n</main>\n"
        f'<p class="note">helixctl {__version__}, {made}</p></body></html>\n'
    )


def _sections(run_dir: Path, run: RunSummary, history: History) -> Iterator[str]:
    result = read_json(run_dir / "result.json")
    yield _section("Run", _table(_overview(run, result)))
    for heading, shown in _CURVES.items():
        chart = line_chart({name: history.finite(name) for name in shown}, heading)
        yield from _charted(heading, chart)
    positions = {str(i + 1): share for i, share in enumerate(history.by_position(names.val_accuracy))}
    yield from _charted("Right drafts by position in the block", bar_chart(positions, "share of right drafts"))
    waits = _waits(result.get("pipeline") or {})
    yield from _charted("Waits, seconds", _bars(waits))
    waited = line_chart({names.PERF_WAIT_S: history.finite(names.PERF_WAIT_S)}, "waiting for features")
    yield from _charted("The drafter waits for features, seconds per window", waited)
    memory = {name: size / 2**30 for name, size in (result.get("peak_memory_bytes") or {}).items()}
    yield from _charted("Peak memory, GiB", _bars(memory))
    if result.get("accounting"):
        yield _section("Accounting", _table(result["accounting"]))
    environment = read_json(run_dir / ENVIRONMENT_FILE)
    if environment:
        yield _section("Environment", _table(environment))
    recipe = (run_dir / "recipe.yaml").read_text(encoding="utf-8", errors="replace")
    yield _section("Recipe", f"<pre>{escape(recipe)}</pre>", wide=True)


def _overview(run: RunSummary, result: Mapping[str, Any]) -> dict[str, Any]:
    rows: dict[str, Any] = {
        "state": run.state,
        "steps": f"{run.step:,} of {run.total_steps:,}" if run.total_steps else f"{run.step:,}",
        "best": None if run.best is None else f"{run.metric} {run.best:.4g} at step {run.best_step:,}",
        "training loss": run.loss,
        "tokens per second": result.get("tokens_per_s") or run.tokens_per_s,
        "training time, s": result.get("train_seconds"),
        "error": run.error,
    }
    return {name: value for name, value in rows.items() if value is not None}


def _waits(pipeline: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {
        f"{channel} {what.removesuffix('_wait_s')}": seconds
        for channel, waits in pipeline.items()
        for what, seconds in waits.items()
    }


def _charted(heading: str, chart: str) -> Iterator[str]:
    """A section, where there is something to show."""
    if chart:
        note = f'<p class="note">{escape(_NOTES[heading])}</p>' if heading in _NOTES else ""
        yield _section(heading, note + chart)


def _section(heading: str, content: str, *, wide: bool = False) -> str:
    return f"<section{' class=wide' if wide else ''}><h2>{escape(heading)}</h2>{content}</section>"


def _table(rows: Mapping[str, Any]) -> str:
    lines = (f"<tr><td>{escape(str(name))}</td><td>{escape(_text(value))}</td></tr>" for name, value in rows.items())
    return f"<table>{''.join(lines)}</table>"


def _bars(rows: Mapping[str, float]) -> str:
    """A table whose values have a length; the empty string where there are none."""
    longest = max(rows.values(), default=0.0) or 1.0
    lines = (
        f"<tr><td>{escape(name)}</td><td>{_text(value)}</td>"
        f'<td class="bar"><i style="width:{100 * max(value, 0.0) / longest:.1f}%"></i></td></tr>'
        for name, value in rows.items()
    )
    return f'<table class="bars">{"".join(lines)}</table>' if rows else ""


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
