"""An etcd of one server on this machine, and coordinators that take turns with it."""

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from evenly.coordination import Coordinator, CoordinatorSeat, RoundSettings, SeatKeeper
from evenly.coordination.etcd import EtcdGateway
from evenly.launch.ports import free_port


class EtcdServer:
    """A process of etcd, which can be killed and started again with what it has on disk."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("etcd")
        if program is None:
            pytest.skip("The test needs etcd; apt install etcd-server.")
        self.port, peers = free_port(), f"http://127.0.0.1:{free_port()}"
        self.url, clients = f"etcd://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.port}"
        options = {
            "data-dir": str(folder / "etcd"),
            "listen-client-urls": clients,
            "advertise-client-urls": clients,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": f"default={peers}",
            "unsafe-no-fsync": "true",
        }
        self._command = [program, *(f"--{name}={value}" for name, value in options.items())]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        gateway, deadline = EtcdGateway([("127.0.0.1", self.port)]), time.monotonic() + 20.0
        while time.monotonic() < deadline:
            with suppress(OSError):
                gateway.call("kv/range", key="AA==")
                return
            time.sleep(0.05)
        raise AssertionError("etcd does not answer")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def etcd_server(folder: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(folder)
    try:
        yield server
    finally:
        server.kill()


class Candidate:
    """A coordinator that serves while it has the seat."""

    def __init__(self, url: str, settings: RoundSettings) -> None:
        self.coordinator = Coordinator(("127.0.0.1", 0), settings=settings)
        self.seat = CoordinatorSeat(url, job="job")

    def take(self) -> bool:
        if not self.seat.take(self.coordinator.address):
            return False
        self.keeper = SeatKeeper(self.seat)
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()
        return True

    def close(self) -> None:
        self.coordinator.stop()
        self.thread.join()
        self.keeper.close()

    def _serve(self) -> None:
        self.coordinator.serve(is_allowed=lambda: self.seat.is_held)
