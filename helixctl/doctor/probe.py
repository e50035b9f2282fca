"""What one check of the machine, a recipe or a run says, and how checks are run one after the other.

Four states: `ok`, `warn` (works, but slower or riskier), `fail` (will break), `skip` (could not be checked, and why).
Only `fail` makes the command fail unless more is asked for. Static findings have a form of their own (`finding.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, Literal, TypeVar

from helixctl.errors import HelixError

State = Literal["ok", "warn", "fail", "skip"]
STATES: tuple[State, ...] = ("ok", "warn", "fail", "skip")
LIVE_IDS = tuple(f"LIVE{number:03}" for number in range(5))
"""What the proofs run on, and the four proofs; here because `live.py` loads torch."""
SCHEMA = 1
"""Version of the JSON form."""

T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """What a probe found: a sentence, and the remedy where something is wrong."""

    state: State
    message: str
    remedy: str | None = None


@dataclass(frozen=True)
class Probe(Generic[T]):
    """One check of a subject `T`. `run` gives one verdict, or several (one per GPU, say), or none."""

    id: str
    name: str
    run: Callable[[T], Verdict | Iterable[Verdict]]


@dataclass(frozen=True)
class Outcome:
    """A verdict, whose it is, and the time it took."""

    id: str
    name: str
    state: State
    message: str
    remedy: str | None
    seconds: float


def ok(message: str) -> Verdict:
    """All is well."""
    return Verdict("ok", message)


def warn(message: str, remedy: str) -> Verdict:
    """Works, but slower or riskier than it need be."""
    return Verdict("warn", message, remedy)


def fail(message: str, remedy: str | None) -> Verdict:
    """Will break."""
    return Verdict("fail", message, remedy)


def skip(reason: str, remedy: str | None = None) -> Verdict:
    """Could not be checked."""
    return Verdict("skip", reason, remedy)


def run_probes(probes: Sequence[Probe[T]], subject: T) -> Iterator[Outcome]:
    """Outcomes as they come. A probe that breaks is a `skip` that says so: it must not hide the others' results."""
    for probe in probes:
        started_at = perf_counter()
        try:
            found = probe.run(subject)
            verdicts = [found] if isinstance(found, Verdict) else list(found)
        except HelixError as error:
            verdicts = [fail(error.message, error.fix)]
        except Exception as error:
            text = f"this check itself broke: {type(error).__name__}: {error}"
            verdicts = [skip(text, "please report it, with the output of `helixctl doctor --report`")]
        elapsed_s = perf_counter() - started_at
        for verdict in verdicts:
            yield Outcome(probe.id, probe.name, verdict.state, verdict.message, verdict.remedy, elapsed_s)
            elapsed_s = 0.0


def require(outcomes: Iterable[Outcome], ids: Collection[str]) -> Iterator[Outcome]:
    """The same outcomes, with a skipped check of `ids` turned into a failed one."""
    for outcome in outcomes:
        if outcome.state == "skip" and outcome.id in ids:
            text = f"required, but could not be checked: {outcome.message}"
            outcome = Outcome(outcome.id, outcome.name, "fail", text, outcome.remedy, outcome.seconds)
        yield outcome


def count_states(outcomes: Iterable[Outcome]) -> dict[State, int]:
    """Outcomes by state, all four named."""
    counts = Counter(outcome.state for outcome in outcomes)
    return {state: counts[state] for state in STATES}


def outcomes_to_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The form for other programs: `ok` is false where a check failed."""
    counts = count_states(outcomes)
    checks = [
        {
            "id": outcome.id,
            "name": outcome.name,
            "state": outcome.state,
            "message": outcome.message,
            "remedy": outcome.remedy,
            "seconds": round(outcome.seconds, 3),
        }
        for outcome in outcomes
    ]
    return {"schema": SCHEMA, "ok": not counts["fail"], "counts": counts, "checks": checks}
