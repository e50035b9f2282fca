"""How serving engines are told to use an exported drafter. Never imports torch."""

from __future__ import annotations

import json
import shlex


def serving_commands(format_name: str, target: str, drafter: str, block_size: int) -> dict[str, str]:
    """Command lines by engine.

    The engines count differently: vLLM takes the drafted tokens, ``block_size - 1``; SGLang takes the whole block, the
    anchor included. A drafter in the speculators format names its target and its count itself.

    Args:
        format_name: Plug-in in ``formats``.
        target: Name or folder of the target.
        drafter: Folder of the export, or its name on a hub.
        block_size: Tokens per block, the anchor included.
    """
    if format_name == "speculators":
        return {"vLLM": f"vllm serve {shlex.quote(drafter)}"}
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": block_size - 1}
    config = json.dumps(speculative, separators=(",", ":"), ensure_ascii=False)
    model = shlex.quote(target)
    return {
        "vLLM": f"vllm serve {model} --speculative-config {shlex.quote(config)}",
        "SGLang": (
            f"python -m sglang.launch_server --model-path {model} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {shlex.quote(drafter)} --speculative-num-draft-tokens {block_size}"
        ),
    }
