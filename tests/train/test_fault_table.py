"""What the page of the fault experiment says is what was measured, and what was measured is what is claimed."""

import json

from experiments.faults import overhead, run

PAGE = run.RESULTS.with_name("README.md").read_text()


def test_the_page_holds_the_measured_table_with_a_hundred_kills_and_nothing_lost():
    assert "\n".join(run.table(run.RESULTS)) in PAGE
    faults = json.loads(run.RESULTS.read_text())["faults"]
    assert sum(count["tried"] for name, count in faults.items() if name.startswith("kill -9")) >= 100
    for count in faults.values():
        assert count["tried"] > 0
        assert count["runs_compared"] > 0
        assert count["rows_lost"] == count["rows_added"] == count["bits_changed"] == count["files_left"] == 0


def test_rows_and_checkpoints_add_less_than_two_per_cent_to_a_step():
    found = json.loads(overhead.RESULTS.read_text())["wall"]
    assert f"{found['added_percent']:.2f} %" in PAGE
    assert found["added_percent"] < 2
