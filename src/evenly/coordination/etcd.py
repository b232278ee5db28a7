"""Where the coordinator is when any node may have it: etcd says who, and lets one at a time.

The holder of a key, which lives as long as a lease, is the coordinator; when it fails, the lease ends and another
candidate takes the key. Nothing else is kept in etcd. Its JSON gateway (`/v3`, etcd 3.4 and later) is used over plain
HTTP; the client library that is maintained, etcd3gw, calls the same gateway.
"""

import base64
import http.client
import json
import re
import threading
import time
from collections.abc import Sequence

from evenly.coordination.values import JSON, Fields, MalformedError, objects_of, text_of
from evenly.errors import SpecError

SCHEME = "etcd://"
LEASE_S = 3  # etcd allows 2 s and more
HELD_PART = 0.75  # of a lease, counted from when its renewal was sent: after it the holder stops by itself
RENEW_S = 0.5
CAMPAIGN_S = 0.25
_CALL_S = 0.6  # for one server; then the next one is asked

Address = tuple[str, int]


class EtcdGateway:
    """Asks the servers of an etcd in turn, first the one that answered last. `OSError` is raised if none answers."""

    def __init__(self, servers: Sequence[Address]) -> None:
        self._servers = list(servers)

    def call(self, path: str, **body: JSON) -> dict[str, JSON]:
        """Returns the answer to a request."""
        problem: Exception = OSError("there is no server")
        for server in list(self._servers):
            try:
                answer = _post(server, path, body)
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = error
                continue
            if server != self._servers[0]:
                self._servers = [server, *(other for other in self._servers if other != server)]
            return answer
        raise OSError(f"no server of etcd answers: {problem}")


class CoordinatorSeat:
    """The key whose holder is the coordinator of a job."""

    def __init__(self, url: str, *, job: str) -> None:
        self._gateway = EtcdGateway(parse_servers(url))
        self._key = _base64(f"evenly/{job}/coordinator")
        self._lease = ""
        self._held_until_s = 0.0

    @property
    def is_held(self) -> bool:
        """Whether this process is the coordinator; False some time before another one can be."""
        return time.monotonic() < self._held_until_s

    def find(self) -> Address:
        """Returns where the coordinator listens; raises `OSError` if there is none or etcd does not answer."""
        found = self._read()
        if found is None:
            raise OSError("etcd knows no coordinator of this job at the moment")
        try:
            host, _, port = base64.b64decode(text_of(found, "value")).decode().rpartition(" ")
            return host, int(port)
        except (MalformedError, ValueError) as error:
            raise OSError(f"etcd has no address of a coordinator: {error}") from None

    def take(self, address: Address) -> bool:
        """Becomes the coordinator, at `address`, if there is none; returns whether it is."""
        if self._read() is not None:
            return False
        sent_s = time.monotonic()
        lease = str(self._gateway.call("lease/grant", TTL=str(LEASE_S)).get("ID", ""))
        put: dict[str, JSON] = {"key": self._key, "value": _base64(f"{address[0]} {address[1]}"), "lease": lease}
        is_free: dict[str, JSON] = {"key": self._key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        answer = self._gateway.call("kv/txn", compare=[is_free], success=[{"request_put": put}])
        if answer.get("succeeded") is not True:
            self._gateway.call("lease/revoke", ID=lease)
            return False
        self._lease, self._held_until_s = lease, sent_s + HELD_PART * LEASE_S
        return True

    def renew(self) -> None:
        """Stays the coordinator for some more time, if etcd agrees."""
        sent_s = time.monotonic()
        answer = self._gateway.call("lease/keepalive", ID=self._lease)
        result = answer.get("result")
        if not isinstance(result, dict) or int(str(result.get("TTL", "0"))) <= 0:
            self._held_until_s = 0.0
        else:
            self._held_until_s = sent_s + HELD_PART * LEASE_S

    def give_up(self) -> None:
        """Lets another candidate be the coordinator at once."""
        self._held_until_s = 0.0
        if self._lease:
            self._gateway.call("lease/revoke", ID=self._lease)

    def _read(self) -> dict[str, JSON] | None:
        try:
            found = objects_of({"kvs": [], **self._gateway.call("kv/range", key=self._key)}, "kvs")
        except MalformedError as error:
            raise OSError(f"etcd gave a strange answer: {error}") from None
        return found[0] if found else None


class SeatKeeper:
    """Renews a seat in a thread until it is closed or lost."""

    def __init__(self, seat: CoordinatorSeat) -> None:
        self._seat = seat
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evenly-coordinator-seat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and gives up the seat."""
        self._is_over.set()
        self._thread.join()
        try:
            self._seat.give_up()
        except OSError:
            return  # its lease ends by itself

    def _run(self) -> None:
        while not self._is_over.wait(RENEW_S) and self._seat.is_held:
            try:
                self._seat.renew()
            except (OSError, ValueError):
                continue  # as long as the lease lasts


def parse_servers(url: str) -> tuple[Address, ...]:
    """Returns the servers in a text such as `etcd://10.0.0.1:2379,10.0.0.2:2379`.

    >>> parse_servers("etcd://box1:2379,box2:2379")
    (('box1', 2379), ('box2', 2379))
    """
    words = url.removeprefix(SCHEME).rstrip("/").split(",")
    found = [re.fullmatch(r"\[?([^\s\[\]/@,]{1,253}?)\]?:([0-9]{1,5})", word) for word in words]
    servers = tuple((match[1], int(match[2])) for match in found if match is not None)
    if not url.startswith(SCHEME) or len(servers) != len(words) or not all(0 < port < 65536 for _, port in servers):
        raise SpecError(
            f"the servers of etcd were given as {url[:200]!r}; that are not hosts and ports with commas between them. "
            f"Write {SCHEME}10.0.0.1:2379,10.0.0.2:2379."
        )
    return servers


def _post(server: Address, path: str, body: Fields) -> dict[str, JSON]:
    connection = http.client.HTTPConnection(*server, timeout=_CALL_S)
    try:
        connection.request("POST", f"/v3/{path}", json.dumps(body))
        answer = json.loads(connection.getresponse().read(2**20))
    finally:
        connection.close()
    if not isinstance(answer, dict) or "error" in answer:
        raise ValueError(f"etcd refuses {path}: {answer}")
    return answer


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
