"""The verbs for a plain torch loop, in any process group that a script has opened."""

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict, Unpack

import torch
import torch.distributed as dist

from evenly.calibration.joint_steps import calibrate
from evenly.comm import FailureMonitor, RankGroup, rank_group_of
from evenly.errors import SpecError
from evenly.graph import Example, Traced, trace_module
from evenly.launch import find_place, identity, pick_device
from evenly.nodes import Synchronized
from evenly.nodes.composition import compose_synchronized
from evenly.session.joining import open_client
from evenly.shards import Sharded, example_of, join_shards, shard_model
from evenly.spec import Cluster, Device, Every, Exchange, ExchangeWishes, Node, Plan, Profile, period_of
from evenly.survey import measure_cluster, survey_cluster


def discover(
    *, group: dist.ProcessGroup | None = None, device: str | torch.device = "auto", timeout_s: float = 600.0
) -> Cluster:
    """Returns the cluster that the ranks of an open process group form; every rank calls it together.

    Ranks that share hostname, boot, network namespace and the launcher's node are one node, however many they are.

    Args:
        group: the ranks of the cluster; torch's default group if left out.
        device: what this rank computes on; `"auto"` takes its CUDA device if there is one.
        timeout_s: how long to wait for the other ranks.
    """
    return survey_rank_group(rank_group_of(group, timeout_s=timeout_s), device, timeout_s=timeout_s)


def survey_rank_group(
    rank_group: RankGroup, device: str | torch.device, *, timeout_s: float, parent: FailureMonitor | None = None
) -> Cluster:
    """Returns the cluster that the ranks of `rank_group` form."""
    place = find_place()
    chosen = device if isinstance(device, torch.device) else pick_device(place, device)
    return survey_cluster(rank_group.scoped("survey"), identity(place), chosen, timeout_s=timeout_s, parent=parent)


def measure(
    model: torch.nn.Module,
    example: Example,
    *,
    quick: bool = False,
    memory_bytes: int | None = None,
    group: dist.ProcessGroup | None = None,
    tell: Callable[[str], None] | None = None,
    timeout_s: float = 600.0,
) -> Profile:
    """Returns how fast the ranks' devices and links are with this network; all ranks call it together.

    Every rank times a training step with several numbers of samples, and each form of convolution and linear layer
    with several numbers of outputs, inputs and samples, all ranks at the same time. Then ranks make steps together,
    with averaged gradients and, where that may pay, with the network cut over ranks of a node.

    Args:
        model: the network, on the device of this rank; it is not changed.
        example: the batch to train with, as forward takes it.
        quick: about 10 seconds of measuring instead of one to three minutes.
        memory_bytes: what plans may use of this rank's free memory; all of it if left out. It also
            applies to networks cut on trial; measuring whole networks may use more.
        group: the ranks to measure; torch's default group if left out.
        tell: called with what is measured now, to show progress.
        timeout_s: how long to wait for the other ranks.
    """
    rank_group = rank_group_of(group, timeout_s=timeout_s)
    device = next(iter(model.parameters()), torch.empty(0)).device
    cluster = survey_rank_group(rank_group, device, timeout_s=timeout_s)
    return measure_rank_group(
        rank_group,
        trace_module(model, example),
        cluster,
        device,
        quick=quick,
        memory_bytes=memory_bytes,
        tell=tell,
        timeout_s=timeout_s,
    )


class MeasureLimits(TypedDict):
    """What measuring devices and measuring joint steps both take."""

    quick: bool
    timeout_s: float
    tell: Callable[[str], None]
    parent: FailureMonitor | None


def measure_rank_group(
    rank_group: RankGroup,
    traced: Traced,
    cluster: Cluster,
    device: torch.device,
    *,
    quick: bool,
    memory_bytes: int | None = None,
    tell: Callable[[str], None] | None = None,
    timeout_s: float,
    parent: FailureMonitor | None = None,
) -> Profile:
    """Returns the profile of the ranks of `rank_group`: devices, links, joint steps, trials of cut networks."""
    limits: MeasureLimits = {
        "quick": quick,
        "timeout_s": timeout_s,
        "tell": tell or (lambda _: None),
        "parent": parent,
    }
    scoped = rank_group.scoped("measure")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # later random numbers stay the same
        profile = measure_cluster(scoped, traced, cluster, device, memory_bytes=memory_bytes, **limits)
        return calibrate(rank_group.scoped("calibrate"), traced, cluster, profile, device, **limits)


def synchronize(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    every: Every = "epoch",
    nodes: Sequence[Sequence[int]] | None = None,
    group: dist.ProcessGroup | None = None,
    count: Callable[..., float] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    find_unused_parameters: bool = False,
    timeout_s: float = 600.0,
    **exchange: Unpack[ExchangeWishes],
) -> Synchronized:
    """Returns the module to call: gradients averaged inside a node at every step, parameters across nodes every period.

    The loop around it stays as it is: call the returned module, `backward`, `optimizer.step`. After each pass over the
    data call its `end_epoch()`, and after the last step its `finish()`. The loss must be a mean over the batch;
    gradients and exchanges are weighted by the samples of each batch.

    Args:
        model: the network, on the device it trains on, or what `shard` made of it: then gradients are averaged over the
            replicas of a node, and each replica may be cut in its own way. All ranks start with the weights of rank 0.
        optimizer: any torch optimizer over the parameters of `model`.
        every: the period K': a number of steps, `EverySteps(k, warmup=w)`, `"epoch"`, `"5 epochs"`, `"30s"`, `"5m"`,
            `Adaptive(...)`, `"2%"` (of the time may be spent on exchanges), `"adaptive"`, or `"global"`, in which all
            ranks average gradients at every step.
        nodes: the ranks of each node, such as `[[0], [1, 2, 3]]`; discovered if left out.
        group: the ranks that train together; torch's default group if left out.
        count: a function of the arguments of `forward` that returns the samples of a batch; the leading dim of the
            first tensor if left out.
        scaler: the GradScaler of the loop, if it has one: steps that it skips then count on all nodes alike.
        find_unused_parameters: as in torch's DDP, for networks that do not use all parameters in every step.
        timeout_s: how long a rank may wait for the others.
        exchange: how exchanges are made: `overlap` (steps made during an exchange), `fragments` (parts sent one after
            another), `codec` (`"fp32"`, `"bf16"`, `"int8"`, `"int4"`), `outer` (`"nesterov"`, or another optimizer of
            torch), `optimizer_state` (`"keep"`, `"average"` or `"reset"` momenta, for all or by name), `state_every`
            (the state policy applies every N exchanges), `buffers` (`"auto"`, `"average"`, `"max"`, `"min"`,
            `"first"`, `"keep"`, for all or by patterns), `offload` (exchanges are kept and computed in host memory),
            `nonfinite` (a NaN gradient ends the run, `"stop"`, or the step, `"skip"`).

    Example:
        ```python
        model = evenly.synchronize(model, optimizer, every=50, overlap=10, codec="int8")
        ```
    """
    period, settings = period_of(every), Exchange(**exchange, timeout_s=timeout_s)
    rank_group = rank_group_of(group, timeout_s=timeout_s)
    device = next(iter(model.parameters()), torch.empty(0)).device
    cluster = survey_rank_group(rank_group, device, timeout_s=timeout_s)
    return compose_synchronized(
        model,
        optimizer,
        rank_group=rank_group,
        cluster=cluster if nodes is None else regroup(cluster, nodes),
        period=period,
        exchange=settings,
        count=count,
        scaler=scaler,
        find_unused_parameters=find_unused_parameters,
        client=open_client(rank_group),
    )


def regroup(cluster: Cluster, nodes: Sequence[Sequence[int]]) -> Cluster:
    """Returns the same ranks and devices on the nodes that the user names."""
    ranks = sorted(rank for members in nodes for rank in members)
    if ranks != list(range(cluster.world_size)) or not all(nodes):
        raise SpecError(
            f"nodes={[list(members) for members in nodes]} was asked for, but the {cluster.world_size} ranks "
            f"0..{cluster.world_size - 1} must each be in one node, and no node may be empty. Correct the list."
        )
    return Cluster(
        nodes=tuple(
            Node(name=f"node{i}", ranks=tuple(members), devices=tuple(cluster.device_of(rank) for rank in members))
            for i, members in enumerate(nodes)
        )
    )


def shard(
    model: torch.nn.Module,
    example: Example | Plan,
    *,
    shares: Sequence[float] | None = None,
    layer_shares: Mapping[str, Sequence[float]] | None = None,
    cut_batch: bool = False,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 600.0,
) -> Sharded:
    """Returns the module to call: the layers of `model` cut over the ranks of a group, in unequal shares.

    It computes what `model` computes, outputs, gradients and buffers alike, whatever the shares. All ranks call it with
    the same network and give it the same batches. Its parameters are plain local tensors under the names that `model`
    has; make the optimizer over them afterwards. `model` is left as it is.

    Args:
        model: the network, on the device of this rank; devices may differ. All ranks start with the weights of rank 0.
        example: a batch as forward takes it (a tensor, a tuple of arguments, or a dict), or a `Plan` with a layout.
        shares: one number for each rank, of any sum; 0 leaves a rank out. Equal if left out.
        layer_shares: shares of single layers, by module name or the beginning of it; 0 leaves a rank out of that layer.
            They cut the outputs of a layer. One that runs reduced is cut like its inputs: it follows the layer before.
        cut_batch: whether layers may also be cut along the batch, where fewer bytes travel then.
        group: the ranks that hold the network; torch's default group if left out.
        timeout_s: how long a rank may wait for the others.

    Example:
        ```python
        model = evenly.shard(model, example, shares=[70, 25, 5])
        print(model.layout.explain())
        ```
    """
    rank_group = rank_group_of(group, timeout_s=timeout_s)
    device = next(iter(model.parameters()), torch.empty(0)).device
    if isinstance(example, Plan):
        replica = example.replica_of(rank_group.rank)
        if len(example.roles) != rank_group.size or replica is None:
            case = "nothing is cut" if replica is None else f"it is for {len(example.roles)} ranks"
            raise SpecError(
                f"a plan was given to shard a network over {rank_group.size} ranks, but in it {case}. "
                "Make a plan with a layout for these ranks."
            )
        inside = rank_group.among(replica.ranks, f"replica{replica.ranks[0]}")
        sharded = join_shards(
            trace_module(model, example_of(replica.layout)),
            replica.layout,
            rank_group=inside,
            devices=_devices(survey_rank_group(inside, device, timeout_s=timeout_s)),
            timeout_s=timeout_s,
        )
    else:
        sharded = shard_model(
            model,
            example,
            rank_group=rank_group,
            shares=[1.0] * rank_group.size if shares is None else shares,
            layer_shares=layer_shares,
            cut_batch=cut_batch,
            devices=_devices(survey_rank_group(rank_group, device, timeout_s=timeout_s)),
            timeout_s=timeout_s,
        )
    gc.collect()  # traces refer to the whole network in circles, which would keep its weights
    return sharded


def _devices(cluster: Cluster) -> list[Device]:
    return [cluster.device_of(rank) for rank in range(cluster.world_size)]
