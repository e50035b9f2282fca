"""The decode loop on a real, tiny target: the cache, the padding and the features behave as the fakes say."""

from __future__ import annotations

import pytest
import torch

from helixctl.decoding.losslessness import compare_greedy, measure_noise
from helixctl.decoding.speculative import DecodeOptions, decode_plain, decode_speculative
from helixctl.models.target import Target
from helixctl.recipe.schema import TargetOptions
from tests.tiny import save_tiny, tiny_gemma3, tiny_llama

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [30, 31], [40, 41, 42, 43, 44]]
OPTIONS = DecodeOptions(max_new_tokens=17, batch_size=3, record_margins=True)


class OraclePolicy:
    """Proposes the known answers, wrong at every fifth position; checks the features that it is given."""

    block_size = 4

    def __init__(self, answers, features):
        self.sequences = [[*answer.prompt_ids, *answer.tokens] for answer in answers]
        self.features = features

    def start(self, num_rows, max_len):
        self.context = [torch.zeros(num_rows, max_len, 32) for _ in range(2)]

    def extend(self, features, positions, valid):
        for mine, new in zip(self.context, features, strict=True):
            for row in range(len(valid)):
                mine[row, positions[row, valid[row]]] = new[row, valid[row]]

    def draft(self, anchor_ids, positions, call):
        return torch.stack([self._row(*row) for row in enumerate(zip(anchor_ids, positions, strict=True))])

    def _row(self, row, anchor):
        token, position = anchor
        for sequence, expected in zip(self.sequences, self.features, strict=True):
            near = position < len(sequence) and sequence[position] == token
            if near and all(
                torch.allclose(mine[row, :position], tap[:position], atol=1e-4)
                for mine, tap in zip(self.context, expected, strict=True)
            ):
                ids = [*sequence[position + 1 : position + 4], 0, 0, 0][:3]
                return torch.tensor([token if (position + j) % 5 == 0 else token_id for j, token_id in enumerate(ids)])
        raise AssertionError(f"row {row} has the features of no prompt up to position {position}")


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
def test_speculative_equals_plain_equals_generate(build, tmp_path):
    model = build()
    target = Target.load(TargetOptions(model=str(save_tiny(model, tmp_path))), [0, 2], "cpu", torch.float32)
    plain = decode_plain(target, PROMPTS, OPTIONS)
    for answer in plain:
        prompt = torch.tensor([answer.prompt_ids])
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=17, do_sample=False, eos_token_id=None
        )
        assert list(answer.tokens) == expected[0, len(answer.prompt_ids) :].tolist()
    hidden = [
        model(torch.tensor([[*answer.prompt_ids, *answer.tokens]]), output_hidden_states=True).hidden_states
        for answer in plain
    ]
    features = [(states[1][0], states[3][0]) for states in hidden]
    speculative = decode_speculative(target, OraclePolicy(plain, features), PROMPTS, OPTIONS)
    noise = measure_noise(target, plain, 4)
    assert 0 < noise < 1e-3
    result = compare_greedy(plain, speculative, 0.0)
    assert result.identical == len(PROMPTS), result
    assert max(answer.accept_len or 0 for answer in speculative) > 2
