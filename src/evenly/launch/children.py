"""The environment of a child process that we start ourselves."""

from collections.abc import Mapping


def torchrun_environment(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    local_size: int,
    node: int | str,
    master_addr: str,
    master_port: int,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Returns the variables, and only these, that make a child look started by torchrun on node `node`.

    No agent hosts the store for such a child: its rank 0 does, at `master_addr` and `master_port`.
    """
    variables: dict[str, object] = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": node,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": master_port,
        "TORCHELASTIC_RUN_ID": "evenly",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    return {**{name: str(value) for name, value in variables.items()}, **(extra or {})}
