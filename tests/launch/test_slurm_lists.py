"""SLURM's short forms say the same as the long ones."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenly.errors import LaunchError
from evenly.launch.launchers.slurm_lists import expand_counts, expand_hosts

counts = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 9)), min_size=1, max_size=6)
names = st.text("abcxyz-", min_size=1, max_size=5)
ranges = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=3)
items = st.tuples(names, ranges | st.none(), st.sampled_from(["", "-ib", "x"]))


@given(counts)
def test_counts_expand_to_one_number_per_node(pairs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in pairs)
    assert expand_counts(text) == tuple(count for count, times in pairs for _ in range(times))


@given(st.lists(items, min_size=1, max_size=4))
def test_hosts_expand_in_order_with_their_zeros(
    hosts: list[tuple[str, list[tuple[int, int, int]] | None, str]],
) -> None:
    texts, expected = [], []
    for head, spans, tail in hosts:
        if spans is None:
            texts.append(head + tail)
            expected.append(head + tail)
            continue
        parts = [f"{a:0{w}}" if not more else f"{a:0{w}}-{a + more:0{w}}" for a, more, w in spans]
        texts.append(f"{head}[{','.join(parts)}]{tail}")
        expected += [f"{head}{n:0{w}}{tail}" for a, more, w in spans for n in range(a, a + more + 1)]
    assert expand_hosts(",".join(texts)) == tuple(expected)


@given(st.text("0123456789(x),[]-n ", max_size=12))
def test_any_text_gives_a_list_or_an_error_of_ours(text: str) -> None:
    for expand in (expand_counts, expand_hosts):
        with contextlib.suppress(LaunchError):
            assert expand(text)


def test_forms_seen_in_the_field() -> None:
    assert expand_counts("2,1") == (2, 1)
    assert expand_counts("8(x3),2") == (8, 8, 8, 2)
    assert expand_hosts("n[1-2,006]") == ("n1", "n2", "n006")
    assert expand_hosts("a,b[01-03]-x") == ("a", "b01-x", "b02-x", "b03-x")
    assert expand_hosts("r[1-2]n[08-09]") == ("r1n08", "r1n09", "r2n08", "r2n09")


@pytest.mark.parametrize("text", ["", "n[", "n]1[", "n[]", "n[1-]", "n[2-1]", "a,,b"])
def test_broken_host_lists_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="SLURM list"):
        expand_hosts(text)
