"""Starting a drafter from layers of its target instead of random weights: small data sets learn much faster.

The drafter's layers have the parts of an ordinary decoder layer under the same names. Query and key norms, which the
target may lack, stay as they are.

Legend: H target width, K taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from helixctl.errors import ModelError
from helixctl.models.drafters.dflash.model import DFlashDraftModel
from helixctl.models.float8 import plain_weight
from helixctl.models.shared import SharedWeights

MATRICES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMS = ("input_layernorm", "post_attention_layernorm")


@torch.no_grad()
def copy_target_layers(
    model: DFlashDraftModel, sources: Sequence[int], layers: nn.ModuleList, shared: SharedWeights
) -> None:
    """Layer i of ``model`` gets the weights of target layer ``sources[i]``; the final norm those of the target's.

    The context begins as the last tap, normed as the input of the first source layer, so that the copied key and
    value projections see what they were trained on; the other taps begin at zero weight.

    Raises:
        ModelError: the target's layers have other parts or sizes.
    """
    _refuse_more_parts(sources, layers)
    for own, source in zip(model.layers, sources, strict=True):
        for name in MATRICES:
            weight = plain_weight(_part(layers[source], name, source))
            _copy(_part(own, name, source).weight, weight, f"layer {source} {name}")
        for name in NORMS:
            _part(own, name, source).weight.copy_(_gain(_part(layers[source], name, source), model.norm.weight))
    model.norm.weight.copy_(_gain(shared.final_norm, model.norm.weight))
    model.hidden_norm.weight.copy_(_gain(_part(layers[sources[0]], NORMS[0], sources[0]), model.norm.weight))
    width = model.norm.weight.numel()
    model.fc.weight.zero_()  # [H, K * H]
    model.fc.weight[:, -width:] = torch.eye(width)


def _refuse_more_parts(sources: Sequence[int], layers: nn.ModuleList) -> None:
    """Norms behind attention and MLP (Gemma 2 and 3, GLM-4) change what the same weights mean.

    Without them a drafter started from Gemma 3 270M had a loss of 108 over its first ten steps; random weights have 11.
    """
    known = {"self_attn", "mlp", *NORMS}
    for source in sources:
        children = layers[source].named_children()
        more = [name for name, part in children if name not in known and any(True for _ in part.parameters())]
        if more:
            raise ModelError(
                f"target layer {source} also has {', '.join(more)}, which a drafter's layer lacks: the same weights "
                "would compute something else",
                fix="set drafter.init_layers: null",
            )


def _part(layer: nn.Module, name: str, source: int) -> Any:
    try:
        return layer.get_submodule(name)
    except AttributeError as error:
        raise ModelError(
            f"target layer {source} has no {name}, so a drafter cannot start from it",
            fix="set drafter.init_layers: null",
        ) from error


def _copy(own: Any, source: Tensor, what: str) -> None:
    if own.shape != source.shape:
        raise ModelError(
            f"{what} is {list(source.shape)}, the drafter's {list(own.shape)}",
            fix="set drafter.init_layers: null, or give the drafter the target's sizes",
        )
    own.copy_(source)


def _gain(norm: nn.Module, like: Tensor) -> Tensor:
    """What the norm multiplies a unit vector by: weights that a target adds 1 to come out right."""
    some = next(norm.parameters())
    return norm(torch.ones_like(some)[None])[0].to(like.dtype)  # type: ignore[no-any-return]
