"""Rows: the command's contract, ratios in the direction of the unit, nothing missing in silence."""

import json

import pytest
import rich.console

from lm.bench.rows import Row, Unit, show, write

CONTRACT = ("case", "dtype", "unit", "ours", "peers", "ratio_to_best_peer", "limit", "share_of_limit")


def row(unit=Unit.TOKENS_PER_SECOND, ours=(90.0, 100.0, 130.0), **fields) -> Row:
    peers = {"slow": [40.0, 50.0, 60.0], "fast": [70.0, 80.0, 90.0]}
    return Row("case[1]", "float32", unit, ours, **{"peers": peers, "limit": 200.0, "limit_is": "a limit", **fields})


def shown(*rows: Row) -> str:
    console = rich.console.Console(width=140, record=True, quiet=True)
    console.quiet, console.file = False, open("/dev/null", "w")  # noqa: SIM115  # closed with the process
    show(rows, console)
    return console.export_text()


def test_a_rate_is_better_when_it_is_higher():
    assert row().ratio_to_best_peer == pytest.approx(100 / 80)
    assert row().share_of_limit == pytest.approx(0.5)


def test_seconds_are_better_when_they_are_fewer():
    timed = row(Unit.SECONDS, limit=25.0)
    assert timed.ratio_to_best_peer == pytest.approx(50 / 100)  # the peer of 50 s is now the best one
    assert timed.share_of_limit == pytest.approx(0.25)


@pytest.mark.parametrize("unit", Unit)
def test_above_one_means_that_ours_is_faster(unit):
    much_better, much_worse = ((1.0,), (1e6,)) if unit is Unit.SECONDS else ((1e6,), (1.0,))
    assert row(unit, much_better).ratio_to_best_peer > 1 > row(unit, much_worse).ratio_to_best_peer


def test_a_ratio_in_each_round_cancels_what_slowed_the_whole_round():
    disturbed = row(ours=[100.0, 10.0, 50.0], peers={"peer": [50.0, 5.0, 25.0]})
    assert disturbed.paired(disturbed.peers["peer"]) == pytest.approx([2.0, 2.0, 2.0])


def test_without_a_peer_there_is_no_ratio_and_the_reason_is_there():
    alone = row(peers={}, missing={"fast": "no interpreter"})
    assert alone.to_json()["ratio_to_best_peer"] is None
    assert alone.to_json()["missing"] == {"fast": "no interpreter"}


def test_the_file_keeps_the_contract(tmp_path):
    write(tmp_path / "rows.json", "train", [row(missing={"third": "why"})], {"cores": 2}, {"fast": {"torch": "1"}})
    value = json.loads((tmp_path / "rows.json").read_text())
    (found,) = value["rows"]
    assert set(CONTRACT) <= set(found)
    assert found["peers"] == {"slow": 50.0, "fast": 80.0}
    assert found["noise"]["ours"]["min"] <= found["ours"] <= found["noise"]["ours"]["max"]
    assert found["ratio_to_best_peer"] == pytest.approx(found["ours"] / max(found["peers"].values()))
    assert found["share_of_limit"] == pytest.approx(found["ours"] / found["limit"])
    assert value["machine"] == {"cores": 2}


def test_the_table_names_everybody_the_limit_and_the_missing_with_the_reason():
    text = shown(row(missing={"third": "its library [torch] is not there"}, note="a note"))
    for part in ("case[1]", "ours", "slow", "fast", "1.25x", "a limit", "50% of limit", "a note",
                 "third", "MISSING", "its library [torch] is not there"):  # fmt: skip
        assert part in text
