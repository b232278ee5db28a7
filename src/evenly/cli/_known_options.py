"""The options that say what is known: cluster, profile and network. Loads nothing but typer."""

from pathlib import Path
from typing import Annotated

import typer

from evenly.cli._completion import networks

ModelWord = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        autocompletion=networks,
        help="Instead of --graph: a network's name, such as cifar or resnet18, or module:callable.",
    ),
]
Inputs = Annotated[
    list[str] | None, typer.Option("--input", metavar="NxCxHxW", help="Sizes of MODEL's batch; repeat for several.")
]
Dtype = Annotated[str | None, typer.Option(help="Numbers of MODEL's input; float32 unless it takes tokens.")]
ClusterFile = Annotated[Path | None, typer.Option("--cluster", help="The cluster, from discover or measure.")]
ProfileFile = Annotated[Path | None, typer.Option("--profile", help="The profile, from measure.")]
GraphFile = Annotated[Path | None, typer.Option("--graph", help="The network, from measure --graph-out.")]
Speeds = Annotated[
    str | None, typer.Option(metavar="A,B,...", help="Instead of --profile: how fast the ranks are, in any unit.")
]
Nodes = Annotated[
    str | None, typer.Option(metavar="N,N,...", help="Instead of --cluster, with --speeds: ranks on each node.")
]
Flops = Annotated[str | None, typer.Option(help="With --speeds: operations a second of the fastest rank [1T].")]
Inside = Annotated[str | None, typer.Option(help="With --speeds: links inside a node [10GB/s].")]
Across = Annotated[str | None, typer.Option(help="With --speeds: links between nodes [1Gbit].")]
