"""torchrun, whose store listens only at the master address: `python -m evenly.launch.agent ...`.

The agent of the first node serves the store of its workers. Without this it would listen at all addresses.
"""

from torch.distributed import run
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

from evenly.launch.serving import bound_store


def main() -> None:
    """Runs torchrun with the arguments of this process."""
    # No argument or setting of torchrun reaches the store, so the name it is made by is replaced (torch 2.11 to 2.13,
    # in this process only).
    static_tcp_rendezvous.TCPStore = bound_store(static_tcp_rendezvous.TCPStore)  # type: ignore[attr-defined,assignment]
    run.main()


if __name__ == "__main__":
    main()
