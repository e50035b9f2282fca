"""Lets the target answer prompts, so that a drafter trains on the target's own words. `prepare` reads the result.

Only the last answer of a conversation is made. Prompts that an earlier, interrupted call answered are skipped, and
every prompt is accounted for: answered, resumed, a duplicate, or an error with a reason.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError

from helixctl.data.answers import AnswerFile
from helixctl.data.prompts import BadPrompt, Prompt, read_prompts
from helixctl.decoding.decoded import Decoded, DecodeOptions, DecodeProgress
from helixctl.decoding.policy import DecodeTarget
from helixctl.decoding.speculative import Prompts, stream_plain
from helixctl.decoding.steady import SteadyDecoder
from helixctl.errors import UsageError
from helixctl.recipe.schema import RegenerateOptions

WINDOW_BATCHES = 64
"""Prompts are sorted by length within so many batches: little padding, and little read ahead of what is written. At the
end of a window rows stand idle while the last answers are finished."""
CACHE_TOKENS = 131_072
"""Most positions in a batch's cache; batches of long prompts get fewer rows."""


class ChatTokenizer(Protocol):
    """What is used of a tokenizer."""

    @property
    def eos_token_id(self) -> int | None:
        """Ends an answer."""

    @property
    def chat_template(self) -> Any:
        """The template's text; None where there is none."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """The conversation as text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """Text of token ids."""


@dataclass(frozen=True)
class RegenerateJob:
    """What is answered, where to, and how."""

    prompts: Path
    """JSONL as in data/prompts.py."""
    output: Path
    """Chat JSONL; an existing one is continued."""
    model: str
    """Name or path of the target, for the fingerprint."""
    options: RegenerateOptions
    stop_ids: frozenset[int]
    """Tokens that end an answer, beside the tokenizer's eos."""
    max_len: int
    """The target's position limit, in tokens."""
    seed: int = 0
    """Seeds samples; matters with a temperature only."""


@dataclass(frozen=True)
class RegenerateProgress:
    """How far the work has come."""

    num_read: int
    """Prompts read or skipped so far, those that are being answered included."""
    num_done: int
    """Prompts accounted for."""
    num_tokens: int
    """Tokens of new answers."""


@dataclass(frozen=True)
class RegenerateResult:
    """The account: read == answered + resumed + duplicates + sum(errors).

    With further samples a prompt counts once for each of its answers.
    """

    read: int
    answered: int
    resumed: int
    """Answered by an earlier call."""
    duplicates: int
    """Same prompt as an earlier one of the file."""
    stop: int
    """Of answered and resumed: ended by the target."""
    length: int
    """Of answered and resumed: cut at max_new_tokens."""
    errors: dict[str, int]
    """Reason -> prompts without an answer: not_json, no_prompt, no_user_turn, template, too_long, empty_answer."""
    tokens: int
    """Of the new answers, stop tokens included."""
    elapsed_s: float


OnProgress = Callable[[RegenerateProgress], None]


class Decode(Protocol):
    """Answers prompts; see ``stream_plain``."""

    def __call__(
        self, prompts: Prompts, options: DecodeOptions, *, on_progress: Callable[[DecodeProgress], None]
    ) -> Iterator[tuple[int, Decoded]]:
        """Index and answer, in any order."""
        ...


def choose_decoder(target: DecodeTarget) -> Decode:
    """On a GPU steps are captured, and the batch keeps its size; on a CPU it shrinks with its rows."""
    if target.device.type == "cuda":
        return SteadyDecoder(target).stream
    return partial(stream_plain, target)


@dataclass
class _Account:
    """What is counted on the way."""

    read: int = 0
    answered: int = 0
    resumed: int = 0
    duplicates: int = 0
    tokens: int = 0
    finish: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def done(self) -> int:
        return self.answered + self.resumed + self.duplicates + self.errors.total()


Encoded = tuple[Prompt, list[int]]


def regenerate(
    target: DecodeTarget, tokenizer: ChatTokenizer, job: RegenerateJob, *, on_progress: OnProgress | None = None
) -> RegenerateResult:
    """Answer the prompts of a file; may be killed at any moment and called again.

    An answer is written as soon as it is finished, so the order of the output is not that of the input.

    Raises:
        UsageError: no chat template; the output belongs to other settings or is being written.
        DataError: the prompts cannot be read; the output holds something else.
    """
    if not tokenizer.chat_template:
        raise UsageError(f"the tokenizer of {job.model} has no chat template", fix="use an instruction-tuned target")
    started_at = time.monotonic()
    account = _Account()
    decode = choose_decoder(target)
    with AnswerFile(job.output, _fingerprint(tokenizer, job)) as answers:
        earlier = dict(answers.finish_reasons)
        for draw in _draws(job):
            for batch in _batches(_wanted(tokenizer, draw, earlier, account), job.options):
                _answer(decode, tokenizer, draw, batch, _Sink(answers, account, on_progress))
    assert account.read == account.done, account
    return RegenerateResult(
        read=account.read,
        answered=account.answered,
        resumed=account.resumed,
        duplicates=account.duplicates,
        stop=account.finish["stop"],
        length=account.finish["length"],
        errors=dict(account.errors),
        tokens=account.tokens,
        elapsed_s=time.monotonic() - started_at,
    )


@dataclass(frozen=True)
class _Draw:
    """One answer to every prompt."""

    job: RegenerateJob
    number: int
    """0 is the answer at the job's own temperature, the others are further samples."""

    @property
    def temperature(self) -> float:
        options = self.job.options
        return options.sample_temperature if self.number else options.temperature

    def hash_of(self, prompt: Prompt) -> str:
        """Names the answer in the file: the prompt's own hash for number 0."""
        return f"{prompt.hash}-{self.number}" if self.number else prompt.hash


def _draws(job: RegenerateJob) -> list[_Draw]:
    return [_Draw(job, number) for number in range(1 + job.options.samples)]


def _fingerprint(tokenizer: ChatTokenizer, job: RegenerateJob) -> str:
    """Of everything that an answer depends on beside prompt and number, as far as the user can set it."""
    options = job.options
    drawn = options.temperature > 0 or options.samples > 0
    seed = [job.seed, options.sample_temperature] if drawn else None
    facts = [job.model, tokenizer.chat_template, options.max_new_tokens, options.temperature, seed]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]


def _wanted(tokenizer: ChatTokenizer, draw: _Draw, earlier: Mapping[str, str], account: _Account) -> Iterator[Encoded]:
    """Prompts that have no answer of this draw yet, as token ids; all others are counted here."""
    job, seen = draw.job, set[str]()
    for prompt in read_prompts(job.prompts):
        account.read += 1
        if isinstance(prompt, BadPrompt):
            account.errors[prompt.reason] += 1
            continue
        prompt_hash = draw.hash_of(prompt)
        if prompt_hash in seen:
            account.duplicates += 1
            continue
        seen.add(prompt_hash)
        if prompt_hash in earlier:
            account.resumed += 1
            account.finish[earlier[prompt_hash]] += 1
            continue
        ids = _encode(tokenizer, prompt)
        if ids is None:
            account.errors["template"] += 1
        elif len(ids) + job.options.max_new_tokens > job.max_len:
            account.errors["too_long"] += 1
        else:
            yield prompt, ids


def _encode(tokenizer: ChatTokenizer, prompt: Prompt) -> list[int] | None:
    """Token ids up to where the answer begins; None if the template refuses the conversation."""
    try:
        text = tokenizer.apply_chat_template(
            list(prompt.messages), tools=prompt.tools, add_generation_prompt=True, tokenize=False
        )
    except (TemplateError, TypeError, ValueError):  # what templates raise on roles and contents they do not expect
        return None
    return tokenizer.encode(text, add_special_tokens=False) or None


def _batches(prompts: Iterator[Encoded], options: RegenerateOptions) -> Iterator[list[Encoded]]:
    """Windows of prompts, each split into runs of like length so that one long prompt does not make every row long."""
    window: list[Encoded] = []
    for prompt in prompts:
        window.append(prompt)
        if len(window) == WINDOW_BATCHES * options.batch_size:
            yield from _runs(window, options.max_new_tokens)
            window = []
    yield from _runs(window, options.max_new_tokens)


def _runs(window: list[Encoded], max_new_tokens: int) -> Iterator[list[Encoded]]:
    run: list[Encoded] = []
    for prompt in sorted(window, key=lambda pair: len(pair[1])):
        if run and len(prompt[1]) + max_new_tokens > 2 * (len(run[0][1]) + max_new_tokens):
            yield run
            run = []
        run.append(prompt)
    if run:
        yield run


@dataclass(frozen=True)
class _Sink:
    """Where answers and counts go."""

    answers: AnswerFile
    account: _Account
    on_progress: OnProgress | None

    def tell(self, progress: DecodeProgress | None, tokens_before: int) -> None:
        if self.on_progress is not None:
            tokens = self.account.tokens if progress is None else tokens_before + progress.num_tokens
            self.on_progress(RegenerateProgress(self.account.read, self.account.done, tokens))


def _answer(decode: Decode, tokenizer: ChatTokenizer, draw: _Draw, batch: list[Encoded], sink: _Sink) -> None:
    """Decode some prompts and write every answer when it is finished."""
    job = draw.job
    longest = max(len(ids) for _, ids in batch) + job.options.max_new_tokens
    stop_ids = job.stop_ids if tokenizer.eos_token_id is None else job.stop_ids | {tokenizer.eos_token_id}
    options = DecodeOptions(
        max_new_tokens=job.options.max_new_tokens,
        stop_ids=stop_ids,
        batch_size=max(1, min(job.options.batch_size, CACHE_TOKENS // longest)),
        max_len=job.max_len,
        temperature=draw.temperature,
        seed=job.seed + draw.number,
    )
    tokens_before = sink.account.tokens
    stream = decode([ids for _, ids in batch], options, on_progress=lambda progress: sink.tell(progress, tokens_before))
    for index, decoded in stream:
        prompt = batch[index][0]
        _write(tokenizer, prompt, draw.hash_of(prompt), decoded, sink)
    sink.tell(None, tokens_before)


def _write(tokenizer: ChatTokenizer, prompt: Prompt, prompt_hash: str, decoded: Decoded, sink: _Sink) -> None:
    account = sink.account
    account.tokens += len(decoded.tokens)
    text = _text(tokenizer, decoded)
    if not text.strip():
        account.errors["empty_answer"] += 1
        return
    answer = {"role": "assistant", "content": text}
    sink.answers.append([*prompt.messages, answer], decoded.finish, prompt_hash, prompt.carried)
    account.answered += 1
    account.finish[decoded.finish] += 1


def _text(tokenizer: ChatTokenizer, decoded: Decoded) -> str:
    """The answer without its stop token; special tokens inside stay, since they are what the target wrote."""
    tokens = decoded.tokens[:-1] if decoded.finish == "stop" else decoded.tokens
    text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text.rstrip("\ufffd") if decoded.finish == "length" else text  # a character cut in the middle
