"""A network that does not fit on its largest device is trained over several, with the same result."""

from pathlib import Path

import torch

from tests.processes import run_processes

ALLOWANCE = 280 << 20  # Adam's first step by a rank alone takes 330 MB and more, of three ranks the first 250
TRAIN = "tests.shards.memory_programs:train"


def test_three_ranks_train_what_fits_on_none_of_them(tmp_path: Path) -> None:
    alone, limited, over_three = (str(tmp_path / name) for name in ("alone", "limited", "three"))
    (error,) = run_processes([[0]], TRAIN, {"allowance": ALLOWANCE, "shares": None, "file": limited})
    assert "memory" in error, error
    assert run_processes([[0]], TRAIN, {"allowance": None, "shares": None, "file": alone}) == [""]
    arguments = {"allowance": ALLOWANCE, "shares": [50, 30, 20], "file": over_three}
    assert run_processes([[0, 1, 2]], TRAIN, arguments) == ["", "", ""]
    torch.testing.assert_close(torch.load(over_three), torch.load(alone), rtol=1e-10, atol=1e-12)
