"""The target's tokenizer."""

from __future__ import annotations

from typing import Any

from helixctl.errors import ModelError
from helixctl.recipe.schema import TargetOptions


def load_tokenizer(options: TargetOptions) -> Any:
    """The tokenizer that stands beside the target's weights, with its chat template.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"cannot load the tokenizer of {options.model}: {error}",
            fix="target.model must be a folder with tokenizer.json, or a hub name",
        ) from error
