"""`helixctl warmup-compile`: compile once, before a run or for many; or say whether a run would find what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from helixctl.cli import render
from helixctl.cli.loading import AsJson, Overrides, RecipePath, load_any_plan, refuse_what_cannot_fit
from helixctl.cli.process import heavy_imports
from helixctl.cli.values import format_bytes

if TYPE_CHECKING:
    from helixctl.training.compiling import CacheUse
    from helixctl.warmup.compile import WarmUp


def warmup_compile(
    recipe: RecipePath,
    set_: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Cache to write or to check; left out: where `train` looks."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compile nothing: exit 1 if `train` would miss, and say what differs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compile every shape of a recipe on its devices, and keep the result in one file that `train` picks up."""
    plan = load_any_plan(recipe, set_)
    refuse_what_cannot_fit(plan, recipe, set_)
    with heavy_imports():
        from helixctl.warmup.compile import check_cache, warm_up
    if check:
        use = check_cache(plan, output)
        render.render_json(use) if as_json else render.render_section("compile cache", cache_rows(use))
        if use.state == "miss":
            raise typer.Exit(1)
        return
    with render.progress("cold, then warm") as show_progress:
        result = warm_up(plan, output, lambda done, total: show_progress(done, total))
    if as_json:
        render.render_json(result)
    else:
        render.render_section("compiled", warm_up_rows(result), compile_table(result))


def cache_rows(use: CacheUse) -> dict[str, str]:
    """Whether a run finds compiled code, and what differs where it does not."""
    told = {"off": "nothing is compiled in this plan", "hit": "hit", "miss": "miss"}
    rows = {"state": told[use.state], "file": use.path or "", "because": "\n".join(use.reasons)}
    return {name: text for name, text in rows.items() if text}


def warm_up_rows(result: WarmUp) -> dict[str, str]:
    """Where the cache is, and what it saves."""
    cold, warm = (sum(c.seconds for c in part.values()) for part in (result.cold, result.warm))
    return {
        "cache": f"{result.path}, {format_bytes(result.num_bytes)}",
        "devices": ", ".join(result.devices),
        "cold": f"{cold:.1f} s",
        "warm": f"{warm + result.unpack_seconds:.1f} s, {result.unpack_seconds:.1f} of them to check and unpack: "
        f"{100 * result.ratio:.0f} % of cold",
    }


def compile_table(result: WarmUp) -> Table:
    """Components down; seconds, graphs and what the caches of torch gave, cold and warm."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("component", "cold s", "warm s", "graphs", "breaks", "recompiles", "hits", "misses"):
        table.add_column(title, justify="left" if title == "component" else "right")
    for name, cold in result.cold.items():
        warm = result.warm.get(name)
        found = ("", "", "") if warm is None else (f"{warm.seconds:.1f}", str(warm.hits), str(warm.misses))
        counts = (cold.graphs, cold.graph_breaks, cold.recompiles)
        table.add_row(name, f"{cold.seconds:.1f}", found[0], *map(str, counts), *found[1:])
    return table
