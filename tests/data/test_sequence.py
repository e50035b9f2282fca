"""The arithmetic of the sequence against a loop that writes it out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixctl.data.sequence import Entry, Sequence, Share


def written_out(sequence: Sequence) -> tuple[list[Entry], list[int], dict[int, int], dict[int, int]]:
    """Entries, step of every entry, first number of every step, number after every step: the slow way."""
    entries: list[Entry] = []
    steps: list[int] = []
    first: dict[int, int] = {}
    after: dict[int, int] = {}
    every, passes = sequence.validate_every_steps, sequence.validation_batches
    for step in range(sequence.total_steps):
        first[step] = len(entries)
        for i in range(sequence.batches_per_step):
            entries.append(Entry("train", step * sequence.batches_per_step + i))
        after[step] = len(entries)
        last = step + 1 == sequence.total_steps
        if every and ((step + 1) % every == 0 or last):
            entries.extend(Entry("validation", i) for i in range(passes))
        steps.extend([step] * (len(entries) - first[step]))
    return entries, steps, first, after


@given(st.integers(1, 5), st.integers(0, 12), st.integers(0, 14), st.integers(0, 4))
def test_equals_the_written_out_sequence(batches: int, steps: int, every: int, passes: int) -> None:
    sequence = Sequence(batches, steps, every, passes)
    entries, steps_of, first, after = written_out(sequence)
    assert sequence.total == len(entries)
    assert [sequence.entry(i) for i in range(len(entries))] == entries
    assert [sequence.step_of(i) for i in range(len(entries))] == steps_of
    assert {s: sequence.first_seq(s) for s in range(steps)} == first
    assert {s: sequence.seq_after_step(s) for s in range(steps)} == after
    for step in range(steps):
        follows = after[step] < len(entries) and entries[after[step]].role == "validation"
        assert sequence.validates_after(step) == follows
    num_passes = sum(sequence.validates_after(s) for s in range(steps))
    assert sequence.total_passes == num_passes


@pytest.mark.parametrize("seq", [-1, 8])
def test_a_number_outside_of_the_run_is_an_index_error(seq: int) -> None:
    with pytest.raises(IndexError, match="outside of a run of 8"):
        Sequence(2, 4).entry(seq)


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="no sequence has 0"):
        Sequence(0, 4)
    with pytest.raises(ValueError, match="negative"):
        Sequence(1, 4, -1, 1)


@given(drafters=st.integers(1, 4), processes=st.integers(1, 5), turns=st.integers(1, 6))
def test_shares_of_all_processes_are_every_number_once_and_in_order(drafters: int, processes: int, turns: int) -> None:
    shares = [Share(drafters, processes, rank) for rank in range(processes)]
    own = [[share.seq_at(place) for place in range(turns * drafters)] for share in shares]
    assert sorted(seq for numbers in own for seq in numbers) == list(range(turns * drafters * processes))
    for share, numbers in zip(shares, own, strict=True):
        assert numbers == sorted(numbers)
        assert [share.place_of(seq) for seq in numbers] == list(range(len(numbers)))
        assert [share.lane(place % drafters) for place in range(len(numbers))] == [n % share.stride for n in numbers]
        assert share.place_of(turns * share.stride) == turns * drafters


def test_one_process_counts_as_the_sequence_does() -> None:
    assert [Share(3).seq_at(i) for i in range(7)] == list(range(7))
