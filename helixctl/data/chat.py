"""A conversation into ids and a loss mask, by the tokenizer's own chat template.

Supervised is what the model writes when it is served: everything behind the generation prompt, up to and including
the token that ends the turn; not the line break after it. Where the template marks that itself (``{% generation %}``)
its mask is taken. Elsewhere each turn is found by two independent ways that must agree:

* rendered-prefix differences: the turn lies between the prompt rendered without it and the conversation up to it.
  Templates that render history differently (reasoning dropped) are not prefixes of themselves; there the turn lies
  between the generation prompt's text and the closing text, and must be the right one of all such places;
* content difference: the answer is replaced by a marker, the conversation rendered again; what changed is the answer.

Text is tokenised once, and character spans carry the mask to the tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from helixctl.data.records import Chat, Message
from helixctl.errors import DataError

MaskPolicy = Literal["all_turns", "last_turn"]
_MARKER = "\ue000\ue001answer\ue002\ue003"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TAG_FIX = "give the tokenizer a chat template with {% generation %} tags around the answers"


class Span(NamedTuple):
    """Characters [start, end) of a rendered conversation."""

    start: int
    end: int


@dataclass(frozen=True)
class Rendered:
    """One tokenised conversation of L tokens."""

    input_ids: NDArray[np.uint32]  # [L]
    loss_mask: NDArray[np.bool_]  # [L]


class Unrenderable(Exception):
    """A conversation that the template or the tokenizer cannot take; counted under ``reason``."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    policy: MaskPolicy = "all_turns",
) -> Rendered:
    """Ids and mask of one conversation; ``ChatRenderer`` is the form for many.

    Raises:
        DataError: the template cannot be used, or the two ways to find the answers disagree.
        Unrenderable: this one conversation cannot be rendered.
    """
    chat = Chat(list(messages), list(tools) if tools else None, "conversation")
    return ChatRenderer(tokenizer, policy).render(chat)


class ChatRenderer:
    """Renders conversations with one tokenizer and one mask policy."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, policy: MaskPolicy) -> None:
        """Learns the texts around an answer from a conversation of two turns.

        Raises:
            DataError: no chat template, or one that cannot render two turns.
        """
        if not tokenizer.chat_template:
            raise DataError(
                "the target's tokenizer has no chat template, and chats need one",
                fix="put the model's chat_template.jinja beside its tokenizer.json",
            )
        self._tokenizer = tokenizer
        self._policy = policy
        special = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special and str(t)]
        self._control = re.compile("|".join(map(re.escape, special))) if special else None
        self._header, self._closer, self._separator = self._learn_markers()

    def render(self, chat: Chat) -> Rendered:
        """Ids and mask of one conversation.

        Raises:
            DataError: the ways to find the answers disagree; shows the conversation.
            Unrenderable: the template refuses it, or it holds text that would become control tokens.
        """
        self._refuse_control_text(chat)
        template = self._tokenizer.get_chat_template(None, chat.tools)
        text = self._apply(chat.messages, chat.tools)
        ids, offsets = self._tokenise(text)
        answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if _GENERATION_TAG.search(template):
            mask = self._tagged_mask(chat, text, ids, offsets)
        else:
            spans = [self._turn(chat, text, answers, n) for n in range(len(answers))]
            mask = _inside(offsets, spans if self._policy == "all_turns" else spans[-1:])
        if chat.cut:
            length = self._length_of_cut(chat, text, offsets)
            ids, mask = ids[:length], mask[:length]
        return Rendered(ids, mask)

    def _learn_markers(self) -> tuple[str, str, str]:
        """Texts of the generation prompt, of the end of a turn, and of the white space after it."""
        user: Message = {"role": "user", "content": "question"}
        try:
            without, prompt = self._apply([user], None), self._apply([user], None, prompt=True)
            whole = self._apply([user, {"role": "assistant", "content": _MARKER}], None)
        except Unrenderable as problem:
            text = f"the chat template cannot render a question and an answer: {problem.detail}"
            raise DataError(text, fix="correct the target's chat template") from problem
        if whole.count(_MARKER) != 1:
            raise DataError(f"the chat template does not show an answer as it is: {_short(whole)}", fix=_TAG_FIX)
        after = whole[whole.index(_MARKER) + len(_MARKER) :]
        closer = after.rstrip()
        header = prompt[len(without) :] if prompt.startswith(without) else ""
        return header, closer, after[len(closer) :]

    def _refuse_control_text(self, chat: Chat) -> None:
        """Text that the tokenizer would read as a control token ends turns where there are none."""
        if self._control is None:
            return
        written = [message.get(key, "") for message in chat.messages for key in ("content", "reasoning_content")]
        calls = [message["tool_calls"] for message in chat.messages if "tool_calls" in message]
        if calls or chat.tools:
            written.append(json.dumps([calls, chat.tools], ensure_ascii=False))
        for text in written:
            found = self._control.search(text)
            if found:
                raise Unrenderable("control_text", f"the text {found[0]!r} would become a control token")

    def _apply(self, messages: Sequence[Message], tools: list[Any] | None, *, prompt: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # the template is a program that came with the model
            raise Unrenderable("template_error", f"{type(error).__name__}: {error}") from error
        assert isinstance(text, str)
        return text

    def _tokenise(self, text: str) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Ids [L] and character offsets [L, 2]."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Unrenderable("not_unicode", str(error)) from error
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = flat_ids(encoded["input_ids"])
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        assert ids.size == len(offsets), "one pair of offsets per token"
        return ids, offsets

    def _turn(self, chat: Chat, text: str, answers: Sequence[int], n: int) -> Span:
        """The supervised characters of the n-th answer, found and checked."""
        index = answers[n]
        content = self._content(chat, text, index)
        if content is None:
            raise self._disagreement(chat, text, "an answer leaves no trace in the rendered conversation")
        prefix = self._prefix_difference(chat, text, index)
        if prefix is None:
            return self._between_markers(chat, text, content, (n, len(answers)))
        lead = text[prefix.start : content.start]
        # Behind the served prompt everything is the model's; where the prompt has no header, the template may put one
        # in front of the answer that the model never writes.
        lead_is_written = self._header not in lead if self._header else not lead.strip()
        encloses = prefix.start <= content.start and content.end <= prefix.end
        if not (encloses and lead_is_written and text[content.end : prefix.end] == self._closer):
            found = f"by prefixes {_short(text[slice(*prefix)])}, by content {_short(text[slice(*content)])}"
            raise self._disagreement(chat, text, found)
        return prefix

    def _content(self, chat: Chat, text: str, index: int) -> Span | None:
        """What of ``text`` changes when message ``index`` says something else."""
        message = chat.messages[index]
        marked: Message = {"role": message["role"], "content": _MARKER}
        variants = [marked]
        if "tool_calls" in message:  # without the calls, unless the template then refuses the results
            variants.append({**marked, "tool_calls": message["tool_calls"]})
        extra = {key: message[key] for key in ("name", "tool_call_id") if key in message}
        for variant in variants:
            changed_messages = [*chat.messages[:index], {**variant, **extra}, *chat.messages[index + 1 :]]
            try:
                changed = self._apply(changed_messages, chat.tools)
            except Unrenderable:
                continue
            start = _common_prefix(text, changed)
            tail = min(_common_suffix(text, changed), min(len(text), len(changed)) - start)
            if _MARKER in changed[start : len(changed) - tail]:
                return Span(start, len(text) - tail)
        return None

    def _prefix_difference(self, chat: Chat, text: str, index: int) -> Span | None:
        """From the served prompt to the end of the turn; None where the template is not prefix-stable here."""
        last = index + 1 == len(chat.messages)
        try:
            prompt = self._apply(chat.messages[:index], chat.tools, prompt=True)
            up_to = text if last else self._apply(chat.messages[: index + 1], chat.tools)
        except Unrenderable:
            return None
        stable = text.startswith(prompt) and text.startswith(up_to) and up_to.endswith(self._separator)
        end = len(up_to) - len(self._separator)
        return Span(len(prompt), end) if stable and len(prompt) <= end else None

    def _between_markers(self, chat: Chat, text: str, content: Span, number: tuple[int, int]) -> Span:
        """From the generation prompt's text before the answer to the closing text after it."""
        header, closer = self._header, self._closer
        n, num_answers = number
        places = [found.end() for found in re.finditer(re.escape(header), text)] if header else []
        start = text.rfind(header, 0, content.start) + len(header) if header else -1
        right_place = len(places) == num_answers and places[n] == start
        if not right_place or not closer or text.find(closer, start) != content.end:
            found = (
                f"{len(places)} generation prompts for {num_answers} answers, content {_short(text[slice(*content)])}"
            )
            raise self._disagreement(chat, text, found)
        return Span(start, content.end + len(closer))

    def _tagged_mask(
        self, chat: Chat, text: str, ids: NDArray[np.uint32], offsets: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """The template's own mask, bool [L]; checked: answers wholly or not at all, nothing of anybody else."""
        encoded: Any = self._tokenizer.apply_chat_template(
            chat.messages, tools=chat.tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        if not np.array_equal(flat_ids(encoded["input_ids"]), ids):
            raise self._disagreement(chat, text, "the template's ids differ from those of its text")
        mask = flat_ids(encoded["assistant_masks"]).astype(np.bool_)
        answers: list[Span] = []
        for index, message in enumerate(chat.messages):
            content = self._content(chat, text, index)
            if content is None:
                continue
            supervised = mask[_inside(offsets, [content])]
            is_answer = message["role"] == "assistant"
            answers += [content] if is_answer else []
            if supervised.any() and not (is_answer and supervised.all()):
                found = f"tags and content differ at the {message['role']} message {_short(text[slice(*content)])}"
                raise self._disagreement(chat, text, found)
        runs = _runs(mask)
        for first, last in runs:
            run = Span(int(offsets[first, 0]), int(offsets[last, 1]))
            if not any(run.start <= answer.start and answer.end <= run.end for answer in answers):
                found = f"the tags mark {_short(text[slice(*run)])}, which is no answer"
                raise self._disagreement(chat, text, found)
        if self._policy == "last_turn" and runs:
            mask[: runs[-1][0]] = False
        return mask

    def _length_of_cut(self, chat: Chat, text: str, offsets: NDArray[np.int64]) -> int:
        """Tokens up to the end of the last answer's content."""
        content = self._content(chat, text, len(chat.messages) - 1)
        if content is None:
            raise self._disagreement(chat, text, "a cut answer leaves no trace in the rendered conversation")
        beyond = np.flatnonzero(offsets[:, 1] > content.end)
        return int(beyond[0]) if beyond.size else len(offsets)

    def _disagreement(self, chat: Chat, text: str, found: str) -> DataError:
        message = f"{chat.where}: the answers cannot be told from the rest with certainty: {found}"
        return DataError(f"{message}\n  rendered: {_short(text, 600)}", fix=_TAG_FIX)


def flat_ids(value: Any) -> NDArray[np.uint32]:
    """Ids of one text, uint32 [L], from whatever a tokenizer returns: a list, a batch of one, an array or a tensor."""
    if hasattr(value, "keys"):
        value = value["input_ids"]
    array = np.asarray(value)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"a tokenizer returned {array.dtype} of shape {array.shape} for one text")
    return array.astype(np.uint32)


def _inside(offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Tokens, bool [L], that lie wholly inside one of the spans."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    mask = np.zeros(len(offsets), dtype=np.bool_)
    for span in spans:
        mask |= (starts >= span.start) & (ends <= span.end) & (starts < span.end)
    return mask


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First and last token of every run of supervised tokens."""
    edges = np.diff(mask.astype(np.int8), prepend=0, append=0)
    firsts, behinds = np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist()
    return [(first, behind - 1) for first, behind in zip(firsts, behinds, strict=True)]


def _common_prefix(first: str, second: str) -> int:
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first.startswith(second[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def _common_suffix(first: str, second: str) -> int:
    return _common_prefix(first[::-1], second[::-1])


def _short(text: str, limit: int = 160) -> str:
    return repr(text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}")
