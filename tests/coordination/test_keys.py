"""Keys that ranks share: of the last generations, and of each no more than fit."""

import pytest

from evenly.coordination.keys import KEPT_GENERATIONS, MOST_GENERATION_BYTES, KeysGoneError, KeyTable


def test_values_and_numbers() -> None:
    table = KeyTable()
    table.begin("one")
    table.put("one", "a", b"1")
    table.put("one", "a", b"22")
    assert table.get("one", "a") == b"22"
    assert table.get("one", "b") is None
    assert [table.add("one", "count", 2), table.add("one", "count", -3)] == [2, -1]
    table.put("one", "a", b"text")
    with pytest.raises(KeysGoneError, match="not a number"):
        table.add("one", "a", 1)


def test_an_ended_generation_says_why() -> None:
    table = KeyTable()
    table.begin("one")
    table.end("one", "a cable was cut")
    for generation, reason in (("one", "a cable was cut"), ("unknown", "does not know")):
        with pytest.raises(KeysGoneError, match=reason):
            table.get(generation, "a")


def test_old_generations_are_forgotten() -> None:
    table = KeyTable()
    forgotten = [name for number in range(KEPT_GENERATIONS + 1) for name in table.begin(f"{number}")]
    assert forgotten == ["0"]
    with pytest.raises(KeysGoneError, match="later rounds"):
        table.get("0", "a")


def test_a_generation_that_lasts_keeps_what_was_set_last() -> None:
    table, value = KeyTable(), bytes(2**20)
    table.begin("one")
    num_fit = MOST_GENERATION_BYTES // (2**20 + 8)
    for number in range(num_fit + 2):
        table.put("one", "again", b"x")
        table.put("one", f"key {number:04}", value)
    assert table.get("one", "key 0000") is None
    assert table.get("one", "again") == b"x"
    assert table.get("one", f"key {num_fit + 1:04}") == value
