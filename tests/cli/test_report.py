"""`evenly report`: pages, traces and CSV files beside the table, and what it says of broken records."""

import json
import subprocess
import sys

from tests.reports.recorded import write_recorded
from tests.reports.runs import started, write


def test_the_table_is_printed_and_all_files_are_written(evenly, tmp_path):
    folder = write_recorded(tmp_path / "run")
    page, trace, csv = tmp_path / "page.html", tmp_path / "trace.json", tmp_path / "ranks.csv"
    plain = evenly("report", folder)
    text = evenly("report", folder, "--html", page, "--trace", trace, "--csv", csv)
    assert text == plain + "".join(f"wrote {file}\n" for file in (page, trace, csv))
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(trace.read_text())["traceEvents"]
    assert csv.read_text().startswith("run,rank,node")


def test_json_stays_json_when_a_page_is_written(evenly, tmp_path):
    folder = write_recorded(tmp_path / "run")
    assert json.loads(evenly("report", folder, "--json", "--html", tmp_path / "page.html"))["name"] == "run"
    assert (tmp_path / "page.html").is_file()


def test_wishes_that_cannot_be_met_are_refused_before_any_work(fails, tmp_path):
    first, second = write_recorded(tmp_path / "a"), write_recorded(tmp_path / "b")
    assert "a trace shows one" in fails("report", first, second, "--trace", tmp_path / "trace.json")
    assert "there is no folder" in fails("report", first, "--html", tmp_path / "nowhere" / "page.html")


def test_a_record_is_never_replaced_by_an_output(fails, tmp_path):
    folder = write_recorded(tmp_path / "run")
    before = {file: file.read_bytes() for file in folder.rglob("*.jsonl")}
    assert "is a part of the run" in fails("report", folder, "--html", folder / "run.jsonl")
    assert "is a part of the run" in fails("report", folder / "run.jsonl", "--csv", folder / "ranks" / "0.jsonl")
    assert "for two outputs" in fails("report", folder, "--html", tmp_path / "x", "--csv", tmp_path / "x")
    assert {file: file.read_bytes() for file in folder.rglob("*.jsonl")} == before


def test_a_closed_output_is_no_error(tmp_path):
    folder = write_recorded(tmp_path / "run")
    command = f"exec {sys.executable} -m evenly report {folder} >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_without_rank_files_has_a_page_but_no_trace(tmp_path):
    folder = write(tmp_path / "run", started())
    command = [sys.executable, "-m", "evenly", "report", folder]
    page = subprocess.run([*command, "--html", tmp_path / "page.html"], capture_output=True, text=True, timeout=60)
    assert (page.returncode, page.stderr) == (0, "")
    trace = subprocess.run([*command, "--trace", tmp_path / "trace.json"], capture_output=True, text=True, timeout=60)
    assert trace.returncode == 1
    assert "its ranks recorded no steps" in trace.stderr


def test_of_a_broken_record_the_rest_is_shown_and_one_sentence_says_so(tmp_path):
    folder = write_recorded(tmp_path / "run")
    file = folder / "run.jsonl"
    file.write_text("junk\n" + file.read_text())
    command = [sys.executable, "-m", "evenly", "report", folder, "--html", tmp_path / "page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    (told,) = done.stderr.splitlines()
    assert told.startswith(f"evenly: {file}: 1 line is not an event and left out, first line 1")
    assert done.returncode == 1
    assert "90.00" in done.stdout
    assert "1 line is not an event" in (tmp_path / "page.html").read_text()


def test_a_page_needs_no_torch(tmp_path):
    folder = write_recorded(tmp_path / "run")
    code = (
        "import sys; from typer.testing import CliRunner; from evenly.cli import app\n"
        f"done = CliRunner().invoke(app, ['report', {str(folder)!r}, '--html', {str(tmp_path / 'page.html')!r}])\n"
        "sys.exit('torch' in sys.modules or done.exit_code)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
