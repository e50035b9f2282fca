"""Turns a GGUF file into an ordinary bfloat16 Hugging Face folder (weights, config, tokenizer).

Used by the quickstart, whose small target comes as GGUF. Never needed for checkpoints that already are folders.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from helixctl.errors import ModelError
from helixctl.models.quiet import no_bars, silence_transformers


def convert_gguf(gguf_file: Path, output_dir: Path) -> Path:
    """Write ``gguf_file`` as a bfloat16 checkpoint folder; the folder appears whole or not at all.

    Dequantising needs about three times the folder's size in memory, and about 25 s for 135 M parameters.

    Args:
        gguf_file: The GGUF file.
        output_dir: The folder to make. One that already holds a ``config.json`` is kept as it is.

    Returns:
        ``output_dir``.

    Raises:
        ModelError: the file is missing, is no GGUF file that transformers reads, the `gguf` package is absent, or
            ``output_dir`` exists and is no checkpoint.
    """
    if (output_dir / "config.json").is_file():
        return output_dir
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ModelError(
            f"{output_dir} exists and holds no checkpoint", fix="name a new folder, or empty this one first"
        )
    if not gguf_file.is_file():
        raise ModelError(f"no GGUF file at {gguf_file}", fix="check the path")
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = output_dir.parent / f".{output_dir.name}.{secrets.token_hex(4)}"
    temporary.mkdir()  # not by tempfile, whose folders are this user's alone whatever the umask says
    try:
        _write_checkpoint(gguf_file, temporary)
        os.replace(temporary, output_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return output_dir


def _write_checkpoint(gguf_file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    silence_transformers()
    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    try:
        with no_bars():
            model = AutoModelForCausalLM.from_pretrained(dtype=torch.bfloat16, **source, **_dequantize())
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except ImportError as error:
        raise ModelError(f"cannot read GGUF files here: {error}", fix="pip install gguf accelerate") from error
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(
            f"cannot read {gguf_file}: {error}", fix="use a GGUF file of an architecture that transformers knows"
        ) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dequantize() -> dict[str, Any]:
    """The option that newer transformers need to unpack the weights; older ones always do, and do not know it."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
