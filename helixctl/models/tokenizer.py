"""Tokenizers: the one that stands beside a target's weights, and HelixTokenizer for models of one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken

from helixctl.errors import DataError, ModelError
from helixctl.models.chat_template import GENERATION_TAG, TRAINING_TEMPLATE
from helixctl.recipe.schema import TargetOptions

END_OF_TEXT = "<|endoftext|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
_SPECIAL = (TURN_START, TURN_END)
# Not special, so that skip_special_tokens keeps the text of calls and reasoning.
_PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_HEADER = f"{TURN_START}assistant"
_ROLES = ("system", "user", "assistant", "tool")
_ROW_MULTIPLE = 64
_UNLIMITED = 1 << 40
_CARRIED = ("bos_token", "eos_token", "unk_token", "pad_token", "padding_side", "truncation_side")


def load_tokenizer(options: TargetOptions) -> Any:
    """The tokenizer that stands beside the target's weights, with its chat template.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    return _load(options.model, "target.model", trust_remote_code=options.trust_remote_code)


@dataclass(frozen=True)
class EncodedChat:
    """One conversation of L tokens."""

    input_ids: list[int]
    loss_mask: list[bool]
    """What the assistant wrote, the end of its turn included."""

    @property
    def labels(self) -> list[int]:
        """``input_ids``, -100 where the mask is off."""
        return [token if own else -100 for token, own in zip(self.input_ids, self.loss_mask, strict=True)]


class HelixTokenizer(transformers.PreTrainedTokenizerFast):
    """A fast tokenizer with Qwen3's chat layout: one for pretraining and for instruct tuning later.

    Adds ``<|im_start|>``, ``<|im_end|>`` and the tags of calls and reasoning to a base tokenizer; those that the base
    has keep their ids. Documents end with ``eos_token``, which is ``<|endoftext|>`` where the base knows it; padding is
    the base's own, else the same token, so masks come from lengths and never from ids. It pickles, and what
    ``save_pretrained`` writes is read by ``AutoTokenizer`` too.

    Size a model with ``len(tokenizer)`` or ``padded_vocab_size``: ``vocab_size`` leaves added tokens out.
    """

    def __init__(
        self, base: str | Path | transformers.PreTrainedTokenizerBase, *, chat_template: str | None = TRAINING_TEMPLATE
    ) -> None:
        """Build on ``base``: a hub name, a folder (one that HelixTokenizer saved as well), or a tokenizer.

        ``chat_template``: the training template unless given; None for a base model that must not be chatted with.

        Raises:
            ModelError: the base cannot be loaded, is not a fast tokenizer, or has no token that ends a text.
        """
        loaded = base if isinstance(base, transformers.PreTrainedTokenizerBase) else _load(str(base), "tokenizer")
        if not loaded.is_fast:
            raise ModelError(f"{base} has no fast tokenizer (tokenizer.json)", fix="convert it, or use another base")
        given = {name: getattr(loaded, name) for name in _CARRIED if getattr(loaded, name) is not None}
        super().__init__(  # type: ignore[no-untyped-call]  # the library annotates nothing here
            tokenizer_object=loaded.backend_tokenizer,
            model_max_length=_UNLIMITED,  # rows are cut by loaders; no warnings about length
            clean_up_tokenization_spaces=False,  # decoding gives back what was encoded
            **given,
        )
        self.name_or_path = loaded.name_or_path
        self.chat_template = chat_template
        self.add_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL], special_tokens=True)
        self.add_tokens([AddedToken(t, special=False, normalized=False) for t in _PLAIN])
        if END_OF_TEXT in self.get_vocab():
            self.eos_token = END_OF_TEXT
        if self.eos_token is None:
            fix = f"use a base that has one, such as gpt2 with {END_OF_TEXT}"
            raise ModelError(f"{base} has no token that ends a text (eos_token)", fix=fix)
        if self.special_tokens_map.get("pad_token") is None:
            self.pad_token = self.eos_token

    @classmethod
    def from_pretrained(  # type: ignore[override]  # one way to load, not the many of the library
        cls, pretrained_model_name_or_path: str | Path, *_: Any, **options: Any
    ) -> HelixTokenizer:
        """The same as the constructor, by the name that transformers gives it."""
        return cls(pretrained_model_name_or_path, **options)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of an embedding for this tokenizer: ``len()`` rounded up to a multiple of 64."""
        return -(-len(self) // _ROW_MULTIPLE) * _ROW_MULTIPLE

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generated answer: the end of a turn, and of a text."""
        ids: list[Any] = [self.convert_tokens_to_ids(TURN_END), self.eos_token_id]
        return tuple(dict.fromkeys(ids))

    def make_generation_config(self) -> transformers.GenerationConfig:
        """What goes beside a model's weights, so that every engine stops at the right tokens."""
        return transformers.GenerationConfig(eos_token_id=list(self.stop_token_ids), pad_token_id=self.pad_token_id)

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """The template in use.

        Raises:
            ModelError: there is none. A conversation is never formatted by hand.
        """
        if chat_template is None and not self.chat_template:
            fix = "make it with HelixTokenizer(base), which brings one, or set tokenizer.chat_template"
            raise ModelError("this tokenizer has no chat template, and conversations need one", fix=fix)
        return str(super().get_chat_template(chat_template, tools))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        max_length: int | None = None,
    ) -> EncodedChat:
        """Ids and mask of a conversation for training, cut behind ``max_length`` tokens.

        Text parts are joined, and line breaks that begin an answer are removed: those in front of the answer would
        swallow them. A token that reaches from the prompt into the answer is not supervised.

        Raises:
            DataError: an unknown role, content that is not text, or no supervised token (within ``max_length``).
            ModelError: no chat template, or one without generation tags.
        """
        if not GENERATION_TAG.search(self.get_chat_template(None, tools)):
            fix = "use helixctl.models.chat_template.TRAINING_TEMPLATE; it renders the same text"
            raise ModelError("the chat template has no {% generation %} tags, so nothing would be supervised", fix=fix)
        chat, called = [_checked(message) for message in messages], list(tools) if tools else None
        encoded: Any = self.apply_chat_template(
            chat,
            tools=called,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
        mask = [bool(flag) for flag in encoded["assistant_masks"]]
        text = str(self.apply_chat_template(chat, tools=called, tokenize=False))
        _leave_out_straddling(mask, text, encoded["offset_mapping"])
        result = EncodedChat(list(encoded["input_ids"])[:max_length], mask[:max_length])
        if not any(result.loss_mask):
            where = "" if max_length is None else f" within the first {max_length} tokens"
            raise DataError(f"no token of the conversation is supervised{where}", fix="give it an assistant message")
        return result

    def save_pretrained(  # type: ignore[override]  # passes on what it does not look at
        self, save_directory: str | Path, *options: Any, **named: Any
    ) -> tuple[str, ...]:
        """Write the files that ``AutoTokenizer`` and ``HelixTokenizer`` read; under a class name that all know."""
        plain = transformers.PreTrainedTokenizerFast(
            tokenizer_object=self.backend_tokenizer, **{**self.init_kwargs, **self.special_tokens_map}
        )
        plain.chat_template = self.chat_template
        written = tuple(plain.save_pretrained(save_directory, *options, **named))
        config = Path(save_directory) / "tokenizer_config.json"
        content = json.loads(config.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        config.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return written


def _checked(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as the template takes it."""
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise DataError(f"the template knows no role {role!r} and would drop the message", fix=f"use {_ROLES}")
    if isinstance(content, list):
        parts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else parts
    if not isinstance(content, str | None):
        raise DataError(f"the content of a {role} message is not text: {str(content)[:200]}", fix="give it text")
    if role == "assistant" and isinstance(content, str):
        content = content.lstrip("\n")
    return {**message, "content": content}


def _leave_out_straddling(mask: list[bool], text: str, offsets: Sequence[tuple[int, int]]) -> None:
    """Take tokens out that hold the prompt's last line break as well as the first characters of the answer."""
    for i, (start, end) in enumerate(offsets):
        if mask[i] and end > start + 1 and text.startswith("\n", start) and text.endswith(_HEADER, 0, start):
            mask[i] = False


def _load(name: str, what: str, *, trust_remote_code: bool = False) -> Any:
    """A tokenizer by hub name or folder; ``what`` is the option that named it."""
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        folder = Path(name)
        if not folder.is_dir():
            text = f"{what} {name!r} is no folder, and the hub gives no tokenizer of that name"
            raise ModelError(text, fix="check the path, or download the model and name its folder") from error
        if not (folder / "tokenizer.json").is_file():
            fix = "copy the tokenizer's files of the original model beside the weights"
            raise ModelError(f"{folder} has no tokenizer.json", fix=fix) from error
        text = f"cannot load the tokenizer of {folder}: {error}"
        raise ModelError(text, fix="download the model's tokenizer files again") from error
