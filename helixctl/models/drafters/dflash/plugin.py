"""What the rest of helixctl calls: build, policy, and the tensors of published checkpoints in both directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from helixctl.errors import CheckpointError
from helixctl.models.drafters._options import BlockOptions
from helixctl.models.drafters._sizes import make_shape
from helixctl.models.drafters.dflash.initial import copy_target_layers
from helixctl.models.drafters.dflash.model import PLAIN, DFlashDraftModel, Variant
from helixctl.models.drafters.dflash.policy import DFlashPolicy
from helixctl.models.facts import TargetFacts
from helixctl.models.shared import SharedWeights

INITIAL_STD = 0.02
"""Of every matrix, the projection of the taps included: the norm behind it takes out the taps' overall scale."""


def build(
    options: BlockOptions, facts: TargetFacts, taps: Sequence[int], seed: int, variant: Variant = PLAIN
) -> DFlashDraftModel:
    """A new drafter on the CPU, float32: matrices normal with std 0.02, norms 1, biases 0. A pure function.

    Other algorithms call it with their ``variant``.

    Raises:
        ModelError: sizes that do not fit together.
    """
    with torch.device("meta"):
        model = DFlashDraftModel(options, make_shape(options, facts, len(taps)), seed, variant)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, INITIAL_STD, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
    return model


def initialise(model: nn.Module, layers: nn.ModuleList, shared: SharedWeights) -> None:
    """Start from the target's ``layers`` where the options ask for it; nothing else needs the target.

    Raises:
        ModelError: the target's layers have other parts or sizes.
    """
    assert isinstance(model, DFlashDraftModel)
    if model.options.init_layers is not None:
        copy_target_layers(model, model.options.init_layers, layers, shared)


def policy(model: nn.Module, shared: SharedWeights) -> DFlashPolicy:
    """How decoding asks this drafter for tokens; a snapshot of its weights."""
    assert isinstance(model, DFlashDraftModel)
    return DFlashPolicy(model, shared)


def export_state(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of ``model.safetensors``: 3 + 11 per layer, bfloat16 on the CPU; no embedding, head or rotary table."""
    return {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in model.state_dict().items()}


def import_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put the tensors of a published checkpoint into ``model``, whose types stay as they are.

    Raises:
        CheckpointError: names or shapes differ; names every one of them.
    """
    own = model.state_dict()
    wrong = [f"{name} is missing" for name in own.keys() - tensors.keys()]
    wrong += [f"{name} is unknown" for name in tensors.keys() - own.keys()]
    wrong += [
        f"{name} is {list(tensors[name].shape)}, not {list(own[name].shape)}"
        for name in own.keys() & tensors.keys()
        if tensors[name].shape != own[name].shape
    ]
    if wrong:
        raise CheckpointError("the drafter does not fit: " + "; ".join(sorted(wrong)), fix="check the drafter's sizes")
    model.load_state_dict(dict(tensors))
