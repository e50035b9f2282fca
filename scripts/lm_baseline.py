"""helixctl's causal_lm against the Trainer of transformers: tokens per second, peak memory and loss, one JSON line.

    python scripts/lm_baseline.py              the model of recipes/helix-87m.yaml on a GPU, under three minutes
    python scripts/lm_baseline.py --tiny       a tiny one on a CPU, to see that it runs

Both train the same model from the same weights on the same rows in the same order, in bfloat16 by autocast, with the
same AdamW, the same number of rows per step and no weight decay. Rows hold one document each, so that attention is
plain causal attention for both. Each runs in a process of its own; compilation and the first steps are left out of the
speed. The Trainer runs as it comes, and once more with torch_compile; it needs accelerate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LEARNING_RATE = 3.0e-4
BETAS = (0.9, 0.95)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--warm", type=int, default=30, help="first steps that do not count, a multiple of 10")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--only", choices=("helixctl", "trainer", "trainer_compiled"))
    parser.add_argument("--child", metavar="FOLDER", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child is not None:
        result = (
            run_ours(Path(asked.child), asked) if asked.only == "helixctl" else run_trainer(Path(asked.child), asked)
        )
        (Path(asked.child) / f"{asked.only}.json").write_text(json.dumps(result), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory(prefix="helixctl-lm-") as name:
        make_world(Path(name), asked)
        which = [asked.only] if asked.only else ["helixctl", "trainer", "trainer_compiled"]
        found = {one: in_child(Path(name), one) for one in which}
    print(json.dumps({"model": "tiny" if asked.tiny else "helix-87m", "device": device_name(), **summary(found)}))


def summary(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Every result, and ours over the Trainer's."""
    told: dict[str, Any] = dict(found)
    for name in ("trainer", "trainer_compiled"):
        if "tokens_per_s" in found.get("helixctl", {}) and "tokens_per_s" in found.get(name, {}):
            ours, theirs = found["helixctl"], found[name]
            told[f"speed over {name}"] = round(ours["tokens_per_s"] / theirs["tokens_per_s"], 3)
            if theirs["peak_bytes"]:
                told[f"memory over {name}"] = round(ours["peak_bytes"] / theirs["peak_bytes"], 3)
            gaps = [abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)]
            told[f"largest loss difference to {name}"] = round(max(gaps), 4)
    return told


def in_child(folder: Path, which: str) -> dict[str, Any]:
    """One side in a process of its own; what it says goes to stderr."""
    words = [sys.executable, __file__, *sys.argv[1:], "--only", which, "--child", str(folder)]
    done = subprocess.run(words, stdout=sys.stderr, check=False)
    path = folder / f"{which}.json"
    if done.returncode or not path.exists():
        return {"failed": done.returncode}
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


# ---------------------------------------------------------------------------------------------------------- the world


def make_world(folder: Path, asked: argparse.Namespace) -> None:
    """A tokenizer of numbers, documents that fill a row each, a prepared store."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from helixctl.data.prepare import prepare

    vocab_size, seq_len = (240, 64) if asked.tiny else (50000, 1024)
    words = {"<|endoftext|>": 0, **{str(i): i for i in range(1, vocab_size)}}
    model = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|endoftext|>", unk_token="<|endoftext|>")
    tokenizer.save_pretrained(folder / "tokenizer")
    rng = np.random.default_rng(0)
    with (folder / "tokens.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(asked.steps * asked.rows):
            drawn = rng.zipf(1.3, seq_len) % (vocab_size - 1) + 1
            follows = rng.random(seq_len) < 0.5
            for i in np.flatnonzero(follows[1:]) + 1:
                drawn[i] = (drawn[i - 1] * 31 + 7) % (vocab_size - 1) + 1
            drawn[-1] = 0
            file.write(json.dumps({"input_ids": drawn.tolist(), "loss_mask": [1] * seq_len}) + "\n")
    prepare(recipe_of(folder, asked))


def recipe_of(folder: Path, asked: argparse.Namespace) -> Any:
    """The recipe of helix-87m with the world's documents."""
    from helixctl.recipe.load import load_any_recipe

    stage = f"{{steps: {asked.steps}, learning_rate: {LEARNING_RATE}, schedule: constant, warmup_ratio: 0.0}}"
    overrides = [
        f"run.dir={folder / 'run'}",
        f"data.store={folder / 'store'}",
        f"data.train=[{{path: {folder / 'tokens.jsonl'}, format: tokens}}]",
        "data.validation.fraction=0.0",
        "data.workers=4",
        f"model.tokenizer={folder / 'tokenizer'}",
        f"stages=[{stage}]",
        f"train={{micro_batch_rows: {asked.rows}, weight_decay: 0.0, log_every_steps: 10, max_grad_norm: 1.0}}",
        "validation={every_steps: 0}",
        "metrics.sinks=[jsonl]",
    ]
    if asked.tiny:
        sizes = {**TINY, "vocab_size": 256, "num_key_value_heads": 4, "max_position_embeddings": 64}
        overrides += [f"model.config.{name}={value}" for name, value in sizes.items()] + ["data.seq_len=64"]
    return load_any_recipe(ROOT / "recipes/helix-87m.yaml", overrides)


def plan_of(folder: Path, asked: argparse.Namespace) -> Any:
    from helixctl.lm_plan import make_any_plan
    from helixctl.machine import read_machine

    return make_any_plan(recipe_of(folder, asked), read_machine())


# --------------------------------------------------------------------------------------------------------- both sides


def run_ours(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """`helixctl train`."""
    from helixctl.training.run import run_training

    began_at = time.perf_counter()
    plan = plan_of(folder, asked)
    result = run_training(plan)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    counted = [line for line in lines if line["step"] > asked.warm]
    peaks = [size for device, size in result.peak_memory_bytes.items() if device.startswith("cuda")]
    return {
        "tokens_per_s": round(statistics.mean(line["perf/tokens_per_s"] for line in counted)),
        "mfu": counted[-1].get("perf/mfu"),
        "peak_bytes": max(peaks, default=0),
        "losses": [round(line["train/loss"], 4) for line in lines],
        "seconds": round(time.perf_counter() - began_at, 1),
    }


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The rows of the run, in its order."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def run_trainer(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """The Trainer of transformers, from the same weights on the same rows."""
    import transformers

    from helixctl.models.causal_lm import build_causal_lm
    from helixctl.training.lm_build import make_lm_loader
    from helixctl.training.wiring import make_sequence

    began_at = time.perf_counter()
    plan = plan_of(folder, asked)
    loader = make_lm_loader(plan, make_sequence(plan))
    rows = [row for step in range(asked.steps) for row in loader.batch(step).input_ids]
    model = build_causal_lm(plan.recipe.model, plan.recipe.run.seed)
    model.set_attn_implementation("sdpa")
    on_gpu = torch.cuda.is_available()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / f"trainer-{asked.only}"),
        max_steps=asked.steps,
        per_device_train_batch_size=asked.rows,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        optim="adamw_torch_fused",
        torch_compile=asked.only == "trainer_compiled",
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
    )
    clock = make_clock(asked)
    trainer = make_trainer(model, arguments, Rows(rows), clock)
    trainer.train()
    losses = [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry]
    tokens = (asked.steps - asked.warm) * asked.rows * plan.recipe.data.seq_len
    return {
        "tokens_per_s": round(tokens / (clock.ended_at - clock.began_at)),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "losses": losses,
        "seconds": round(time.perf_counter() - began_at, 1),
    }


def make_trainer(model: Any, arguments: Any, rows: Rows, clock: Any) -> Any:
    """A Trainer that keeps the order of the rows."""
    import transformers

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

    return InOrder(model=model, args=arguments, train_dataset=rows, callbacks=[clock])


def make_clock(asked: argparse.Namespace) -> Any:
    """Takes the time from the end of the warm-up steps to the end of the last."""
    import transformers

    class Clock(transformers.TrainerCallback):
        began_at = 0.0
        ended_at = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (asked.warm, asked.steps):
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                now = time.perf_counter()
                if state.global_step == asked.warm:
                    self.began_at = now
                else:
                    self.ended_at = now

    return Clock()


if __name__ == "__main__":
    main()
