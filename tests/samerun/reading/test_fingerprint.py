from samerun.reading.fingerprint import GROUP, fingerprint


def test_it_knows_where_a_text_ends():
    prints = [fingerprint(parts) for parts in (["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""], [])]
    assert len(set(prints)) == 5
    assert fingerprint(["ä"]) == fingerprint(["ä".encode()])
    assert fingerprint(["\ud800"])  # what JSON may hold


def test_more_texts_than_are_hashed_together():
    many = [str(number) for number in range(GROUP + 2)]
    assert (
        len({fingerprint(parts) for parts in (many, many[:-1], many[:-2], [*many[:-2], many[-1], many[-2]])})
        == 4
    )
    assert fingerprint(iter(many)) == fingerprint(many)
