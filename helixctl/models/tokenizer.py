"""The target's tokenizer."""

from __future__ import annotations

from pathlib import Path
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
        folder = Path(options.model)
        if not folder.is_dir():
            text = f"target.model {options.model!r} is no folder, and the hub gives no tokenizer of that name"
            raise ModelError(text, fix="check the path, or download the model and name its folder") from error
        if not (folder / "tokenizer.json").is_file():
            fix = "copy the tokenizer's files of the original model beside the weights"
            raise ModelError(f"{folder} has no tokenizer.json", fix=fix) from error
        text = f"cannot load the tokenizer of {folder}: {error}"
        raise ModelError(text, fix="download the model's tokenizer files again") from error
