"""HelixTokenizer: ids, layout, masks, and what survives saving and pickling."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import transformers
from hypothesis import given, settings

from helixctl.data.chat import render_chat
from helixctl.errors import DataError, ModelError
from helixctl.models.chat_template import INFERENCE_TEMPLATE, TRAINING_TEMPLATE
from helixctl.models.tokenizer import HelixTokenizer
from tests.conftest import ROOT
from tests.data.templates import byte_tokenizer
from tests.gpt2 import save_gpt2
from tests.models import qwen_layout

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say hello"},
    {"role": "assistant", "content": "Hello there"},
    {"role": "user", "content": "And goodbye"},
    {"role": "assistant", "content": "See you"},
    {"role": "user", "content": "Thanks"},
]
IDS = {
    "<|endoftext|>": 50256,
    "<|im_start|>": 50257,
    "<|im_end|>": 50258,
    "<tool_call>": 50259,
    "</tool_call>": 50260,
    "<tool_response>": 50261,
    "</tool_response>": 50262,
    "<think>": 50263,
    "</think>": 50264,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gpt2(tmp_path_factory.mktemp("hub") / "gpt2")


@pytest.fixture(scope="module")
def gpt2(base: Path) -> HelixTokenizer:
    return HelixTokenizer(base)


@pytest.fixture(scope="module")
def helix() -> HelixTokenizer:
    """One token per byte: needs no vocabulary, and every character shows in the mask."""
    return HelixTokenizer(byte_tokenizer(None))


def text(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def masked(tokenizer: HelixTokenizer, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    chat = tokenizer.encode_chat(messages, **options)
    pairs = zip(chat.input_ids, chat.loss_mask, strict=True)
    return [str(tokenizer.decode([token])) for token, own in pairs if own]


def golden_cases(shared_dir: Path) -> list[dict[str, Any]]:
    cases = json.loads((shared_dir / "cases" / "qwen3_chat.json").read_text(encoding="utf-8"))
    assert len(cases) >= 16
    return list(cases)


# ----------------------------------------------------------------------------------------------------- ids and sizes


def test_ids_and_sizes_on_gpt2(gpt2: HelixTokenizer) -> None:
    assert {token: gpt2.convert_tokens_to_ids(token) for token in IDS} == IDS
    assert (len(gpt2), gpt2.vocab_size, gpt2.padded_vocab_size) == (50265, 50257, 50304)
    assert gpt2("Hello world")["input_ids"] == [15496, 995]
    assert (gpt2.eos_token_id, gpt2.pad_token_id) == (50256, 50256)


def test_name_of_a_base_is_a_hub_name_or_a_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base.parent)
    assert len(HelixTokenizer("gpt2")) == 50265
    assert len(HelixTokenizer.from_pretrained("gpt2")) == 50265


def test_unknown_base_is_named() -> None:
    with pytest.raises(ModelError, match="'no-such-base' is no folder"):
        HelixTokenizer("no-such-base")


def test_base_without_an_end_of_text_is_refused() -> None:
    endless = byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(ModelError, match="no token that ends a text"):
        HelixTokenizer(endless)


def test_tokens_of_the_base_keep_their_ids(gpt2: HelixTokenizer) -> None:
    again = HelixTokenizer(gpt2)
    assert again.get_vocab() == gpt2.get_vocab()


def test_generation_stops_at_the_end_of_a_turn_and_of_a_text(gpt2: HelixTokenizer, tmp_path: Path) -> None:
    assert gpt2.stop_token_ids == (50258, 50256)
    gpt2.make_generation_config().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [50258, 50256]


def test_think_and_tool_text_survives_skipping_special_tokens(gpt2: HelixTokenizer) -> None:
    ids = gpt2("<|im_start|><think>a</think><tool_call>b</tool_call><|im_end|>")["input_ids"]
    assert gpt2.decode(ids, skip_special_tokens=True) == "<think>a</think><tool_call>b</tool_call>"


def test_decoding_gives_back_what_was_encoded(gpt2: HelixTokenizer) -> None:
    written = "it 's , a  test .\n\n\tdon 't"
    assert gpt2.decode(gpt2(written)["input_ids"]) == written


# ------------------------------------------------------------------------------------------------------------ layout


def test_golden_cases(helix: HelixTokenizer, gpt2: HelixTokenizer, shared_dir: Path) -> None:
    for case in golden_cases(shared_dir):
        for tokenizer in (helix, gpt2):
            assert text(tokenizer, case["messages"], **case["kwargs"]) == case["expected"], case["name"]
        inference = text(helix, case["messages"], chat_template=INFERENCE_TEMPLATE, **case["kwargs"])
        assert inference == case["expected"], case["name"]
        slow = "".join(piece for piece, _ in qwen_layout.render(case["messages"], **case["kwargs"]))
        assert slow == case["expected"], case["name"]


@settings(max_examples=300)
@given(
    chat=qwen_layout.chats(),
    tools=qwen_layout.TOOLS,
    prompt=st.booleans(),
    options=st.sampled_from([{}, {"enable_thinking": True}, {"enable_thinking": False}]),
)
def test_both_templates_render_what_the_rules_say(
    helix: HelixTokenizer, chat: list[dict[str, Any]], tools: Any, prompt: bool, options: dict[str, bool]
) -> None:
    expected = "".join(piece for piece, _ in qwen_layout.render(chat, tools, prompt, **options))
    for template in (TRAINING_TEMPLATE, INFERENCE_TEMPLATE):
        given_options = {"tools": tools, "add_generation_prompt": prompt, "chat_template": template, **options}
        assert text(helix, chat, **given_options) == expected


def test_unknown_roles_render_nothing_and_are_refused_for_training(helix: HelixTokenizer) -> None:
    odd = [{"role": "developer", "content": "x"}, {"role": "user", "content": "Hi"}]
    assert text(helix, odd) == "<|im_start|>user\nHi<|im_end|>\n"
    with pytest.raises(DataError, match="no role 'developer'"):
        helix.encode_chat([*odd, {"role": "assistant", "content": "a"}])


def test_text_parts_are_joined_for_training_and_others_refused(helix: HelixTokenizer) -> None:
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert masked(helix, [{"role": "user", "content": "q"}, answer])[-3:] == ["a", "b", "<|im_end|>"]
    with pytest.raises(DataError, match="is not text"):
        helix.encode_chat([{"role": "user", "content": [{"type": "image", "url": "x"}]}, answer])


# ------------------------------------------------------------------------------------------------------------- masks


def test_mask_on_gpt2_is_exact(gpt2: HelixTokenizer) -> None:
    expected = ["Hello", " there", "<|im_end|>", "See", " you", "<|im_end|>"]
    assert masked(gpt2, TURNS) == expected
    encoded: Any = gpt2.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    own = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    assert [gpt2.decode([token]) for token, flag in own if flag] == expected
    labels = gpt2.encode_chat(TURNS).labels
    assert sum(label != -100 for label in labels) == 6


@settings(max_examples=200)
@given(chat=qwen_layout.chats(qwen_layout.PLAIN_TEXTS), tools=qwen_layout.TOOLS)
def test_mask_covers_exactly_what_the_assistant_wrote(
    helix: HelixTokenizer, chat: list[dict[str, Any]], tools: Any
) -> None:
    chat = [m for m in chat if m["role"] != "assistant"] + [m for m in chat if m["role"] == "assistant"]
    trimmed = [{**m, "content": m["content"].lstrip("\n")} if m["role"] == "assistant" else m for m in chat]
    trimmed = [{**m, "content": "part"} if isinstance(m["content"], list) else m for m in trimmed]
    pieces = qwen_layout.render(trimmed, tools)
    if not any(own for _, own in pieces):
        with pytest.raises(DataError, match="no token of the conversation is supervised"):
            helix.encode_chat(chat, tools)
        return
    encoded = helix.encode_chat(chat, tools)
    assert helix.decode(encoded.input_ids) == "".join(piece for piece, _ in pieces)
    supervised = [token for token, own in zip(encoded.input_ids, encoded.loss_mask, strict=True) if own]
    assert helix.decode(supervised) == "".join(piece for piece, own in pieces if own)


def test_line_breaks_that_begin_an_answer_do_not_reach_into_the_prompt(gpt2: HelixTokenizer) -> None:
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\n\n\nanswer"}, TURNS[1]]
    assert masked(gpt2, history) == ["answer", "<|im_end|>"]
    for lead in ("  ", " \n\n", "\t\n"):
        history[1] = {"role": "assistant", "content": lead + "answer"}
        supervised = masked(gpt2, history)
        assert "".join(supervised).lstrip() == "answer<|im_end|>", "nothing of the header"


def test_mask_is_what_prepare_makes(gpt2: HelixTokenizer) -> None:
    rendered = render_chat(gpt2, TURNS)
    encoded = gpt2.encode_chat(TURNS)
    assert rendered.input_ids.tolist() == encoded.input_ids
    assert rendered.loss_mask.tolist() == encoded.loss_mask


def test_no_supervised_token_is_an_error_also_after_truncation(gpt2: HelixTokenizer) -> None:
    with pytest.raises(DataError, match="no token of the conversation is supervised"):
        gpt2.encode_chat(TURNS[:2])
    length = gpt2.encode_chat(TURNS).loss_mask.index(True)
    with pytest.raises(DataError, match=f"within the first {length} tokens"):
        gpt2.encode_chat(TURNS, max_length=length)
    assert masked(gpt2, TURNS, max_length=length + 1) == ["Hello"]


def test_template_without_tags_is_an_error_not_a_mask_of_zeros(base: Path) -> None:
    plain = HelixTokenizer(base, chat_template=INFERENCE_TEMPLATE)
    with pytest.raises(ModelError, match="nothing would be supervised"):
        plain.encode_chat(TURNS)


def test_missing_template_is_an_error_with_a_fix(base: Path) -> None:
    bare = HelixTokenizer(base, chat_template=None)
    for use in (bare.apply_chat_template, bare.encode_chat):
        with pytest.raises(ModelError, match="no chat template, and conversations need one"):
            use(TURNS)


# --------------------------------------------------------------------------------------------------- saved and pickled


def test_saved_tokenizer_is_read_by_autotokenizer(gpt2: HelixTokenizer, tmp_path: Path, shared_dir: Path) -> None:
    gpt2.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast", "known to every release"
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    same_as(gpt2, again)
    for case in golden_cases(shared_dir):
        assert text(again, case["messages"], **case["kwargs"]) == case["expected"], case["name"]
    reloaded = HelixTokenizer(tmp_path)
    same_as(gpt2, reloaded)
    assert masked(reloaded, TURNS) == masked(gpt2, TURNS)


def test_pickle_keeps_template_ids_and_methods(gpt2: HelixTokenizer) -> None:
    content = pickle.dumps(gpt2)
    assert len(content) < 4 << 20, "every spawned worker gets it"
    again = pickle.loads(content)
    same_as(gpt2, again)
    assert again.stop_token_ids == gpt2.stop_token_ids and masked(again, TURNS) == masked(gpt2, TURNS)


@pytest.mark.slow
def test_pickle_is_read_by_a_fresh_process(gpt2: HelixTokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(gpt2))
    program = "import pickle, sys; t = pickle.load(open(sys.argv[1], 'rb')); print(len(t), t.stop_token_ids)"
    command = [sys.executable, "-c", program, str(tmp_path / "tokenizer.pkl")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "50265 (50258, 50256)", done.stderr


def same_as(tokenizer: HelixTokenizer, other: Any) -> None:
    assert other.get_vocab() == tokenizer.get_vocab() and len(other) == len(tokenizer)
    assert other.chat_template == tokenizer.chat_template
    assert (other.eos_token_id, other.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    sample = "def f(x):\n\n    return '<think>' + x  # don't"
    assert other(sample)["input_ids"] == tokenizer(sample)["input_ids"]
    assert other.decode(other(sample)["input_ids"]) == sample
