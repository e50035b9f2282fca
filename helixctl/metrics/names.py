"""Every metric's name and meaning, in one place. Names are ``group/name[_unit]``; seconds are ``_s``, bytes ``_bytes``.

accept_len, once for all: the mean number of tokens emitted per forward of the target, the bonus token (the target's
own next token after the accepted ones) included; at least 1, at most ``block_size``. The first token of an answer
comes from the prefill and counts in neither sum. Decoding measures it (``..._live``): all tokens emitted in verify
cycles over the number of verify cycles, over all prompts. A forward over data (the other two) estimates it: per block,
1 + the number of leading slots that the drafter gets right against the data's own tokens, averaged over blocks; a block
cut short by its document's end counts what it has. The estimate is for trends: it follows the data's path, not the
target's.
"""

from __future__ import annotations

from collections.abc import Container

TRAIN_LOSS = "train/loss"
TRAIN_ACCEPT_LEN = "train/accept_len"
TRAIN_ACCURACY = "train/accuracy"
TRAIN_GRAD_NORM = "train/grad_norm"
TRAIN_LEARNING_RATE = "train/learning_rate"
TRAIN_EPOCH = "train/epoch"
TRAIN_BAD_STEPS = "train/bad_steps"
TRAIN_EMPTY_STEPS = "train/empty_steps"
TRAIN_BAD_DOCUMENTS = "train/bad_documents"

VAL_LOSS = "val/loss"
VAL_PERPLEXITY = "val/perplexity"
VAL_ACCURACY = "val/accuracy"
VAL_ACCEPT_LEN = "val/accept_len"

LIVE_ACCEPT_LEN = "val/accept_len_live"
LIVE_SPEEDUP = "live/speedup"
LIVE_IDENTICAL = "live/identical"
LIVE_NEAR_TIES = "live/near_ties"
LIVE_DIFFERENT = "live/different"

PERF_TOKENS_PER_S = "perf/tokens_per_s"
PERF_STEP_MS = "perf/step_ms"
PERF_WAIT_S = "perf/wait_s"
PERF_MFU = "perf/mfu"

MEMORY_PEAK_BYTES = "memory/peak_bytes"

MEANINGS: dict[str, str] = {
    TRAIN_LOSS: "sum of weighted token losses / sum of weights, over all micro-batches of the window",
    TRAIN_ACCEPT_LEN: "accept_len estimated on training blocks (see the module's text)",
    TRAIN_ACCURACY: "share of supervised slots whose most likely token is the label",
    TRAIN_GRAD_NORM: "norm of the whole gradient before clipping, mean over the window's steps",
    TRAIN_LEARNING_RATE: "learning rate of the window's last step",
    TRAIN_EPOCH: "passes over the training documents, with the fraction",
    TRAIN_BAD_STEPS: "steps of the window that were skipped because loss or gradient were not finite",
    TRAIN_EMPTY_STEPS: "steps of the window that were skipped because nothing in them was supervised",
    TRAIN_BAD_DOCUMENTS: "documents of the window that were left out because their features were not finite",
    VAL_LOSS: "as train/loss, on held-out rows with fixed anchors",
    VAL_PERPLEXITY: "exp(val/loss) of a causal LM: how many tokens it hesitates between",
    VAL_ACCURACY: "share of held-out tokens that a causal LM finds most likely",
    VAL_ACCEPT_LEN: "accept_len estimated on held-out blocks; chooses the best checkpoint where nothing is decoded",
    LIVE_ACCEPT_LEN: "accept_len of real speculative decoding of held-out prompts; chooses the best checkpoint",
    LIVE_SPEEDUP: "time of plain greedy decoding / time of speculative decoding, same prompts",
    LIVE_IDENTICAL: "answers equal to plain greedy decoding, token for token",
    LIVE_NEAR_TIES: "answers that differ first where plain decoding's two best logits are closer than the noise",
    LIVE_DIFFERENT: "answers that differ elsewhere: must be 0",
    PERF_TOKENS_PER_S: "real tokens (padding excluded) trained per second of the window, pauses excluded",
    PERF_STEP_MS: "milliseconds per optimizer step, pauses excluded",
    PERF_WAIT_S: "seconds of the window that the drafter waited for features",
    PERF_MFU: "floating-point operations of a causal LM's tokens over what its GPUs could do (docs/causal-lm.md)",
    MEMORY_PEAK_BYTES: "most bytes allocated at once on the drafter's device",
}
"""Fixed names. Families of names have functions below."""

TERM = "term_"
"""Begins the sums of a loss's terms among those that a drafter returns."""


def train_term(term: str) -> str:
    """One term of a loss that has several, such as kl: unscaled, over the same weights as train/loss."""
    return f"train/{term}"


def val_term(term: str) -> str:
    """As ``train_term``, on held-out rows."""
    return f"val/{term}"


def val_accuracy(slot: int) -> str:
    """Share of held-out blocks whose slot ``slot`` (1 .. block_size - 1) is right, among those that have the slot."""
    return f"val/acc_{slot}"


def channel_send_wait_s(channel: str) -> str:
    """Seconds that senders waited because the channel was full: its receiver is the bottleneck."""
    return f"pipeline/{channel}/send_wait_s"


def channel_receive_wait_s(channel: str) -> str:
    """Seconds that receivers waited because the channel was empty: its sender is the bottleneck."""
    return f"pipeline/{channel}/receive_wait_s"


def channel_occupancy(channel: str) -> str:
    """Mean number of items in the channel."""
    return f"pipeline/{channel}/occupancy"


def best_metric(wanted: str, present: Container[str]) -> str:
    """What chooses the best checkpoint: ``wanted``; for ``auto`` live decoding where it is ``present``."""
    if wanted != "auto":
        return wanted
    return LIVE_ACCEPT_LEN if LIVE_ACCEPT_LEN in present else VAL_ACCEPT_LEN


def larger_is_better(name: str) -> bool:
    """Whether a larger value of metric ``name`` is the better one: of lengths, accuracies and speeds, not of losses."""
    return name.partition("/")[2].startswith(("acc", "speedup", "identical", "tokens_per_s", "mfu"))
