"""What moves acceptance: variants of a recipe, each trained for a budget and scored by decoding prompts.

    scripts/benchmark ablation recipes/smollm2-dflash.yaml --bench gsm8k.jsonl --bench talk.jsonl --steps 240 --jobs 3
    scripts/benchmark ablation recipes/smollm2-dflash.yaml --bench gsm8k.jsonl --seconds 25 --cost other
    scripts/benchmark ablation recipes/smollm2-dflash.yaml --bench gsm8k.jsonl --final --seconds 163 --export drafter

Settings are chosen on prompts behind the first twenty; `--final` trains the recipe alone and scores those twenty, once:
what is in --out already is not measured again. Variants that a step costs as much may run beside each other by
steps; others compare by seconds of training, compilation and start-up apart. Every finished variant is one JSON line
in --out at once; a call that ends early, by SIGTERM too, loses the variants that are running. Lines of other budgets,
prompts or settings may stand in the same file: they are not compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.resumable import Command, Session
from scripts.variants import BASE, VARIANTS, Variant

ROOT = Path(__file__).resolve().parents[1]
FINAL = "final"
HELD_BACK = 20
"""First prompts of every file: scored by `--final`, never looked at before."""
CASE_LIMIT_S = 580.0
MAX_WORDS = 600
"""Characters of what a failed variant said at its end."""
Line = dict[str, Any]


def name_of(variant: Variant, options: argparse.Namespace) -> str:
    """The variant and what its line must have in common with others to be compared."""
    budget = f"{options.steps} steps" if options.steps else f"{options.seconds:g} s"
    prompts = f"{options.limit} prompts behind {options.skip} of {', '.join(path.name for path in options.bench)}"
    tokens = f"{options.max_new_tokens} tokens"
    return " | ".join([variant.name, options.recipe.name, budget, prompts, tokens, *options.set])


def command_of(variant: Variant, options: argparse.Namespace, folder: Path) -> Command:
    """Trains and scores ``variant``, with a run directory in ``folder``."""
    words = ["--run-dir", str(folder / variant.name.replace(" ", "-")), "--max-new-tokens", str(options.max_new_tokens)]
    words += ["--steps", str(options.steps)] if options.steps else ["--seconds", str(options.seconds)]
    words += ["--skip", str(options.skip), "--limit", str(options.limit)]
    for path in options.bench:
        words += ["--bench", str(path.resolve())]
    for setting in (*options.set, *variant.settings):
        words += ["--set", setting]
    words += ["--suspect", variant.suspect] if variant.suspect else []
    words += ["--export", str(options.export.resolve())] if options.export else []
    start = sys.executable, "-m", "scripts.ablation_case", str(options.recipe.resolve())
    return Command(name_of(variant, options), (*start, *words), options.expected_s, CASE_LIMIT_S)


def read_lines(options: argparse.Namespace, variants: Sequence[Variant]) -> tuple[dict[str, Line], dict[str, str]]:
    """What is known of ``variants`` under these options: the numbers of each, and how the others failed."""
    names = {name_of(variant, options): variant.name for variant in variants}
    texts = options.out.read_text(encoding="utf-8").splitlines() if options.out.exists() else []
    measured, failed = {}, {}
    for line in map(json.loads, texts):
        name = names.get(line["name"])
        if name is not None and line["exit_code"] == 0:
            measured[name] = json.loads(line["output"].rstrip().rpartition("\n")[2])
        elif name is not None:
            failed[name] = line["output"].strip()[-MAX_WORDS:]
    return measured, {name: why for name, why in failed.items() if name not in measured}


def gain(line: Line, base: Line) -> tuple[float, float] | None:
    """How much longer the same prompts' acceptance is than with ``base``, and the standard error of that.

    Every file weighs the same, every prompt of a file as well. None where they have fewer than two prompts in common.
    """
    means, variances = [], []
    for source, own in line["prompts"].items():
        pairs = zip(own, base["prompts"].get(source, ()), strict=False)
        apart = [a - b for a, b in pairs if a is not None and b is not None]
        if len(apart) < 2:
            return None
        means.append(statistics.fmean(apart))
        variances.append(statistics.variance(apart) / len(apart))
    return statistics.fmean(means), sum(variances) ** 0.5 / len(variances)


def table(measured: dict[str, Line], failed: dict[str, str]) -> str:
    """Markdown: every variant's score by file beside the recipe's own; what failed is said below."""
    sources = list(dict.fromkeys(source for line in measured.values() for source in line["scores"]))
    base = measured.get(BASE)
    rows = [
        ["variant", "steps", "train s", "epochs", "loss", *sources, "mean", "against the recipe"],
        ["---", *["---:"] * (len(sources) + 6)],
    ]
    for name, line in measured.items():
        scores = [line["scores"].get(source) for source in sources]
        known = [score for score in scores if score is not None]
        found = None if base is None or line is base else gain(line, base)
        apart = "" if found is None else f"{found[0]:+.3f} ± {found[1]:.3f}"
        row = [name, str(line["steps"]), f"{line['train s']:.1f}", f"{line['epochs']:.1f}", f"{line['loss']:.2f}"]
        row += ["" if score is None else f"{score:.2f}" for score in scores]
        rows.append([*row, f"{statistics.fmean(known):.3f}" if known else "", apart])
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([text, *(f"\n{name} failed: {why}" for name, why in failed.items())])


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--bench", action="append", type=Path, required=True, metavar="FILE", help="JSONL of prompts")
    parser.add_argument("--out", type=Path, default=Path("ablation.jsonl"), help="JSON lines; appended to")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--steps", type=int, help="optimizer steps of every variant")
    parser.add_argument("--seconds", type=float, help="of training of every variant, in place of steps")
    parser.add_argument("--jobs", type=int, default=1, help="variants beside each other on one device")
    parser.add_argument("--only", help="names of variants, comma between several")
    parser.add_argument("--cost", choices=("same", "other"), help="variants whose step costs as much as the recipe's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all, as in helixctl")
    parser.add_argument("--skip", type=int, default=HELD_BACK, help="first prompts of every file, at least 20")
    parser.add_argument("--limit", type=int, default=100, help="prompts of every file")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--limit-s", type=float, default=570.0, help="seconds in all")
    parser.add_argument("--expected-s", type=float, help="of a variant: with less time left none is started")
    parser.add_argument(
        "--final", action="store_true", help="train the recipe, score the first 20 prompts of every file"
    )
    parser.add_argument("--export", type=Path, help="with --final: also write the drafter here")
    options = parser.parse_args(words)
    if (options.steps is None) == (options.seconds is None):
        parser.error("give either --steps or --seconds")
    if options.jobs > 1 and options.seconds:
        parser.error("variants beside each other share the device: give --steps, or --jobs 1")
    if options.export and not options.final:
        parser.error("--export needs --final")
    if options.skip < HELD_BACK:
        parser.error(f"the first {HELD_BACK} prompts are for --final")
    options.expected_s = options.expected_s or (options.seconds or 0.0) + 40.0
    if options.final:
        options.skip, options.limit = 0, HELD_BACK
    return options


def choose(options: argparse.Namespace) -> list[Variant]:
    """The variants that were asked for, in their order; the recipe as it is, always."""
    if options.final:
        return [Variant(FINAL)]
    names = options.only.split(",") if options.only else [variant.name for variant in VARIANTS]
    unknown = sorted(set(names) - {variant.name for variant in VARIANTS})
    if unknown:
        raise SystemExit(f"no variant is called {', '.join(unknown)}: see scripts/variants.py")
    chosen = [v for v in VARIANTS if v.name in names and options.cost in (None, v.cost)]
    return [v for v in VARIANTS if v in chosen or v.name == BASE]


def main(words: Sequence[str] | None = None) -> int:
    """Train and score what is not known yet; 0 when all is."""
    options = parse_options(words)
    variants = choose(options)
    with tempfile.TemporaryDirectory() as folder:
        commands = [command_of(variant, options, Path(folder)) for variant in variants]
        left = Session(ROOT, options.out, options.limit_s).run(commands, options.jobs)
    text = table(*read_lines(options, variants))
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
