"""Seconds of compilation cold and with a warm cache, in one of the shapes of docs/benchmarks.md, with random weights.

    python -m scripts.warmup_shape 8b

Two fresh processes set the pipeline up to the gate, as `helixctl warmup-compile` starts them. One JSON line per shape.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from helixctl.machine import read_machine
from helixctl.plan import make_plan
from helixctl.recipe.load import load_recipe
from helixctl.warmup.compile import warm_up
from scripts.benchmark import machine_facts
from scripts.shapes import SHAPES, write_recipe


def main() -> None:
    """Measure every named shape."""
    options = parse_options()
    print(json.dumps(machine_facts()), flush=True)
    for name in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({"shape": name, **measure(name, Path(folder), options.set)}), flush=True)


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=sorted(SHAPES))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in helixctl")
    return parser.parse_args(words)


def measure(name: str, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Seconds, graphs and cache counters by component."""
    recipe = write_recipe(SHAPES[name], folder, 1, None)
    plan = make_plan(load_recipe(recipe, overrides), read_machine())
    result = warm_up(plan, folder / "cache.bin", child="scripts.warmup_random")
    return {
        "warm / cold": result.ratio,
        "misses": result.misses,
        "cache, MiB": result.num_bytes / 2**20,
        "unpack s": result.unpack_seconds,
        "cold": {part: dataclasses.asdict(compiled) for part, compiled in result.cold.items()},
        "warm": {part: dataclasses.asdict(compiled) for part, compiled in result.warm.items()},
    }


if __name__ == "__main__":
    main()
