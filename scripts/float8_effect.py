"""What float8 products do to a target's features and next tokens, and to a drafter that learned from others.

    python -m scripts.float8_effect demo/recipe.yaml

Held-out documents of a recipe that was trained go through the target in float32, and through the same weights in other
precisions; the run's drafter is validated on the features of each. One JSON line per precision.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from helixctl.data.batch import MicroBatch, make_document_batch
from helixctl.data.store import Store
from helixctl.machine import read_machine
from helixctl.models.float8 import quantize_layers
from helixctl.models.float8_format import Float8
from helixctl.models.target import Target
from helixctl.plan import Plan, make_plan
from helixctl.recipe.load import load_recipe
from helixctl.training.process import set_up_process
from helixctl.training.restore import load_trained
from helixctl.training.run_dir import choose_checkpoint
from helixctl.training.validate import Validator

BLOCK = 128
Outputs = list[tuple[list[Tensor], Tensor]]
"""Of every document: features of all taps, and log-probabilities."""


def main(words: list[str] | None = None) -> None:
    """Measure every precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--documents", type=int, default=40, help="that features and next tokens are compared on")
    parser.add_argument("--block", type=int, default=BLOCK, help="side of the blocks; must divide the target's widths")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in helixctl")
    options = parser.parse_args(words)
    plan = make_plan(load_recipe(options.recipe, [*options.set, "target.quantization=none"]), read_machine())
    set_up_process(plan)
    store = Store.open(plan.recipe.data.store)
    documents = list(read_documents(store, options.documents))
    trained = load_trained(plan, choose_checkpoint(plan.recipe.run.dir, None), torch.device(plan.target_devices[0]))
    validator = Validator(plan, trained, lambda what, done, total: None)
    exact: Outputs = []
    for name, target in precisions(plan, options.block):
        with torch.no_grad():
            found = [outputs(target, document) for document in documents]
        exact = exact or found
        held_out = validator.held_out(target, store)
        drafter = {f"drafter's {key}": round(held_out[key], 4) for key in ("val/loss", "val/accept_len")}
        print(json.dumps({"precision": name, **compare(plan, exact, found), **drafter}), flush=True)


def read_documents(store: Store, count: int) -> Iterator[MicroBatch]:
    """Held-out documents, one a row."""
    split = store.split("validation")
    for number in range(min(count, split.num_documents)):
        mask = torch.from_numpy(split.loss_mask(number).copy())
        yield make_document_batch(torch.from_numpy(split.tokens(number).astype("int64")), mask)


def precisions(plan: Plan, block: int) -> Iterator[tuple[str, Target]]:
    """The target in float32, with float8 products of both kinds and float32 around them, and in bfloat16."""
    yield "float32", load(plan, torch.float32)
    yield "float8, rows", load(plan, torch.float32, Float8())
    yield f"float8, blocks of {block}", load(plan, torch.float32, Float8(block))
    yield "bfloat16", load(plan, torch.bfloat16)


def load(plan: Plan, dtype: torch.dtype, float8: Float8 | None = None) -> Target:
    """Weights of the plan's target in ``dtype``, its layers quantised where wanted."""
    options = plan.recipe.target.model_copy(update={"attention": "segments"})
    target = Target.load(options, plan.target_layer_ids, plan.target_devices[0], dtype)
    if float8 is not None:
        quantize_layers(target.model.get_decoder(), float8)
    return target


def outputs(target: Target, batch: MicroBatch) -> tuple[list[Tensor], Tensor]:
    """Features of all taps, each [S, H], and log-probabilities [S', V] of the S' supervised tokens; float32."""
    *taps, last = target.features(batch, last_hidden=True)
    places = batch.loss_mask[0, 1:].nonzero()[:, 0]
    logits = target.shared.logits(target.shared.final_norm(last[0, places.to(last.device)]))
    return [tap[0].float() for tap in taps], logits.float().log_softmax(-1)


def compare(plan: Plan, exact: Outputs, found: Outputs) -> dict[str, object]:
    """Means over all tokens of all documents, by tap where there are several."""
    pairs = list(zip(exact, found, strict=True))
    errors, cosines = [], []
    for tap in range(len(plan.target_layer_ids)):
        one = torch.cat([a[0][tap][1:] for a, _ in pairs])  # the first token's state is thousands of times larger
        other = torch.cat([b[0][tap][1:] for _, b in pairs])
        errors.append(float(((one - other).norm(dim=-1) / one.norm(dim=-1)).mean()))
        cosines.append(float(torch.nn.functional.cosine_similarity(one, other).mean()))
    wanted, given = torch.cat([a[1] for a, _ in pairs]), torch.cat([b[1] for _, b in pairs])
    return {
        "tokens": len(wanted),
        "taps": list(plan.target_layer_ids),
        "relative error": [round(error, 4) for error in errors],
        "cosine": [round(cosine, 5) for cosine in cosines],
        "same greedy token": round(float((wanted.argmax(-1) == given.argmax(-1)).float().mean()), 4),
        "KL of the next token": round(float((wanted.exp() * (wanted - given)).sum(-1).mean()), 5),
    }


if __name__ == "__main__":
    main()
