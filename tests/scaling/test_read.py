import numpy as np
import pandas as pd
import pytest

from lm.base.errors import UsageError
from lm.scaling import read
from lm.scaling.approaches import isoflop
from tests.scaling import planted

ND = read.Columns("n", "d", None, "loss")


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet", ".csv.gz"])
def test_every_format_gives_the_same_points(tmp_path, ending):
    rows = planted.table()
    path = tmp_path / f"runs{ending}"
    if ".csv" in ending:
        rows.to_csv(path, index=False)
    elif ending == ".tsv":
        rows.to_csv(path, sep="\t", index=False)
    elif ending == ".jsonl":
        rows.to_json(path, orient="records", lines=True, double_precision=15)
    else:
        rows.to_parquet(path)
    found = read.points(read.read_table(path), ND)
    # Fifteen digits survive every text format.
    np.testing.assert_allclose(found.loss, rows["loss"], rtol=1e-14)
    assert all(column.dtype == np.float64 for column in (found.n, found.d, found.c, found.loss))


def test_any_two_of_n_d_c_suffice():
    rows = planted.table().assign(c=lambda t: 6 * t["n"] * t["d"])
    full = read.points(rows, read.Columns("n", "d", "c", "loss"))
    for columns in (ND, read.Columns("n", None, "c", "loss"), read.Columns(None, "d", "c", "loss")):
        found = read.points(rows, columns)
        for name in ("n", "d", "c"):
            np.testing.assert_allclose(getattr(found, name), getattr(full, name), rtol=1e-14)
        assert any(read.CONVENTION in line for line in found.conventions)
    with pytest.raises(UsageError, match="two of"):
        read.points(rows, read.Columns("n", None, None, "loss"))


def test_whole_number_columns_do_not_overflow():
    # 6 * 1e10 * 1e12 is past int64.
    rows = pd.DataFrame({"n": np.full(6, 10**10), "d": np.full(6, 10**12), "loss": np.full(6, 2.0)})
    assert read.points(rows, ND).c[0] == 6e22


@pytest.mark.parametrize(("column", "value", "what"), [
    ("n", -1.0, "not positive"), ("d", 0.0, "not positive"), ("loss", np.nan, "no value"), ("loss", np.inf, "infinite"),
    ("n", np.int64(-5), "not positive"), ("loss", "12,3", "not a number"), ("n", "7B", "not a number"),
])  # fmt: skip
def test_bad_values_are_refused_with_their_rows(column, value, what):
    rows = planted.table()
    rows[column] = rows[column].astype(object)
    rows.loc[[2, 40], column] = value
    with pytest.raises(UsageError, match=f"{what} in rows 3, 41") as refusal:
        read.points(rows, ND)
    assert "np." not in str(refusal.value)


def test_filtered_rows_keep_their_numbers():
    rows = planted.table()
    rows.loc[50, "loss"] = -1
    with pytest.raises(UsageError, match="row 51 "):
        read.points(rows, ND, "n > 2e7")


def test_missing_column_names_the_nearest():
    with pytest.raises(UsageError, match="Did you mean 'loss'"):
        read.points(planted.table(), read.Columns("n", "d", None, "los"))


@pytest.mark.parametrize("query", ["n >", "unknown > 1", "import os", "@np.log(n) > 1", "n > @table", "@pandas"])
def test_a_query_that_fails_is_one_clear_line(query):
    with pytest.raises(UsageError, match="does not evaluate"):
        read.points(planted.table(), ND, query)


@pytest.mark.parametrize("query", ["1", "True", "params + 1", "'n'", "n", "c = 3"])
def test_a_query_that_is_no_choice_of_rows_is_refused(query):
    with pytest.raises(UsageError, match="is not true or false for each row"):
        read.points(planted.table().assign(params=1.0), ND, query)


@pytest.mark.parametrize("query", ["index > 50", "flag", "not flag", "run in ['a']", "n > 0 and run == 'a'"])
def test_every_kind_of_choice_is_understood(query):
    rows = planted.table().assign(flag=np.arange(100) % 2 == 0, run=["a", "b"] * 50)
    assert len(read.points(rows, ND, query)) == 50


def test_a_query_that_leaves_nothing_is_refused():
    with pytest.raises(UsageError, match="no row of 100"):
        read.points(planted.table(), ND, "n < 0")


@pytest.mark.parametrize("name", read.FINGERPRINTS)
def test_mixed_fingerprints_are_refused(name):
    rows = planted.table().assign(**{name: "aa"})
    read.points(rows, ND)
    rows.loc[3, name] = "bb"
    with pytest.raises(UsageError, match="never compared"):
        read.points(rows, ND)
    rows.loc[3, name] = None
    with pytest.raises(UsageError, match=r"empty in row 4: .*never compared"):
        read.points(rows, ND)


@pytest.mark.parametrize(("column", "factor"), [("n", 1e-6), ("d", 1e-9), ("loss", 10)])
def test_units_plainly_off_are_refused(column, factor):
    rows = planted.table()
    rows[column] *= factor
    with pytest.raises(UsageError, match=r"looks like|perplexity"):
        read.points(rows, ND)


def test_inconsistent_flops_are_refused():
    rows = planted.table().assign(c=lambda t: t["n"] * t["d"] / 1e3)
    with pytest.raises(UsageError, match="another unit"):
        read.points(rows, read.Columns("n", "d", "c", "loss"))


def test_rows_whose_flops_are_far_from_6nd_are_named():
    rows = planted.table().assign(c=lambda t: 6 * t["n"] * t["d"])
    rows.loc[7, "n"] = 1e23
    with pytest.raises(UsageError, match=r"in row 8 \(for example 1e-16\).*another unit, or damaged"):
        read.points(rows, read.Columns("n", "d", "c", "loss"))


@pytest.mark.parametrize(("loss", "told"), [(12.1, "over 12 nats/token in row 3"), (0.04, "under 0.05 nats/token in")])
def test_losses_that_are_hardly_nats_are_named(loss, told):
    rows = planted.table()
    rows.loc[2, "loss"] = loss
    assert any(warning.startswith(told) for warning in read.points(rows, ND).warnings)


@pytest.mark.parametrize(("content", "told"), [
    ("n,d,loss,loss\n1e8,1e9,3,4\n", "two columns are called 'loss'"), ("n;d;loss\n1e8;1e9;3\n", "separated by ';'"),
    ("n,d,loss\n", "no rows. Give"), ("", "not a readable csv file: .*Give a header row"),
])  # fmt: skip
def test_a_csv_that_would_be_misread_is_refused(tmp_path, content, told):
    path = tmp_path / "runs.csv"
    path.write_text(content)
    with pytest.raises(UsageError, match=told):
        read.read_table(path)


def test_warnings_name_duplicates_short_runs_and_undecayed_points():
    rows = planted.table().assign(steps=2000, decayed=1)
    rows.loc[4, "steps"] = 900
    rows.loc[5, "decayed"] = 0
    rows.loc[7, ["n", "d", "loss"]] = rows.loc[6, ["n", "d", "loss"]].to_numpy()
    rows["tokens"], rows["tokens_unique"] = 9, [9] * 97 + [3, 4, 5]
    text = "\n".join(read.points(rows, ND).warnings)
    assert "3 rows pass over the training text more than once" in text
    assert "row 8" in text
    assert "under 1,000 optimizer steps: row 5" in text
    assert "not decayed: row 6" in text


@pytest.mark.parametrize(("name", "content"), [
    ("none.csv", None), ("runs.xlsx", b"x"), ("empty.csv", b""), ("head.csv", b"n,d,loss\n"),
    ("broken.parquet", b"PAR1"),
    ("broken.jsonl", b"{"), ("latin.csv", b"n,d\n\xff\xfe,1\n"),
])  # fmt: skip
def test_files_that_cannot_be_read_are_usage_errors(tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=name):
        read.read_table(path)


def test_helping_columns_of_a_stranger_may_hold_anything():
    strange = planted.table().assign(steps="many", decayed="yes", vocab_size=None, d_model="x", budget="1e20 FLOP")
    found = read.points(strange, ND)
    assert found.warnings == read.points(planted.table(), ND).warnings
    assert len(isoflop.group_budgets(found)[1]) == len(isoflop.group_budgets(read.points(planted.table(), ND))[1])


def test_clusters_need_a_whole_column_of_two():
    rows = read.select(planted.table().assign(run=np.arange(100) // 4), None)
    assert read.cluster_codes(rows, "run").max() == 24
    with pytest.raises(UsageError, match="one cluster"):
        read.cluster_codes(rows.assign(run=1), "run")
    with pytest.raises(UsageError, match="no value"):
        read.cluster_codes(rows.assign(run=[None, *range(99)]), "run")
