"""What a process of an elastic run finds in its environment, and the file with the secret."""

from pathlib import Path

import pytest

from evenly.errors import LaunchError, SpecError
from evenly.launch.addresses import answers, is_loopback_name, own_addresses, parse_address
from evenly.launch.secret import read_secret
from evenly.launch.settings import ElasticSettings, elastic_settings, shared_secret

SETTINGS = ElasticSettings(coordinator=("::1", 29400), node="a", start="f00d", job="run", secret_file=Path("secret"))


def secret_file(folder: Path, text: str = "0123456789abcdef\n", mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_what_is_set_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert elastic_settings() is None
    for name, value in SETTINGS.variables().items():
        monkeypatch.setenv(name, value)
    assert elastic_settings() == SETTINGS


def test_workers_that_torchrun_starts_again_are_another_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SETTINGS.variables(), "TORCHELASTIC_RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(name, value)
    settings = elastic_settings()
    assert settings is not None
    assert settings.start == "f00d-2"


def test_an_etcd_is_passed_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ElasticSettings(coordinator="etcd://a:1,b:2", node="a", start="f00d", job="run")
    for name, value in settings.variables().items():
        monkeypatch.setenv(name, value)
    assert elastic_settings() == settings


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENLY_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("EVENLY_NODE", "a")
    with pytest.raises(LaunchError, match="EVENLY_START and EVENLY_JOB are not"):
        elastic_settings()


def test_the_secret_comes_from_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_secret(None) is None
    monkeypatch.setenv("EVENLY_SECRET", " of the variable, long ")
    assert shared_secret(None) == b"of the variable, long"
    path = secret_file(tmp_path)
    assert shared_secret(path) == b"0123456789abcdef"
    monkeypatch.setenv("EVENLY_SECRET_FILE", str(path))
    assert shared_secret(None) == b"0123456789abcdef"
    monkeypatch.delenv("EVENLY_SECRET_FILE")
    monkeypatch.setenv("EVENLY_SECRET", "short")
    with pytest.raises(SpecError, match="5 bytes"):
        shared_secret(None)


def test_a_secret_that_others_may_know_is_refused(tmp_path: Path) -> None:
    for mode in (0o640, 0o604, 0o620):
        with pytest.raises(SpecError, match="chmod 600"):
            read_secret(secret_file(tmp_path, mode=mode))
    with pytest.raises(SpecError, match="are needed"):
        read_secret(secret_file(tmp_path, "short"))
    with pytest.raises(SpecError, match="No such file"):
        read_secret(tmp_path / "nothing")
    with pytest.raises(SpecError, match="not a file"):
        read_secret(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":29400", "host:port", "host:65536", "a b:1", "host:-1", "h:1.0"]
)
def test_odd_addresses_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--bind"):
        parse_address(text, source="--bind")


def test_addresses_of_this_machine() -> None:
    assert own_addresses("127.0.0.1") == ["127.0.0.1"]
    assert own_addresses("192.0.2.1") == []  # of no machine
    assert own_addresses("no-such-host.invalid") == []
    assert is_loopback_name("localhost")
    assert is_loopback_name("127.9.9.9")
    assert not is_loopback_name("10.0.0.1")
    assert not answers(("127.0.0.1", 1))
