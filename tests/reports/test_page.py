"""The page of runs: it is whole, needs no network, and says what the table says, whatever the files hold."""

import json
import random
import re
import time
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from evenly.errors import SpecError
from evenly.planner import plan, simulate_run
from evenly.reports import cells, phase_rows, prediction_rows, read_recorded, row_of, write_run
from evenly.reports.missing_ranks import missing_ranks
from evenly.reports.page import render, write_page
from evenly.reports.page.downsample import kept_points
from evenly.reports.page.groups import groups_of
from evenly.reports.time_axis import time_axis
from evenly.spec import StepTimes
from tests.reports.plans import cluster_of, graph_of, profile_of
from tests.reports.recorded import of_parts, part, recorded, simulated, write_big, write_recorded
from tests.reports.runs import failed, measured, started, steps, write

VOID = {"meta", "input", "br", "link", "img", "rect", "path"}
LOADING = ("src", "srcset", "href", "data", "poster", "action", "background", "xlink:href")


class Checker(HTMLParser):
    """Finds elements that are not closed, what would be loaded, and the texts of elements."""

    def __init__(self, page):
        super().__init__()
        self.opened, self.loads, self.texts, self.ids = [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.loads += [(tag, name, value) for name, value in attributes if name in LOADING]
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID:
            self.opened.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.opened.pop() == tag

    def handle_data(self, text):
        if self.opened and self.opened[-1] not in ("script", "style") and text.strip():
            self.texts.append(text.strip())


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


@pytest.fixture
def run(tmp_path):
    return recorded(tmp_path / "run")


def test_the_page_is_whole_and_loads_nothing(run):
    page = render([run])
    checker = Checker(page)
    assert page.startswith("<!DOCTYPE html>")
    assert checker.opened == []
    assert checker.loads == []
    assert len(checker.ids) == len(set(checker.ids))
    assert "default-src 'none'" in page
    without_names = page.replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?://|@import|url\(|import\(|fetch\(|XMLHttpRequest", without_names) == []


def test_figures_are_those_of_the_tables(run):
    texts = Checker(render([run])).texts
    row = cells(row_of(run.run, name=run.name))
    for shown in (f"{row[4]} s", row[5], f"{row[6]} MB", row[7], f"{row[8]} %"):
        assert shown in texts
    for table in (phase_rows(run.run), prediction_rows(run.run)):
        assert table
        for cell in [cell for cells_of_row in table for cell in cells_of_row]:
            assert cell in texts


def test_charts_have_all_that_was_recorded(run):
    charts = data_of(render([run]))["runs"][0]
    logged = {line["name"]: line for line in charts["logged"]}
    assert set(logged) == {"loss", "accuracy"}
    assert logged["accuracy"]["v"] == pytest.approx([0.6, 0.7, 0.8, 0.9])
    assert logged["accuracy"]["step"] == [50, 100, 150, 200]
    assert {line["name"] for line in charts["sent"]["exchanges"]} == {"node 0", "node 1"}
    assert charts["period"][0]["v"] == [12]
    assert [line["v"][-1] for line in charts["batches"]] == [50, 40, 10]
    assert [lane["rank"] for lane in charts["timeline"]["lanes"]] == [0, 1, 2]
    assert sum(charts["timeline"]["lanes"][0]["steps"]) == 200
    seconds = row_of(run.run).seconds
    mean_rate = np.mean(charts["throughput"][0]["v"])
    assert mean_rate == pytest.approx(200 * 100 / seconds, rel=0.05)


def test_the_reason_of_a_rank_that_is_left_out_is_shown(tmp_path):
    begun = started().model_copy(update={"ranks": (0, 1, 2, 3), "left_out": {4: "one sample would take it <5> ms"}})
    texts = Checker(render([read_recorded(write(tmp_path / "run", begun))])).texts
    assert "rank 4 of the launch" in texts
    assert "one sample would take it <5> ms" in texts


def test_names_cannot_break_out_of_the_page(tmp_path):
    name = "</script><script>alert(1)</script>"
    folder = write(tmp_path / "run", started(name=name), measured(**{name: 1.0}), failed(name))
    page = render([read_recorded(folder)])
    assert "<script>alert" not in page
    assert Checker(page).opened == []
    assert data_of(page)["runs"][0]["logged"][0]["name"] == name


def test_runs_that_differ_in_their_seed_are_one_group(tmp_path):
    runs = [recorded(tmp_path / f"often-seed{seed}", seed=seed) for seed in range(3)]
    runs += [recorded(tmp_path / "seldom", every=50), read_recorded(write(tmp_path / "cut", started(), steps(4)))]
    assert [(group.name, group.runs) for group in groups_of(runs)] == [
        ("often", (0, 1, 2)),
        ("seldom", (3,)),
        ("cut", (4,)),
    ]
    page = render(runs)
    accuracies = [100 * run.run.latest_values()["accuracy"] for run in runs[:3]]
    assert f"{np.mean(accuracies):.2f} ± {np.std(accuracies, ddof=1):.2f}" in Checker(page).texts
    compared = {chart["name"]: chart["series"] for chart in data_of(page)["compared"]}
    mean = compared["accuracy"][0]["mean"]["step"]
    assert mean["v"][-1] == pytest.approx(np.mean(accuracies) / 100, rel=1e-4)
    assert mean["high"][-1] - mean["v"][-1] == pytest.approx(np.std(accuracies, ddof=1) / 100, rel=1e-2)
    assert compared["accuracy"][1]["mean"]["step"] is None


def test_lines_keep_their_extremes():
    values = np.sin(np.arange(50_000) / 700)
    values[[12_345, 34_567]] = [9.0, -9.0]
    values[40_000] = np.nan
    kept = kept_points(values, most=400)
    assert len(kept) <= 400
    assert {0, 12_345, 34_567, 49_999} <= set(kept.tolist())


@pytest.mark.slow
def test_a_page_of_100000_steps_on_8_ranks_is_small(tmp_path):
    write_big(tmp_path / "big")
    began = time.monotonic()
    write_page([read_recorded(tmp_path / "big")], tmp_path / "big.html")
    assert time.monotonic() - began < 60
    assert (tmp_path / "big.html").stat().st_size < 5e6


def test_what_can_be_read_of_broken_files_is_shown_with_a_sentence(tmp_path):
    folder = write_recorded(tmp_path / "run")
    file, rank = folder / "run.jsonl", folder / "ranks" / "1.jsonl"
    first, *rest = file.read_text().splitlines()
    file.write_text("\n".join([first, "{broken}", *rest]))
    rank.write_text(rank.read_text() + "[1,2,3]\nfoo\n[1]")
    run = read_recorded(folder)
    texts = Checker(render([run])).texts
    assert [problem for problem in run.problems if problem in texts] == list(run.problems)
    assert len(run.problems) == 2
    assert len(data_of(render([run]))["runs"][0]["timeline"]["lanes"]) == 3


def test_without_run_jsonl_the_ranks_are_shown(tmp_path):
    folder = write_recorded(tmp_path / "run")
    (folder / "run.jsonl").unlink()
    run = read_recorded(folder)
    assert "cannot read a run from" in run.problems[0]
    assert data_of(render([run]))["runs"][0]["timeline"]


def test_where_nothing_can_be_read_the_error_says_why(tmp_path):
    (tmp_path / "run.jsonl").write_bytes(b"\x00\x01\x02")
    with pytest.raises(SpecError, match="is not the record of a run"):
        read_recorded(tmp_path)


@pytest.mark.parametrize("events", [(), (started(),), (measured(loss=None),), (started(), steps(3), failed())])
def test_runs_of_few_events_have_a_page(events):
    made = simulated(steps=3)
    assert Checker(render([of_parts(events=events)])).opened == []
    assert Checker(render([of_parts(*made.parts, events=events)])).opened == []


def test_no_file_however_odd_ends_in_another_error(tmp_path):
    """Lines are dropped, doubled, cut and their numbers changed."""
    chance = random.Random(5)
    folder = write_recorded(tmp_path / "run", steps=40)
    files = {file: file.read_text() for file in (folder / "run.jsonl", *(folder / "ranks").iterdir())}
    for _ in range(40):
        for file, text in files.items():
            lines = text.splitlines()
            for _ in range(chance.randrange(4)):
                place = chance.randrange(len(lines))
                lines[place] = chance.choice(
                    [lines[place][:-3], "", "[]", "null", "0", lines[0], *_changed(lines[place], chance)]
                )
            file.write_text("\n".join(lines))
        try:
            page = render([read_recorded(folder)])
        except SpecError:
            continue
        assert Checker(page).opened == []
        data_of(page)


def _changed(line, chance):
    for match in list(re.finditer(r"-?\d+(\.\d+)?", line))[:40]:
        if chance.random() < 0.2:
            number = chance.choice(["-1", "0", "1e300", "-1e300", "1e-300", "99999999", "1e12", '"x"'])
            yield line[: match.start()] + number + line[match.end() :]


def without_ranks(folder, *ranks):
    for rank in ranks:
        (folder / "ranks" / f"{rank}.jsonl").unlink()
    return read_recorded(folder)


def mean_rate(run):
    return np.mean(data_of(render([run]))["runs"][0]["throughput"][0]["v"])


@pytest.mark.parametrize("every", [10, "global"])
def test_ranks_whose_files_are_on_other_hosts_are_named_and_the_throughput_counts_them(tmp_path, every):
    folder = write_recorded(tmp_path / "run", every=every)
    whole = read_recorded(folder)
    assert whole.problems == ()
    expected = row_of(whole.run).samples_per_s
    hosts = [node.name for node in whole.run.events[0].cluster.nodes]
    run = without_ranks(folder, 0)
    (problem,) = run.problems
    assert problem.startswith("rank 0 has no record in ")
    assert f"from host {hosts[0]}" in problem
    assert problem in Checker(render([run])).texts
    assert mean_rate(run) == pytest.approx(expected, rel=0.1)
    (problem,) = without_ranks(folder, 1).problems
    assert problem.startswith("ranks 0, 1 have no record in ")


def test_a_run_of_which_no_rank_has_a_record_here_is_shown_as_one_without(tmp_path):
    folder = write_recorded(tmp_path / "run")
    run = without_ranks(folder, 0, 1, 2)
    assert run.problems == ()
    assert mean_rate(run) == pytest.approx(row_of(run.run).samples_per_s, rel=0.1)


def test_a_rank_that_is_left_out_is_not_missed(tmp_path):
    cluster, graph = cluster_of(2, 1), graph_of()
    profile = profile_of(cluster, [60.0, 30.0, 0.001], graph)
    made = plan(cluster, profile, graph, every=1, cut=False)
    assert made.roles[2].left_out
    simulation = simulate_run(made, cluster, profile, graph, name="run", steps=200)
    run, parts = simulation.run, simulation.parts
    write_run(tmp_path / "run", run, parts)
    assert read_recorded(tmp_path / "run").problems == ()
    begun = run.events[0].model_copy(update={"plan": made, "cluster": cluster})  # a record of all ranks
    assert missing(of_parts(*parts, events=(begun, *run.events[1:]))) == {}
    assert missing(of_parts(parts[0], events=(begun, *run.events[1:]))) == {0: [1]}


def missing(run):
    return missing_ranks(run.run, run.logs.parts, time_axis(run.run, run.logs.parts))


def test_ranks_of_one_start_are_not_missed_in_another():
    """The run began on four ranks and resumed on two."""
    four = started().model_copy(update={"at_s": 0.0})
    two = four.cluster.among([0, 1])
    events = (four, steps(5).model_copy(update={"at_s": 10.0}))
    resumed = started(resumed=5).model_copy(update={"at_s": 500.0, "cluster": two, "plan": None})
    events += (resumed, steps(9).model_copy(update={"at_s": 510.0}))

    def begun(at_s, *ranks):
        row = StepTimes(5, 5, 8.0, 8.0, 1.0, 0.0, 0.0, 0.0, 40.0, 0)
        return [part(rank, 0, row, at_s=at_s) for rank in ranks]

    assert missing(of_parts(*begun(0.0, 0, 1, 2, 3), *begun(500.0, 0, 1), events=events)) == {}
    assert missing(of_parts(*begun(0.0, 0, 1, 2), *begun(500.0, 0), events=events)) == {0: [3], 1: [1]}
    assert missing(of_parts(*begun(500.0, 0, 1), events=events)) == {0: [0, 1, 2, 3]}


def test_ranks_are_not_missed_in_the_first_second_of_a_run():
    row = StepTimes(5, 5, 0.5, 0.5, 0.1, 0.0, 0.0, 0.0, 40.0, 0)
    assert missing(of_parts(part(0, 0, row, at_s=100.0), events=(started(), steps(5)))) == {}


def replaced(run, **events):
    """Returns the run with other first and last events."""
    kept = run.run.events[1:-1]
    first, last = (run.run.events[place].model_copy(update=events.get(name, {})) for name, place in PLACES.items())
    return of_parts(*run.logs.parts, events=(first, *kept, last))


PLACES = {"first": 0, "last": -1}


def test_a_run_whose_ranks_spent_no_time_has_a_page(run):
    nothing = dict.fromkeys(("compute_s", "gradients_s", "exchange_s", "waiting_s", "other_s"), 0.0)
    phases = tuple(rank.model_copy(update=nothing) for rank in run.run.events[-1].phases)
    texts = Checker(render([replaced(run, last={"phases": phases})])).texts
    assert "computing" not in texts[: texts.index("exchanges")]
    some = (run.run.events[-1].phases[0], *phases[1:])
    Checker(render([replaced(run, last={"phases": some})]))


def test_a_plan_that_predicts_no_time_has_no_ratio(run):
    planned = run.run.events[0].plan
    prediction = planned.predicted.model_copy(update={"step_s": 0.0})
    odd = replaced(run, first={"plan": planned.model_copy(update={"predicted": prediction})})
    assert prediction_rows(odd.run)[0][-1] == "-"
    assert Checker(render([odd])).opened == []


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_any_numbers_are_drawn_without_warnings(run, seed):
    chance = random.Random(seed)
    numbers = (0, 1, -1, 1e29, -1e29, 1e-29, 3.5, 1e18)

    def odd(row):
        fields = chance.sample(StepTimes._fields, k=chance.randrange(4))
        return row._replace(**{name: chance.choice(numbers) for name in fields})

    for rows in (20, 3000):
        parts = [
            replace(part, steps=tuple(odd(part.steps[n % len(part.steps)]) for n in range(rows)))
            for part in run.logs.parts
        ]
        broken = of_parts(*parts, events=run.run.events)
        assert len(data_of(render([broken]))["runs"][0]["timeline"]["lanes"]) == 3
        extreme = [
            replace(part, steps=tuple(row._replace(step=1e29, steps=-1e29, ended_s=-1e29) for row in part.steps))
            for part in parts
        ]
        assert data_of(render([of_parts(*extreme, events=run.run.events)]))
