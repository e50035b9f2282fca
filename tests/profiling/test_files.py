from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from helixctl.errors import UsageError
from helixctl.profiling.compare import compare, load_report
from helixctl.profiling.files import OwnedStacks, collapsed, flame_tree, make_speedscope, write_files
from helixctl.profiling.report import SCHEMA_VERSION

STACKS: OwnedStacks = {
    "target-0": Counter({("run (a.py:1)", "spin (a.py:5)"): 3, ("run (a.py:1)",): 1}),
    "main": Counter({(): 2}),
}


def test_the_report_has_a_version_and_says_what_was_left_out(profiled):
    report = json.loads((profiled.folder / "report.json").read_text(encoding="utf-8"))
    assert report["schema_version"] == SCHEMA_VERSION == 1
    assert report["window"]["seconds"] == pytest.approx(1.0, abs=0.8)
    assert report["window"]["baseline_s"] == pytest.approx(0.5, abs=0.8)
    assert [stage["name"] for stage in report["stages"][:4]] == ["reader-0", "target-0", "target-0-post", "drafter-0"]
    assert {channel["name"] for channel in report["channels"]} == {"work", "target-0-out", "features"}
    assert report["pipeline"]["tokens_per_s"] > 0
    assert report["cost"]["pyspy_cpu_s"] > 0
    assert 0 <= report["cost"]["share_of_machine"] < 0.5
    assert report["verdict"]["findings"][0]["code"] == report["verdict"]["code"]


def test_series_fit_each_other(profiled):
    series = profiled.report["series"]
    assert all(len(values) == len(series["threads"]["at_s"]) for values in series["threads"]["owners"].values())
    channels = series["channels"]
    assert all(len(values) == len(channels["at_s"]) for values in channels["held"].values())
    assert set(channels["capacity"]) == set(channels["held"])


def test_csv_files_hold_what_the_report_holds(profiled):
    for name, part in (("threads.csv", "threads"), ("stages.csv", "stages"), ("channels.csv", "channels")):
        with (profiled.folder / name).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == len(profiled.report[part])
    assert rows[0]["name"] == profiled.report["channels"][0]["name"]


def test_stacks_are_joined_to_stages(profiled):
    lines = (profiled.folder / "stacks.collapsed").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("target-0;") and "python.<locals>.spin" in line for line in lines)


def test_collapsed_stacks_and_the_tree_of_the_flame_graph_keep_every_sample():
    assert collapsed(STACKS).splitlines()[0] == "target-0;run (a.py:1);spin (a.py:5) 3"
    tree = flame_tree(STACKS)
    assert tree["v"] == 6
    assert [(child["n"], child["v"]) for child in tree["c"]] == [("target-0", 4), ("main", 2)]
    assert tree["c"][0]["c"][0]["c"] == [{"n": "spin (a.py:5)", "v": 3, "c": []}]


def test_a_speedscope_file_has_a_profile_for_each_thread():
    content = make_speedscope(STACKS, 20)
    assert content["$schema"].endswith("file-format-schema.json")
    target = content["profiles"][0]
    assert (target["name"], target["type"], target["endValue"]) == ("target-0", "sampled", pytest.approx(0.2))
    assert len(target["samples"]) == len(target["weights"])
    names = [content["shared"]["frames"][i]["name"] for i in target["samples"][1]]
    assert names == ["run (a.py:1)", "spin (a.py:5)"]


def test_a_folder_that_cannot_be_written_is_wrong_use(profiled, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        write_files(tmp_path / "file" / "out", profiled.report, profiled.seen, profiled.facts)


def test_two_reports_are_compared(profiled, tmp_path):
    before = load_report(profiled.folder)
    after = json.loads(json.dumps(before))
    after["pipeline"]["tokens_per_s"] *= 2
    after["stages"] = [stage for stage in after["stages"] if stage["name"] != "reader-0"]
    (tmp_path / "after.json").write_text(json.dumps(after))
    found = compare(before, load_report(tmp_path / "after.json"))
    changes = {change.what: change for change in found.changes}
    assert changes["tokens_per_s"].factor == pytest.approx(2.0)
    assert changes["reader-0 cores"].after is None and changes["reader-0 cores"].factor is None
    assert changes["target-0 busy"].factor == pytest.approx(1.0)


@pytest.mark.parametrize("content", ["{torn", "[]", '{"schema_version": 99}'])
def test_what_is_no_report_is_wrong_use(content: str, tmp_path: Path):
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(UsageError, match="report"):
        load_report(tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        load_report(tmp_path / "none")
