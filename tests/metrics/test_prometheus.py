"""The Prometheus page: scraped over HTTP during a real run, and parsed by the rules of its text format."""

from __future__ import annotations

import math
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helixctl.errors import UsageError
from helixctl.metrics.sink import SinkGroup, open_sinks
from helixctl.metrics.sinks import prometheus
from helixctl.metrics.sinks.prometheus import ADDRESS_FILE, CONTENT_TYPE, PORT, format_values

SAMPLE = re.compile(r'^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\{run="(?P<run>(?:[^"\\\n]|\\["\\n])*)"\} (?P<value>\S+)$')


@pytest.fixture(autouse=True)
def any_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT, "0")


def scrape(run_dir: Path) -> dict[str, float]:
    url = (run_dir / ADDRESS_FILE).read_text().strip()
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        return parse(answer.read().decode())


def parse(page: str) -> dict[str, float]:
    """Values by name. Every sample is announced by its TYPE, stands once, and the page ends with a line end."""
    assert page.endswith("\n")
    values: dict[str, float] = {}
    announced = None
    for line in page.splitlines():
        if line.startswith("# HELP "):
            assert "\\" not in line
        elif line.startswith("# TYPE "):
            _, _, announced, kind = line.split(" ")
            assert kind == "gauge"
        else:
            found = SAMPLE.match(line)
            assert found and found["name"] == announced and found["name"] not in values, line
            values[found["name"]] = float(found["value"])
    return values


def test_a_scrape_shows_the_newest_values(tmp_path: Path) -> None:
    sinks = open_sinks(["prometheus"], tmp_path, 40)
    assert scrape(tmp_path) == {"helixctl_total_steps": 40}
    sinks.write(10, {"train/loss": 2.5, "train/accept_len": 1.5})
    sinks.write(20, {"train/loss": 2.0, "pipeline/features/send_wait_s": 0.25})
    assert scrape(tmp_path) == {
        "helixctl_total_steps": 40,
        "helixctl_step": 20,
        "helixctl_train_loss": 2.0,
        "helixctl_train_accept_len": 1.5,
        "helixctl_pipeline_features_send_wait_s": 0.25,
    }
    sinks.close()
    assert sinks.failures == {"prometheus": 0} and not (tmp_path / ADDRESS_FILE).exists()
    assert all(thread.name != "text-server" for thread in threading.enumerate())


def test_it_listens_on_this_machine_only_and_knows_one_page(tmp_path: Path) -> None:
    sink = prometheus.open_sink(tmp_path, 1)
    url = (tmp_path / ADDRESS_FILE).read_text().strip()
    assert url.startswith("http://127.0.0.1:")
    with pytest.raises(urllib.error.HTTPError) as missing:
        urllib.request.urlopen(url.replace("/metrics", "/etc/passwd"), timeout=10)
    missing.value.close()
    assert missing.value.code == 404
    sink.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


def test_a_client_that_hangs_up_does_not_end_it(tmp_path: Path) -> None:
    sink = prometheus.open_sink(tmp_path, 1)
    port = int((tmp_path / ADDRESS_FILE).read_text().strip().split(":")[2].split("/")[0])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /met")
    assert scrape(tmp_path) == {"helixctl_total_steps": 1}
    sink.close()


@pytest.mark.parametrize("port", ["taken", "99999", "http"])
def test_a_port_that_cannot_be_had_is_an_error_at_once(tmp_path: Path, port: str, monkeypatch: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv(PORT, str(other.getsockname()[1]) if port == "taken" else port)
        with pytest.raises(UsageError, match="cannot listen on port") as refused:
            open_sinks(["prometheus"], tmp_path, 1)
    assert PORT in str(refused.value)


def test_numbers_that_are_not_finite_and_names_of_any_kind() -> None:
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d/é f": 1e-30, "e": 3}
    page = format_values('a "run"\\\nof mine', values)
    found = parse(page)
    assert math.isnan(found.pop("helixctl_a"))
    assert found == {"helixctl_b": math.inf, "helixctl_c": -math.inf, "helixctl_d___f": 1e-30, "helixctl_e": 3}
    assert r'run="a \"run\"\\\nof mine"' in page


def test_every_known_name_has_its_meaning_in_one_line() -> None:
    from helixctl.metrics.names import MEANINGS

    page = format_values("run", dict.fromkeys(MEANINGS, 1.0))
    assert page.count("# HELP ") == len(MEANINGS) == len(parse(page))


def test_a_run_is_scraped_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from helixctl.training.run import run_training
    from tests.training.worlds import make_world, make_world_plan

    seen: list[dict[str, float]] = []
    original = SinkGroup.write

    def write_and_look(self: SinkGroup, step: int, values: Mapping[str, float]) -> None:
        original(self, step, values)
        seen.append(scrape(tmp_path / "run"))

    monkeypatch.setattr(SinkGroup, "write", write_and_look)
    run_training(make_world_plan(make_world(tmp_path), "metrics.sinks=[prometheus]"))
    assert seen[-1]["helixctl_step"] == seen[-1]["helixctl_total_steps"] == 6
    assert {"helixctl_train_loss", "helixctl_val_accept_len", "helixctl_perf_tokens_per_s"} <= seen[-1].keys()
