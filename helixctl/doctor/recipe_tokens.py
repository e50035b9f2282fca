"""Checks of `--recipe` that read tokens: tokenizer, chat template, store, supervision, mask token.

The tokenizer's libraries are loaded inside the checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from helixctl.data.store import Split, Store
from helixctl.doctor.probe import Verdict, fail, ok, skip, warn
from helixctl.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FOREIGN_SHARE = 0.75
"""A tokenizer with fewer ids than this share of the embedding's rows is likely another model's."""
_FEW_SUPERVISED, _ALL_SUPERVISED = 0.02, 0.98
_LOW_COVERAGE = 0.5
_LOOKED_AT = 64
"""Documents read for the ends of answers."""
_AGAIN = "run `helixctl prepare` again"
_NO_STORE = "there is no store yet"
_PREPARE = "run `helixctl prepare` first"
_CHAT = "chat"


class TokenCase(Protocol):
    """What these checks need of a case."""

    @property
    def plan(self) -> Plan:
        """The recipe's plan."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""

    @property
    def store(self) -> Store | None:
        """The recipe's store."""


def check_tokenizer(case: TokenCase) -> Iterator[Verdict]:
    """That its ids are rows of the target's embedding, and that both mean the same end of text."""
    tokenizer, facts = case.tokenizer, case.plan.target
    length, rows = len(tokenizer), facts.vocab_size
    told = f"{length} tokens, {rows} embedding rows"
    if length > rows:
        yield fail(f"{told}: the target has no row for the last ones", "put the target's own tokenizer beside it")
        return
    if length < _FOREIGN_SHARE * rows:
        yield warn(f"{told}: this looks like another model's tokenizer", "put the target's own tokenizer beside it")
    end = tokenizer.eos_token_id
    if facts.eos_token_ids and end not in facts.eos_token_ids:
        text = f"the tokenizer ends texts with {end}, the target's config with {list(facts.eos_token_ids)}"
        yield warn(text, "make eos_token in tokenizer_config.json and eos_token_id in generation_config.json agree")
    else:
        yield ok(f"{told}, end of text {end}")


def check_template(case: TokenCase) -> Verdict:
    """That it renders a conversation, marks the answer, and ends it with a token that stops the target."""
    data = case.plan.recipe.data
    if not any(source.format == _CHAT for source in (*data.train, *data.validation.sources)):
        return skip("no source is a chat")
    from helixctl.data.chat import render_chat

    tokenizer = case.tokenizer
    told = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    rendered = render_chat(tokenizer, told, policy=data.mask_policy)
    supervised = np.flatnonzero(rendered.loss_mask)
    if not supervised.size:
        return fail("no token of an answer is supervised", "correct the {% generation %} tags of the chat template")
    last = int(rendered.input_ids[supervised[-1]])
    text = f"answers end with {tokenizer.convert_ids_to_tokens(last)!r}"
    if last not in _stop_ids(case):
        return warn(f"{text}, which does not stop the target", "close the turn inside the {% generation %} tags")
    tagged = "its own generation tags" if "generation %}" in str(tokenizer.chat_template) else "two renderings"
    return ok(f"{text}; answers are found by {tagged}")


def check_store(case: TokenCase) -> Iterator[Verdict]:
    """That the store was made by this tokenizer, of these sources, in this way."""
    store = case.store
    if store is None:
        yield skip(_NO_STORE, _PREPARE)
        return
    from helixctl.data import fingerprint

    fingerprint.check_tokenizer(store, case.tokenizer)  # its DataError is the verdict
    data, manifest = case.plan.recipe.data, store.manifest
    found = []
    if manifest.mask_policy != data.mask_policy:
        text = f"the store supervises {manifest.mask_policy}, the recipe says {data.mask_policy}"
        found.append(fail(text, _AGAIN))
    if manifest.validation_fraction != data.validation.fraction:
        text = f"the store holds {manifest.validation_fraction:g} back, the recipe {data.validation.fraction:g}"
        found.append(warn(text, _AGAIN))
    made_of = {source.path: source.num_bytes for source in manifest.sources}
    sources = (*data.train, *data.validation.sources)
    missing = [source.place for source in sources if source.place not in made_of]
    wanted = [source.path for source in sources if source.path is not None]
    if missing:
        found.append(warn(f"the store was made without {', '.join(missing)}", _AGAIN))
    changed = [str(path) for path in wanted if path.is_file() and made_of.get(str(path)) not in (None, _bytes(path))]
    if changed:
        found.append(warn(f"changed since the store was made: {', '.join(changed)}", _AGAIN))
    yield from found or [ok(f"made by this tokenizer and template; {manifest.kept} of {manifest.read} documents")]


def check_supervision(case: TokenCase) -> Iterator[Verdict]:
    """How much there is to learn, and that answers in the store end where the target stops."""
    store, plan = case.store, case.plan
    share = plan.supervised_share
    if store is None or share is None:
        yield skip(_NO_STORE, _PREPARE)
        return
    text = f"{100 * share:.1f} % of the tokens are supervised"
    is_chat = all(source.format == _CHAT for source in plan.recipe.data.train)
    if share < _FEW_SUPERVISED:
        yield warn(text, "shorten the prompts, or check the template: helixctl prepare --show 3")
    elif is_chat and share > _ALL_SUPERVISED:
        yield warn(f"{text}, prompts too", "check the chat template: helixctl prepare --show 3")
    else:
        yield ok(text)
    coverage = plan.anchor_coverage
    if coverage is not None and coverage < _LOW_COVERAGE:
        text = f"anchors reach {100 * coverage:.0f} % of the supervised tokens in an epoch"
        yield warn(text, "raise drafter.num_anchors, or train more epochs")
    if is_chat:
        yield from _check_ends(case, store.split("train"))


def check_mask_token(case: TokenCase) -> Verdict:
    """That no text can hold it. The plan has compared it with the target's special tokens and the store."""
    token, tokenizer = case.plan.recipe.drafter.mask_token_id, case.tokenizer
    if token >= len(tokenizer):
        return ok(f"{token} is a row behind the tokenizer's {len(tokenizer)} tokens: no text holds it")
    name = str(tokenizer.convert_ids_to_tokens(token))
    fix = "`helixctl init` finds a token that no text holds"
    if token in tokenizer.all_special_ids and token in (tokenizer.eos_token_id, tokenizer.pad_token_id):
        return fail(f"{token} is {name!r}, the end or the padding of texts", fix)
    if name in str(tokenizer.chat_template or ""):
        return fail(f"{token} is {name!r}, which the chat template writes", fix)
    added = tokenizer.added_tokens_decoder.get(token)
    if added is None or not added.special:
        return warn(f"{token} is {name!r}, an ordinary token that texts may hold", fix)
    return ok(f"{token} is the special token {name!r}, which the template does not use")


def _check_ends(case: TokenCase, split: Split) -> Iterator[Verdict]:
    """The last token of every answer of the first documents; a document that is cut has an open end."""
    stops = _stop_ids(case)
    closed = answers = 0
    for document in range(min(_LOOKED_AT, split.num_documents)):
        mask, tokens = split.loss_mask(document), split.tokens(document)
        last = np.flatnonzero(mask[:-1] & ~mask[1:]).tolist() + ([len(mask) - 1] if mask[-1] else [])
        answers += len(last)
        closed += sum(int(tokens[i]) in stops for i in last)
    if answers and closed < answers / 2:
        text = f"{closed} of {answers} answers in the store end with a token that stops the target"
        yield warn(text, "check the chat template and eos_token_id: helixctl prepare --show 3")


def _stop_ids(case: TokenCase) -> frozenset[int | None]:
    return frozenset(case.plan.target.eos_token_ids) | {case.tokenizer.eos_token_id}


def _bytes(path: Path) -> int:
    return path.stat().st_size
