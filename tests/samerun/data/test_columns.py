import tables
from hypothesis import given
from hypothesis import strategies as st

from samerun.data.tables import drop_blank, ids_of, is_blank, note_repeated_texts, split_off


def table(*texts, **columns):
    return tables.table({"text": texts, **columns}, lines=range(2, 2 * len(texts) + 2, 2))


@given(st.integers(2, 200), st.floats(0.001, 0.999), st.integers(0, 3))
def test_a_split_is_a_share_of_the_rows_in_file_order(rows, share, seed):
    train, validation = map(list, split_off(table(*map(str, range(rows))), share, seed))
    assert sorted([*train, *validation]) == list(range(rows))
    assert (train, validation) == (sorted(train), sorted(validation))
    assert len(train) >= 1
    assert len(validation) == min(max(1, round(rows * share)), rows - 1)
    assert split_off(table(*map(str, range(rows))), share, seed)[1].tolist() == validation


def test_a_split_depends_on_the_seed():
    many = table(*map(str, range(50)))
    assert split_off(many, 0.2, 0)[1].tolist() != split_off(many, 0.2, 1)[1].tolist()


def test_the_rows_that_show_nothing():
    # Every character that python takes for white space, and every kind that shows something.
    nothing = [
        "",
        *(c for c in map(chr, range(0x110000)) if c.isspace()),
        "\ufeff \u2060",
        " \u200d \u200b ",
        "\x00",
    ]
    shown = ["x", "\u3164", "\u2800", "0", "\n.", "\u0301", "好", "\U0001f600", " \u200dx", "\ue000"]
    assert list(map(is_blank, [*nothing, *shown])) == [True] * len(nothing) + [False] * len(shown)


def test_rows_without_a_text_are_left_out_and_named():
    notes = []
    kept = drop_blank(table("a", " ", "b", "\u200b"), "text", notes)
    assert (list(kept.columns["text"]), list(kept.lines)) == (["a", "b"], [2, 6])
    assert notes == ["train.csv: 2 row(s) without a text left out (line 4, 8)"]


def test_nothing_is_said_when_every_row_has_a_text():
    notes, whole = [], table("a", "b")
    assert drop_blank(whole, "text", notes) is whole
    assert notes == []


def test_what_names_a_row():
    assert list(ids_of(table("a", "b", id=["x", "y"]), "id")) == ["x", "y"]
    assert list(ids_of(table("a", "b"), "id")) == [0, 1]


def test_repeated_texts_are_counted():
    def column(*texts):
        return texts

    notes = []
    note_repeated_texts(
        {"train": column("a", "b", "a", "a"), "validation": column("b", "b", "c"), "test": column("d")}, notes
    )
    assert notes == [
        "2 training row(s) repeat the text of an earlier row",
        "2 of 3 validation texts are in the training rows too",
    ]
    note_repeated_texts({"train": column("a", "b"), "test": column("c", "d", "")}, notes)
    assert len(notes) == 2
