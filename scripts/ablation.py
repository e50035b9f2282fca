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
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from scripts.variants import BASE, VARIANTS, Variant

FINAL = "final"
HELD_BACK = 20
"""First prompts of every file: scored by `--final`, never looked at before."""
LOOK_S = 0.2
"""Between two looks at the variants that are running."""
MAX_WORDS = 600
"""Characters of what a failed variant said at its end."""
Line = dict[str, Any]


class Stopped(Exception):
    """Somebody asked this program to stop."""


class Running(Protocol):
    """A variant that is being trained."""

    @property
    def variant(self) -> Variant:
        """Which."""

    def finish(self) -> Line | None:
        """What came of it; None while it runs."""

    def end(self) -> None:
        """Now, without a result."""


class Case:
    """A variant that is being trained by a process of its own."""

    def __init__(self, variant: Variant, words: Sequence[str], folder: Path) -> None:
        self.variant = variant
        self._said = folder / "said.txt"
        self._began_at = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        with self._said.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scripts.ablation_case", *words],
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def finish(self) -> Line | None:
        """See ``Running``."""
        if self._process.poll() is None:
            return None
        text = self._said.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.startswith("{")]
        seconds = {"seconds": time.monotonic() - self._began_at}
        if self._process.returncode or not lines:
            return {"failed": f"exit code {self._process.returncode}: {text.strip()[-MAX_WORDS:]}", **seconds}
        return {**json.loads(lines[-1]), **seconds}

    def end(self) -> None:
        """See ``Running``."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


class Ablation:
    """The variants of one recipe, those measured and those to come."""

    def __init__(self, options: argparse.Namespace, launch: Callable[[Variant], Running]) -> None:
        self._options = options
        self._launch = launch
        self._ends_at = time.monotonic() + options.limit_s
        self._longest_s = 0.0
        self._asked = asked(options)
        self.lines = [line for line in read_lines(options.out) if line["asked"] == self._asked]

    def run(self, variants: Sequence[Variant]) -> None:
        """All that are not known and for which there is time, ``--jobs`` of them beside each other.

        Raises:
            Stopped: by a signal.
        """
        known = {line["name"] for line in self.lines if "failed" not in line}
        waiting = [variant for variant in variants if variant.name not in known]
        running: list[Running] = []
        try:
            while running or (waiting and self._has_time()):
                while waiting and len(running) < self._options.jobs and self._has_time():
                    running.append(self._launch(waiting.pop(0)))
                time.sleep(LOOK_S)
                running = [case for case in running if not self._is_finished(case)]
        finally:
            for case in running:
                case.end()
        for variant in waiting:
            print(f"no time left for: {variant.name}", flush=True)

    def _has_time(self) -> bool:
        """Whether a variant would end in time, were it as slow as the slowest so far."""
        return bool(time.monotonic() + self._longest_s < self._ends_at)

    def _is_finished(self, case: Running) -> bool:
        found = case.finish()
        if found is None:
            return False
        self._longest_s = max(self._longest_s, found["seconds"])
        line = {**asdict(case.variant), "asked": self._asked, **found}
        self.lines.append(line)
        with self._options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps({key: value for key, value in line.items() if key != "prompts"}), flush=True)
        return True


def launch(options: argparse.Namespace, folder: Path, variant: Variant) -> Case:
    """Start ``variant`` with a run directory in ``folder``."""
    folder = folder / str(time.monotonic_ns())
    words = [str(options.recipe), "--run-dir", str(folder / "run"), "--max-new-tokens", str(options.max_new_tokens)]
    words += ["--steps", str(options.steps)] if options.steps else ["--seconds", str(options.seconds)]
    words += ["--skip", str(options.skip), "--limit", str(options.limit)]
    for path in options.bench:
        words += ["--bench", str(path)]
    for setting in (*options.set, *variant.settings):
        words += ["--set", setting]
    words += ["--suspect", variant.suspect] if variant.suspect else []
    words += ["--export", str(options.export)] if options.export else []
    return Case(variant, words, folder)


def asked(options: argparse.Namespace) -> Line:
    """What lines must have in common to be compared."""
    names = ("steps", "seconds", "set", "skip", "limit", "max_new_tokens")
    files = {"recipe": options.recipe.name, "bench": [path.name for path in options.bench]}
    return {**files, **{name: getattr(options, name) for name in names}}


def read_lines(path: Path) -> list[Line]:
    """What earlier calls measured."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def gain(line: Line, base: Line) -> tuple[float, float] | None:
    """How much longer the same prompts' acceptance is than with ``base``, and the standard error of that.

    Every file weighs the same, every prompt of a file as well. None where they have fewer than two prompts in common.
    """
    means, variances = [], []
    for source, own in line["prompts"].items():
        other = base["prompts"].get(source, {})
        pairs = [(own[name], other[name]) for name in own.keys() & other.keys()]
        apart = [a - b for a, b in pairs if a is not None and b is not None]
        if len(apart) < 2:
            return None
        means.append(statistics.fmean(apart))
        variances.append(statistics.variance(apart) / len(apart))
    return statistics.fmean(means), sum(variances) ** 0.5 / len(variances)


def table(lines: Sequence[Line]) -> str:
    """Markdown: every variant's score by file beside the recipe's own; what failed is said below."""
    measured = {line["name"]: line for line in lines if "failed" not in line}
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
    return "\n".join([text, *(f"\n{name} failed: {why}" for name, why in failures(lines).items())])


def failures(lines: Sequence[Line]) -> dict[str, str]:
    """Variants that failed and were not measured since, and how."""
    measured = {line["name"] for line in lines if "failed" not in line}
    return {line["name"]: line["failed"] for line in lines if line["name"] not in measured}


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--bench", action="append", type=Path, required=True, metavar="FILE", help="JSONL of prompts")
    parser.add_argument("--out", type=Path, default=Path("ablation.jsonl"), help="JSON lines, read and appended to")
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
    parser.add_argument("--limit-s", type=float, default=570.0, help="start nothing that would end later")
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
    """Train and score what is not known yet; 1 where a variant failed, 143 after SIGTERM."""
    options = parse_options(words)
    variants, code = choose(options), 0
    old = signal.signal(signal.SIGTERM, stop)
    with tempfile.TemporaryDirectory() as folder:
        ablation = Ablation(options, partial(launch, options, Path(folder)))
        try:
            ablation.run(variants)
        except Stopped:
            code = 128 + signal.SIGTERM
        finally:
            signal.signal(signal.SIGTERM, old)
    text = table(ablation.lines)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")
    return code or int(bool(failures(ablation.lines)))


def stop(_number: int, _frame: FrameType | None) -> None:
    """Handler of SIGTERM."""
    raise Stopped


if __name__ == "__main__":
    sys.exit(main())
