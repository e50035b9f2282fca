"""Metric names: one form, one meaning each."""

from __future__ import annotations

import re

import pytest

from helixctl.metrics import names

FORM = re.compile(r"[a-z]+(/[a-z0-9_-]+)+")


def constants() -> dict[str, str]:
    strings = {key: value for key, value in vars(names).items() if key.isupper() and isinstance(value, str)}
    return {key: value for key, value in strings.items() if value != names.TERM}  # a prefix, not a metric


def test_every_name_has_the_form_and_a_meaning() -> None:
    assert set(constants().values()) == set(names.MEANINGS)
    assert all(FORM.fullmatch(name) for name in names.MEANINGS)
    assert all(meaning for meaning in names.MEANINGS.values())


def test_names_are_distinct() -> None:
    assert len(set(constants().values())) == len(constants())


def test_families_have_the_form() -> None:
    assert names.val_accuracy(3) == "val/acc_3"
    assert names.channel_send_wait_s("features") == "pipeline/features/send_wait_s"
    for family in (names.channel_send_wait_s, names.channel_receive_wait_s, names.channel_occupancy):
        assert FORM.fullmatch(family("target-0"))


@pytest.mark.parametrize(
    "name", [names.VAL_ACCEPT_LEN, names.LIVE_ACCEPT_LEN, names.VAL_ACCURACY, names.val_accuracy(2)]
)
def test_lengths_and_accuracies_are_better_when_larger(name: str) -> None:
    assert names.larger_is_better(name)


@pytest.mark.parametrize("term", ["loss", "perplexity", "ce", "kl", "l1", "confidence", "confidence_error"])
def test_losses_and_their_terms_are_better_when_smaller(term: str) -> None:
    assert not names.larger_is_better(names.val_term(term))


def test_live_decoding_chooses_the_best_where_there_is_any():
    assert names.best_metric("auto", {names.VAL_ACCEPT_LEN: 1.0, names.LIVE_ACCEPT_LEN: 1.0}) == "val/accept_len_live"
    assert names.best_metric("auto", {names.VAL_ACCEPT_LEN: 1.0}) == "val/accept_len"
    assert names.best_metric("val/loss", {names.LIVE_ACCEPT_LEN: 1.0}) == "val/loss"
