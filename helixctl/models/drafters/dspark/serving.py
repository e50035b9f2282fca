"""How serving engines are told to use an exported drafter. Never imports torch."""

from __future__ import annotations

from helixctl.models.drafters.dflash.serving import vllm_command


def serving_commands(format_name: str, target: str, drafter: str, block_size: int) -> dict[str, str]:
    """Command lines by engine; vLLM counts the drafted tokens, ``block_size - 1``.

    Args:
        format_name: Plug-in in ``formats``.
        target: Name or folder of the target.
        drafter: Folder of the export, or its name on a hub.
        block_size: Tokens per block, the anchor included.
    """
    assert format_name == "deepspec"
    return {"vLLM": vllm_command("dspark", target, drafter, block_size - 1)}
