"""On a CPU the fastest way is the slow loop; margins come from it everywhere."""

from __future__ import annotations

import pytest

from helixctl.decoding.decoded import DecodeOptions
from helixctl.decoding.fastest import FastestDecoder
from helixctl.decoding.speculative import decode_plain, decode_speculative
from tests.decoding.fakes import FakePolicy, FakeTarget, perfect
from tests.decoding.test_decoding_gpu import PROMPTS as SHORT
from tests.decoding.test_decoding_gpu import make

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8]]
OPTIONS = DecodeOptions(max_new_tokens=9, batch_size=2)


def test_answers_are_in_order_both_ways():
    target = FakeTarget()
    policy = FakePolicy(target, 4, perfect)
    decoder = FastestDecoder(target, policy)
    assert decoder.plain(PROMPTS, OPTIONS) == decode_plain(target, PROMPTS, OPTIONS)
    assert decoder.drafted(PROMPTS, OPTIONS) == decode_speculative(target, policy, PROMPTS, OPTIONS)


@pytest.mark.gpu
def test_both_ways_agree_on_a_gpu_call_after_call(tmp_path):
    target, policy = make(tmp_path, "cuda:0")
    decoder = FastestDecoder(target, policy)
    for size in (2, 4, 2):
        options = DecodeOptions(max_new_tokens=24, batch_size=size)
        expected = [one.tokens for one in decode_plain(target, SHORT, options)]
        assert [one.tokens for one in decoder.plain(SHORT, options)] == expected
        assert [one.tokens for one in decoder.drafted(SHORT, options)] == expected
    margins = DecodeOptions(max_new_tokens=5, record_margins=True)
    assert all(len(one.margins) == 5 for one in decoder.plain(SHORT, margins))
