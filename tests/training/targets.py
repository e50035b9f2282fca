"""Tiny random targets of many architectures, each trained on, decoded, exported: what docs/targets.md tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from helixctl.checkpoint.check import check_published
from helixctl.data.prepare import prepare
from helixctl.errors import CheckpointError
from helixctl.plan import Plan
from helixctl.recipe.load import load_recipe
from helixctl.training.commands import ExportRequest, run_export
from helixctl.training.run import run_training
from helixctl.training.validate import run_validation
from tests import tiny
from tests.chats import RECIPE, VOCAB_SIZE, conversations, write_jsonl
from tests.data import templates
from tests.training.worlds import make_world_plan

STEPS = 5
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}


@dataclass(frozen=True)
class Case:
    """One architecture."""

    name: str
    special: str
    """What a drafter for it must get right."""
    build: Callable[..., Any]
    """Gets sizes and token ids of the tokenizer."""
    overrides: tuple[str, ...] = ()
    """What to `--set`."""


@dataclass(frozen=True)
class Outcome:
    """What became of it."""

    case: Case
    trained: bool
    greedy: str
    zlab: str
    speculators: str

    def row(self) -> str:
        """Its line of the table."""
        cells = (
            self.case.name,
            self.case.special,
            "yes" if self.trained else "no",
            self.greedy,
            self.zlab,
            self.speculators,
        )
        return f"| {' | '.join(cells)} |"


HEADER = (
    "| target | what is special | trains | greedy output | `--format zlab` is read by | `--format speculators` |",
    "|---|---|---|---|---|---|",
)


def of(config_class: str, **special: Any) -> Callable[..., Any]:
    """Builds a model of a configuration class of transformers."""

    def build(**sizes: Any) -> Any:
        config = getattr(transformers, config_class)(**tiny.SIZES | sizes | special)
        return tiny.build(config)

    return build


def multimodal(**sizes: Any) -> Any:
    """Gemma 3 with its vision tower: the decoder's weights are nested under a prefix."""
    text = tiny.tiny_gemma3_config(**sizes)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}, mm_tokens_per_image=1
    )
    return tiny.build(config)


CASES = (
    Case("Llama", "separate head", tiny.tiny_llama),
    Case("Llama, YaRN", "served further than its max_position_embeddings", of("LlamaConfig", rope_parameters=YARN)),
    Case("SmolLM2", "a Llama with tied embeddings", of("LlamaConfig", tie_word_embeddings=True)),
    Case("Qwen2", "biases on query, key, value", of("Qwen2Config", tie_word_embeddings=True)),
    Case("Qwen3", "norms on query and key", tiny.tiny_qwen3),
    Case("Qwen3, padded", "an embedding longer than the tokenizer", of("Qwen3Config", vocab_size=384)),
    Case("Qwen3-MoE", "experts", of("Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)),
    Case("Mistral", "sliding windows in every layer", tiny.tiny_mistral),
    Case("Gemma 2", "scaled embeddings, capped scores and logits", tiny.tiny_gemma2),
    Case("Gemma 3", "scaled embeddings, sliding and full layers, tied", tiny.tiny_gemma3),
    Case(
        "Gemma 3, `drafter.scale_embeddings: false`",
        "the drafter gets raw embeddings",
        tiny.tiny_gemma3,
        ("drafter.scale_embeddings=false",),
    ),
    Case("Gemma 3, multimodal", "weights under a language-model prefix", multimodal),
    Case("Phi-3", "fused projections", tiny.tiny_phi3),
    Case("GLM-4", "partial rotary positions", of("Glm4Config", partial_rotary_factor=0.5)),
    Case("OLMo 2", "norms behind attention and MLP", of("Olmo2Config")),
    Case(
        "Granite",
        "scaled embeddings and residuals",
        of("GraniteConfig", embedding_multiplier=3.0, residual_multiplier=0.7),
    ),
    Case("GPT-OSS", "attention sinks, experts, sliding and full layers", tiny.tiny_gpt_oss),
    Case("LFM2", "convolution layers that carry a state", tiny.tiny_lfm2),
)


def make_target_world(case: Case, folder: Path) -> Plan:
    """Target, tokenizer, documents, store and the plan of a short run."""
    tokenizer = templates.byte_tokenizer(templates.CHATML)
    sizes = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "max_position_embeddings": 256}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tiny.save_tiny(case.build(**sizes | ids), folder / "target")
    tokenizer.save_pretrained(folder / "target")
    write_jsonl(folder / "data" / "train.jsonl", conversations(30))
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.replace("steps: 4", f"steps: {STEPS}").replace("every_steps: 2", f"every_steps: {STEPS}"))
    prepare(load_recipe(recipe))
    return make_world_plan(recipe, *case.overrides)


def try_target(case: Case, folder: Path) -> Outcome:
    """Train, validate with real decoding, export in both formats, judge what was written."""
    plan = make_target_world(case, folder)
    result = run_training(plan)
    measured = run_validation(plan)
    failed = [proof.name for proof in measured.proofs if not proof.passed]
    assert not failed, failed
    exact = measured.greedy[0] if measured.greedy else None
    greedy = "not decoded" if exact is None else "the target's own" if measured.lossless else "DIFFERS"
    exports = {name: _export(plan, folder / name, name) for name in ("zlab", "speculators")}
    return Outcome(case, result.steps == STEPS, greedy, exports["zlab"], exports["speculators"])


def _export(plan: Plan, folder: Path, name: str) -> str:
    """Who reads the export, or why there is none."""
    try:
        run_export(plan, ExportRequest(output=folder, format=name))
    except CheckpointError as error:
        assert "cannot say" in error.message, error
        return "refused: " + error.message.removeprefix("the target ").split(", which")[0]
    checked = check_published(folder, plan.target)
    assert checked.sound, checked.findings
    return ", ".join(view.engine for view in checked.engines if view.reads)
