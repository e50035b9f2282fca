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
    return {
        "vLLM": vllm_command("dflash", target, drafter, block_size - 1),
        "SGLang": (
            f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {shlex.quote(drafter)} --speculative-num-draft-tokens {block_size}"
        ),
    }


def vllm_command(method: str, target: str, drafter: str, num_tokens: int) -> str:
    """Command line of vLLM for a drafter that proposes ``num_tokens`` per block by ``method``."""
    speculative = {"method": method, "model": drafter, "num_speculative_tokens": num_tokens}
    config = json.dumps(speculative, separators=(",", ":"), ensure_ascii=False)
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(config)}"
