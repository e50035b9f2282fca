"""How much noise the doctor makes in real code bases, how many planted bugs it finds there, and how long it takes.

Looks at the given folders, each an installed package. Findings of level error are compared with the verdicts of people
in scripts/doctor_verdicts.json; those that nobody has judged yet are listed. With --write the tables go into
docs/doctor.md, between the two marks.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import json
import random
import re
import resource
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from helixctl.doctor.catalog import all_rules
from helixctl.doctor.config import Config
from helixctl.doctor.finding import Finding
from helixctl.doctor.runner import find_files, scan
from helixctl.doctor.scan import FileTask, ScanOptions, make_task, scan_content
from helixctl.doctor.source import RuleOptions, is_test_path
from scripts.doctor_plants import FUNCTION, MODULE, PLANTS, SCRIPT, SPELLINGS

ROOT = Path(__file__).resolve().parent.parent
VERDICTS = ROOT / "scripts/doctor_verdicts.json"
PAGE = ROOT / "docs/doctor.md"
MARKS = ("<!-- measured: begin -->", "<!-- measured: end -->")
MAX_BYTES = 300_000
SEED = 20
ROW = "| {name} | {version} | {files} | {errors} | {wrong} | {warning} | {info} | {seconds} |"


@dataclass(frozen=True)
class Place:
    """Where something can be planted: before line `line` (from 1), indented by `indent`."""

    line: int
    indent: str


def main() -> None:
    arguments = _arguments()
    codes = tuple(rule.code for rule in all_rules())
    options = ScanOptions(codes, RuleOptions(project_tokenizer="helix_lm.tokenizer.HelixTokenizer"))
    plain = ScanOptions(codes, RuleOptions())
    noise, unjudged = noise_table(arguments.folders, plain)
    planted = plant_table(arguments.folders, options, arguments.rounds)
    text = "\n".join(["", f"Measured on {date.today():%Y-%m-%d}.", "", *noise, "", *planted, ""])
    print(text)
    for finding in unjudged:
        print(f"not judged: {finding.where} {finding.code} {finding.text}")
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(MARKS[0])
        PAGE.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.split(MARKS[1])[1]}", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folders", nargs="+", type=lambda text: Path(text).absolute(), help="folders of installed packages"
    )
    parser.add_argument("--rounds", type=int, default=2, help="plants of each kind per code base")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/doctor.md")
    return parser.parse_args()


# --------------------------------------------------------------------------------------------------------------- noise


def noise_table(folders: list[Path], options: ScanOptions) -> tuple[list[str], list[Finding]]:
    """A row per code base; and error-level findings without a verdict."""
    verdicts = {(v["path"], v["code"], v["text"]): v["verdict"] for v in json.loads(VERDICTS.read_text())}
    lines = [
        "| code base | version | files | errors | of them wrong | warnings | infos | CPU seconds, first / cached |",
        "|---|---|---|---|---|---|---|---|",
    ]
    total: Counter[str] = Counter()
    unjudged = []
    for folder in folders:
        row, findings = measure(folder, options)
        errors = [finding for finding in findings if finding.level == "error"]
        keys = [(finding.path, finding.code, finding.text) for finding in errors]
        unjudged += [f for f, key in zip(errors, keys, strict=True) if key not in verdicts]
        row["errors"] = len(errors)
        row["wrong"] = sum(verdicts.get(key) == "wrong" for key in keys)
        row["warning"] = sum(finding.level == "warning" for finding in findings)
        row["info"] = sum(finding.level == "info" for finding in findings)
        total.update({name: value for name, value in row.items() if isinstance(value, int)})
        lines.append(ROW.format(**row))
    wrong = "{wrong} of {errors}".format(**total) + f" ({100 * total['wrong'] / max(total['errors'], 1):.1f} %)"
    lines.append(ROW.format(**{"name": "together", "version": "", "seconds": "", **total, "wrong": wrong}))
    return lines, unjudged


def measure(folder: Path, options: ScanOptions) -> tuple[dict[str, str | int], list[Finding]]:
    """Scan one code base twice, with an empty cache and with a full one."""
    config = Config(root=folder.parent, exclude=("__pycache__",))
    with tempfile.TemporaryDirectory() as cache:
        started = cpu_seconds()
        result = scan([folder], config, options, cache_folder=Path(cache))
        first = cpu_seconds() - started
        started = cpu_seconds()
        scan([folder], config, options, cache_folder=Path(cache))
        cached = cpu_seconds() - started
    row: dict[str, str | int] = {
        "name": folder.name,
        "version": version_of(folder),
        "files": result.num_files,
        "seconds": f"{first:.1f} / {cached:.1f}",
    }
    return row, list(result.findings)


def cpu_seconds() -> float:
    """Of this process and those that it has waited for: the same however busy the machine is."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def version_of(folder: Path) -> str:
    """The version of the distribution that the folder belongs to."""
    for found in importlib.metadata.distributions(path=[str(folder.parent)]):
        tops = (found.read_text("top_level.txt") or "").split()
        name = found.metadata["Name"].lower().replace("-", "_")
        files = {str(path) for path in found.files or ()}
        if folder.name in tops or name == folder.name.lower() or f"{folder.name}/__init__.py" in files:
            return found.version
    return "?"


# -------------------------------------------------------------------------------------------------------------- plants


def plant_table(folders: list[Path], options: ScanOptions, rounds: int) -> list[str]:
    """A row per rule: how many were planted, how many found."""
    rng = random.Random(SEED)
    planted: Counter[str] = Counter()
    found: Counter[str] = Counter()
    by_folder: dict[str, list[int]] = {}
    for folder in folders:
        files = candidates(folder)
        for code, where, text in PLANTS * rounds:
            hit = plant_one(rng, files, (code, where, text), options)
            planted[code] += 1
            found[code] += hit
            counts = by_folder.setdefault(folder.name, [0, 0])
            counts[0] += 1
            counts[1] += hit
    lines = ["| code base | planted | found |", "|---|---|---|"]
    lines += [f"| {name} | {n} | {k} ({100 * k / n:.0f} %) |" for name, (n, k) in by_folder.items()]
    n, k = planted.total(), found.total()
    lines += [f"| together | {n} | {k} ({100 * k / n:.1f} %) |", "", "| rule | planted | found |", "|---|---|---|"]
    return lines + [f"| {code} | {planted[code]} | {found[code]} |" for code in sorted(planted)]


def candidates(folder: Path) -> list[Path]:
    """Files that are no tests, with something in them."""
    paths = find_files([folder], Config(root=folder.parent, exclude=("__pycache__",)))
    return [p for p in paths if p.suffix == ".py" and not is_test_path(str(p)) and 500 < p.stat().st_size < MAX_BYTES]


def plant_one(rng: random.Random, files: list[Path], plant: tuple[str, str, str], options: ScanOptions) -> bool:
    """Plant a bug somewhere; whether its rule reports the planted line."""
    code, where, text = plant
    while True:
        path = rng.choice(files)
        content = path.read_text(encoding="utf-8", errors="replace")
        places = list(places_in(content, where))
        if not places:
            continue
        new, line = insert(content, rng.choice(places), *spell(rng, text))
        try:
            ast.parse(new)
        except (SyntaxError, ValueError):
            continue
        task = FileTask("train.py", ("train",)) if where == SCRIPT else make_task(path, path.name, ())
        findings = scan_content(new.encode(), task, options)
        return any(finding.code == code and finding.line <= line <= finding.end_line for finding in findings)


def places_in(content: str, where: str) -> Iterator[Place]:
    """Statements in functions, or of the module, before which something can stand."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return
    lines = content.split("\n")
    owners: list[ast.AST] = [tree]
    if where == FUNCTION:
        owners = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for owner in owners:
        body: list[ast.stmt] = owner.body  # type: ignore[attr-defined]  # functions and modules have one
        start = _first(body, skip_imports=where in (MODULE, SCRIPT))
        for statement in body[start:]:
            line = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])
            indent = lines[line - 1][: statement.col_offset]
            if not indent.strip() and not lines[line - 2].endswith("\\"):
                yield Place(line, indent)


def _first(body: list[ast.stmt], *, skip_imports: bool) -> int:
    """Behind the docstring, and behind the imports of a module."""
    for number, statement in enumerate(body):
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_text and not (skip_imports and isinstance(statement, ast.Import | ast.ImportFrom)):
            return number
    return len(body)


def spell(rng: random.Random, text: str) -> tuple[str, str]:
    """The imports and the code of a plant, each word in braces spelled at random."""
    imports, _, code = text.rpartition("---\n")
    for word, ways in SPELLINGS.items():
        if f"{{{word}}}" in code:
            needed, spelling = rng.choice(ways)
            imports += f"{needed}\n"
            code = code.replace(f"{{{word}}}", spelling)
    return imports, code


def insert(content: str, place: Place, imports: str, code: str) -> tuple[str, int]:
    """The file with the bug in it, and the line marked HERE."""
    lines = content.split("\n")
    planted = textwrap.indent(code, place.indent).split("\n")
    lines[place.line - 1 : place.line - 1] = planted
    top = _top_line(content)
    lines[top:top] = imports.rstrip("\n").split("\n") if imports.strip() else []
    number = next(n for n, line in enumerate(lines, 1) if line.endswith("# HERE"))
    return "\n".join(re.sub(r"  # HERE$", "", line) for line in lines), number


def _top_line(content: str) -> int:
    """Behind the docstring and the imports from __future__."""
    last = 0
    for statement in ast.parse(content).body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not is_text and not is_future:
            break
        last = statement.end_lineno or last
    return last


if __name__ == "__main__":
    main()
