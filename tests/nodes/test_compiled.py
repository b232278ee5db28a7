"""Networks compiled before or after synchronize train as the single-process reference."""

import pytest

from tests.processes import run_processes

NODES = [[0, 1], [2]]
FORMS = {"before": True, "method": True, "after": True, "fsdp": False, "shard before": False, "shard after": False}
QUICK = ("before", "after")


@pytest.mark.parametrize(
    "form", [form if form in QUICK else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
)
def test_it_trains_as_one_process(form: str) -> None:
    arguments = {"nodes": NODES, "form": form, "backend": "aot_eager"}
    for difference, operations in run_processes(NODES, "tests.nodes.compiled_programs:train", arguments):
        assert difference < 1e-9
        assert operations == 8 or not FORMS[form]  # the whole network is one compiled part
