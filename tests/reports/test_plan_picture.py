"""The picture of a plan: files that open, for few and many ranks, and errors that say what is missing."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from evenly.errors import SpecError
from evenly.reports import Panel, draw_picture, plan_picture, rank_rows, require_picture
from tests.reports.plans import planned

pytest.importorskip("matplotlib", reason="Pictures need matplotlib; pip install 'evenly[plot]'.")


def panel(*sizes: int, title: str = "") -> Panel:
    made, told, cluster = planned(*sizes, speeds=[1.0 + rank % 5 for rank in range(sum(sizes))], batch_size=1000)
    return Panel(title, rank_rows(made, told, cluster), told)


def texts(path: Path) -> str:
    return " ".join(path.read_text().split("<!--")[1:])  # matplotlib notes every text it draws as a comment


def test_a_png_opens(tmp_path):
    draw_picture([panel(1, 1)], tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_an_svg_names_ranks_units_and_what_is_predicted(tmp_path):
    shown = panel(2, 1)
    draw_picture([shown], tmp_path / "plan.svg")
    ET.parse(tmp_path / "plan.svg")
    told = texts(tmp_path / "plan.svg")
    for word in ("rank 0 (host0)", "rank 2 (host1)", "ms of a step", "samples/s", "computes", "waits for others"):
        assert word in told
    assert f"{1e3 * shown.forecast.step_s:.1f} ms a step" in told
    assert "left out" not in told


def test_two_plans_stand_side_by_side(tmp_path):
    draw_picture([panel(2, title="as planned"), panel(3, title="changed")], tmp_path / "two.svg")
    assert "as planned: " in texts(tmp_path / "two.svg")
    assert "changed: " in texts(tmp_path / "two.svg")


def test_of_many_ranks_the_slowest_and_fastest_are_shown(tmp_path):
    shown = panel(30, 30)
    draw_picture([shown], tmp_path / "many.svg")
    told = texts(tmp_path / "many.svg")
    assert told.count(" samples -->") == plan_picture.MOST
    assert "the slowest and the fastest of 60 ranks" in told


def test_a_rank_that_is_left_out_is_in_the_legend(tmp_path):
    made, told, cluster = planned(1, 1, speeds=[100, 0.001])
    draw_picture([Panel("", rank_rows(made, told, cluster), told)], tmp_path / "out.svg")
    assert "rank 1 (host1), left out" in texts(tmp_path / "out.svg")


def test_another_kind_of_file_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"pictures are \.png or \.svg"):
        require_picture(tmp_path / "plan.txt")


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(SpecError, match="No such file or directory"):
        draw_picture([panel(2)], tmp_path / "nowhere" / "plan.png")


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_picture, "find_spec", lambda _: None)
    with pytest.raises(SpecError, match=r"pip install 'evenly\[plot\]'"):
        require_picture(tmp_path / "plan.png")
