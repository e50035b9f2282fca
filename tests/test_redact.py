"""Secrets do not survive in saved values, and nothing else is changed."""

from __future__ import annotations

import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixctl.redact import HIDDEN, RedactingFormatter, redact, redact_text

SECRETS = [
    "hf_" + "a1B2" * 8,
    "ghp_" + "x" * 36,
    "sk-proj-" + "k" * 24,
    "AKIA" + "Q" * 16,
    "eyJhbGciOi.eyJzdWIiOiIx.SflKxwRJSM",
]
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["Qwen/Qwen3-8B", "cuda:0", "runs/one", "step", ""]),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["run", "model", "mask_token_id", "dir"]), inner),
)


@pytest.mark.parametrize("secret", SECRETS)
def test_tokens_are_hidden_wherever_they_stand(secret: str) -> None:
    value = {"run": {"dir": f"/tmp/{secret}/run"}, "sources": [("a", f"token={secret}")], secret: 1}
    saved = redact(value)
    assert secret not in repr(saved) and len(saved) == len(value)
    assert redact_text(f"loading with {secret}.") == f"loading with {HIDDEN}."


def test_logins_and_named_secrets_are_hidden() -> None:
    assert redact_text("https://me:pw@host/x") == f"https://{HIDDEN}@host/x"
    assert redact_text("https://host/x?api_key=abcdef123&y=1") == f"https://host/x?api_key={HIDDEN}&y=1"
    assert redact({"hf_token": "abc", "password": "pw", "mask_token_id": 3, "token": ["kept"]}) == {
        "hf_token": HIDDEN,
        "password": HIDDEN,
        "mask_token_id": 3,
        "token": ["kept"],
    }
    headers = {"Authorization": "x", "X-Api-Key": "y", "token": "z", "pad_token": "<pad>"}
    assert redact(headers) == {**dict.fromkeys(headers, HIDDEN), "pad_token": "<pad>"}


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("https://user:p@ss@host/x", "https://(hidden)@host/x"),
        ("postgres://u:p/w@host/db", "postgres://(hidden)@host/db"),
        ("https://host/x?X-Amz-Signature=ab12cd34&y=1", "https://host/x?X-Amz-Signature=(hidden)&y=1"),
        ("https://host/c?sv=2020&sig=ab%2Bcd", "https://host/c?sv=2020&sig=(hidden)"),
        ("environ({'HF_TOKEN': 'abc', 'HOME': '/root'})", "environ({'HF_TOKEN': '(hidden)', 'HOME': '/root'})"),
        ('{"wandb_api_key": "01 23", "n": 1}', '{"wandb_api_key": "(hidden)", "n": 1}'),
        ("MY_PASSWORD='se cret' python x.py", "MY_PASSWORD='(hidden)' python x.py"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic (hidden)"),
        ("x-api-key: abcdefghijk", "x-api-key: (hidden)"),
        ("Set-Cookie: session=abcdef", "Set-Cookie: (hidden)"),
        ("python x.py --token abcd", "python x.py --token (hidden)"),
        ("AIza" + "x" * 35, HIDDEN),
    ],
)
def test_what_else_carries_a_secret(text: str, hidden: str) -> None:
    assert redact_text(text) == hidden
    assert redact_text(hidden) == hidden, "twice is once"


@pytest.mark.parametrize(
    "text",
    [
        "http://host:8080/models/x@main",
        "https://huggingface.co/datasets/owner/name@abc",
        "pad_token = '<|endoftext|>', \"mask_token\": \"<mask>\", 'eos_token': '</s>'",
        "drafter.mask_token_id: 151669, max_new_tokens=128000, tokenizer: gpt2-medium",
        "signature of forward(input_ids, cache)",
    ],
)
def test_what_carries_none_stays(text: str) -> None:
    assert redact_text(text) == text


@given(st.text(min_size=1).filter(lambda text: "'" not in text and HIDDEN not in text and text.isprintable()))
def test_no_quoted_value_of_a_secret_survives(value: str) -> None:
    shown = redact_text(f"{{'a': 1, 'HF_TOKEN': '{value}', 'b': 2}}")
    assert shown == f"{{'a': 1, 'HF_TOKEN': '{HIDDEN}', 'b': 2}}"


@given(PLAIN)
def test_ordinary_values_stay(value: object) -> None:
    assert redact(value) == value


def test_options_of_a_command_line_are_hidden() -> None:
    line = "python train.py --api-key abcdef123 --hf-token=abcdef123 --max-new-tokens 128000 --tokenizer gpt2-medium"
    hidden = f"python train.py --api-key {HIDDEN} --hf-token={HIDDEN} --max-new-tokens 128000 --tokenizer gpt2-medium"
    assert redact_text(line) == hidden


def test_log_records_are_redacted_with_their_tracebacks() -> None:
    try:
        raise ValueError(f"no access with {SECRETS[1]}")
    except ValueError:
        record = logging.LogRecord("x", logging.WARNING, "f", 1, "%s failed", (SECRETS[0],), sys.exc_info())
    text = RedactingFormatter("%(message)s").format(record)
    assert text.startswith(f"{HIDDEN} failed") and f"no access with {HIDDEN}" in text
    assert not any(secret in text for secret in SECRETS)
