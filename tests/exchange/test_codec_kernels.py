"""The kernels of the codecs on a GPU give the bytes of the plain forms; without them these are used."""

import logging

import pytest
import torch

from evenly.exchange import codecs

SIZES = (1, 2, 63, 64, 65, 255, 256, 257, 5000, 1_000_003)
FORMS = {
    "int8": (codecs.plain_to_int8, codecs.plain_from_int8, codecs.INT8_BLOCK),
    "int4": (codecs.plain_to_int4, codecs.plain_from_int4, codecs.INT4_BLOCK),
}


def vectors(size: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=g, dtype=torch.float64)
    wide = values * torch.exp(20 * torch.randn(size, generator=g, dtype=torch.float64))
    halves = torch.round(values * 8) / 2  # many quotients that end in a half
    return {"values": values, "wide": wide, "zeros": values * 0, "halves": halves, "float32": values.float()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
def test_bytes_are_those_of_the_plain_form(name: str) -> None:
    encode, decode, block = FORMS[name]
    kernels = codecs.gpu_kernels(torch.zeros(1, device="cuda"))
    assert kernels is not None
    for size in SIZES:
        for kind, values in vectors(size).items():
            there = values.cuda()
            code = getattr(kernels, f"encode_{name}")(there, block)
            assert torch.equal(code, encode(there)), (size, kind)
            assert torch.equal(code.cpu(), encode(values)), (size, kind)
            decoded = getattr(kernels, f"decode_{name}")(code, size, block)
            assert torch.equal(decoded, decode(code, size)), (size, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
def test_what_is_not_finite_stays_so(name: str) -> None:
    encode, decode, _ = FORMS[name]
    values = torch.randn(1000, device="cuda")
    values[5], values[900] = float("nan"), float("inf")
    codec = codecs.CODECS[name]
    got, want = codec.decode(codec.encode(values), 1000), decode(encode(values), 1000)
    assert torch.equal(got.isfinite(), want.isfinite())
    assert torch.equal(got[got.isfinite()], want[want.isfinite()])
    assert not got[[5, 900]].isfinite().any()


def test_without_a_compiler_the_plain_forms_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.setattr(codecs, "import_module", fail)
    codecs._kernels_on.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [codecs._kernels_on(torch.device("cpu")) for _ in range(3)] == [None] * 3
    codecs._kernels_on.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "codecs run without kernels of their own on cpu, and take longer there: Failed to find C compiler."
    ]
