"""The fastest way to answer prompts on a device: captured cycles on a GPU, a batch that shrinks on a CPU."""

from __future__ import annotations

from helixctl.decoding.decoded import Decoded, DecodeOptions
from helixctl.decoding.policy import DecodeTarget, DraftPolicy
from helixctl.decoding.speculative import OnProgress, Prompts, decode_plain, decode_speculative
from helixctl.decoding.steady import SteadyDecoder
from helixctl.decoding.steady_blocks import SteadySpeculator


class FastestDecoder:
    """One target with one drafter; what is captured is kept from call to call. For one thread."""

    def __init__(self, target: DecodeTarget, policy: DraftPolicy) -> None:
        self.target = target
        self._policy = policy
        on_gpu = target.device.type == "cuda"
        self._plain = SteadyDecoder(target) if on_gpu else None
        self._drafted = SteadySpeculator(target, policy) if on_gpu else None

    def plain(self, prompts: Prompts, options: DecodeOptions, on_progress: OnProgress | None = None) -> list[Decoded]:
        """Answers without the drafter, in order; margins are recorded where asked for, which is slower."""
        if self._plain is None or options.record_margins:
            return decode_plain(self.target, prompts, options, on_progress=on_progress)
        found = dict(self._plain.stream(prompts, options, on_progress=on_progress))
        return [found[index] for index in range(len(prompts))]

    def drafted(self, prompts: Prompts, options: DecodeOptions, on_progress: OnProgress | None = None) -> list[Decoded]:
        """Answers with the drafter, in order."""
        if self._drafted is None:
            return decode_speculative(self.target, self._policy, prompts, options, on_progress=on_progress)
        return self._drafted.decode(prompts, options, on_progress=on_progress)
