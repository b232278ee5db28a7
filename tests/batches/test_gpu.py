"""Pinned batches on their way to a CUDA device: the same samples, picked or streamed, with and without a worker."""

import pytest
import torch

from tests.batches.samples import Numbers, Stream, epoch_of, feeds

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kind", [Numbers, Stream])]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_pinned_and_reach_the_device(kind, workers):
    options = {"kind": kind, "pin_memory": True, "num_workers": workers}
    plain, pinned, there = (
        feeds(11, [3, 1], **more)[0] for more in ({"kind": kind}, options, {**options, "device": torch.device("cuda")})
    )
    assert all(batch.is_pinned() for batch in pinned)
    assert [batch.device.type for batch in there] == ["cuda"] * 3
    there.resume({"epoch": 0, "offset": 0})
    assert epoch_of(there) == epoch_of(plain)


def test_new_shares_with_pinned_batches_loaded_ahead(kind):
    (loader,) = feeds(12, [4], kind=kind, pin_memory=True, num_workers=2, persistent_workers=True)
    seen = []
    for batch in loader:
        seen += batch.tolist()
        loader.reshare([1 + len(seen) % 3])
    assert sorted(seen) == list(range(12))
