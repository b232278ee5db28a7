"""Which of the nodes that are present make a round, with what weight, and who is refused."""

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evenly.coordination.values import ExchangeRound, Proposal, RoundMember

NodeKey = tuple[str, str, int]  # name, start and local size: one start of one node


@dataclass(frozen=True)
class PresentNode:
    """A node all of whose ranks have made a proposal."""

    key: NodeKey
    proposals: tuple[Proposal, ...]  # by local rank

    @property
    def name(self) -> str:
        """The name of the node."""
        return self.key[0]

    @property
    def version(self) -> int:
        """The version that all its ranks have."""
        return min(proposal.version for proposal in self.proposals)

    @property
    def lineage(self) -> str:
        """The run that its parameters belong to."""
        return self.proposals[0].lineage

    @property
    def signature(self) -> str:
        """What all its ranks are about to exchange."""
        return self.proposals[0].signature

    @property
    def is_usable(self) -> bool:
        """Whether its parameters are finite and the same on all its ranks."""
        is_one_state = len({(proposal.version, proposal.lineage) for proposal in self.proposals}) == 1
        return is_one_state and all(proposal.is_healthy for proposal in self.proposals)

    @property
    def gives_state(self) -> bool:
        """Whether it can give its state to other nodes now."""
        return all(proposal.gives_state for proposal in self.proposals)

    @property
    def is_trained(self) -> bool:
        """Whether it has applied a commit."""
        return self.version > 0


@dataclass(frozen=True)
class Commit:
    """The last round that was committed."""

    lineage: str
    version: int
    members: frozenset[NodeKey]
    generation: str
    signature: str

    def is_current(self, node: PresentNode) -> bool:
        """Whether `node` has the parameters of this commit, or newer ones."""
        return node.is_usable and node.lineage == self.lineage and node.version >= self.version


@dataclass(frozen=True)
class Reference:
    """The state that a round goes on from."""

    version: int
    lineage: str  # empty if all are fresh

    def is_state_of(self, node: PresentNode) -> bool:
        """Whether `node` has exactly this state."""
        return node.is_usable and node.version == self.version and (node.lineage == self.lineage or not self.version)


def reference_of(present: Sequence[PresentNode], committed: Commit | None) -> Reference | None:
    """Returns the highest version among usable nodes, of the committed run if any is of it; None if none is usable.

    A run of which nodes are here goes on, also if a node of another run has a higher version: it may have been started
    from an old checkpoint.
    """
    usable = [node for node in present if node.is_usable]
    trained = [node for node in usable if node.is_trained]
    if not usable or (not trained and any(node.is_trained for node in present)):
        return None  # a run whose last parameters are of no use does not begin again by itself
    if not trained:
        return Reference(0, "")
    own = [node for node in trained if committed is not None and node.lineage == committed.lineage]
    candidates = own or trained
    version = max(node.version for node in candidates)
    lineages = Counter(node.lineage for node in candidates if node.version == version)
    return Reference(version, min(lineages, key=lambda lineage: (-lineages[lineage], lineage)))


def must_wait(present: Sequence[PresentNode], reference: Reference) -> frozenset[str]:
    """Returns the names of nodes that need state while those that have it cannot give it."""
    holders = [node for node in present if reference.is_state_of(node)]
    if all(node.gives_state for node in holders):
        return frozenset()
    return frozenset(node.name for node in present if _needs_state(node, reference))


def _needs_state(node: PresentNode, reference: Reference) -> bool:
    is_same_run = node.is_trained and node.lineage == reference.lineage
    return not (reference.is_state_of(node) or (is_same_run and node.is_usable))


def misfits(present: Sequence[PresentNode], reference: Reference, committed: Commit | None) -> Mapping[str, str]:
    """Returns by name why nodes whose signature is not that of most nodes of the reference are refused."""
    holders = [node for node in present if reference.is_state_of(node)]
    counts = Counter(node.signature for node in holders)
    most = max(counts.values())
    winners = [node.signature for node in holders if counts[node.signature] == most]
    signature = committed.signature if committed is not None and committed.signature in winners else winners[0]
    names = ", ".join(node.name for node in holders if node.signature == signature)
    return {
        node.name: (
            f"node {node.name} was to exchange with {names}; its model or settings have the signature "
            f"{node.signature[:16]}, theirs have {signature[:16]}. Start all nodes with the same model, optimizer and "
            "settings."
        )
        for node in present
        if node.signature != signature
    }


def form_round(present: Sequence[PresentNode], reference: Reference, committed: Commit | None) -> ExchangeRound:
    """Returns the round of the nodes that are present.

    Nodes that are at an older version because all nodes of the last commit are gone begin another lineage: should one
    of those return, its parameters are of another run.
    """
    nodes = sorted(present, key=lambda node: node.key)
    members = tuple(_member(node, reference) for node in nodes)
    holders = [index for index, node in enumerate(nodes) if reference.is_state_of(node)]
    last = committed.version if committed is not None and committed.lineage == reference.lineage else 0
    is_branch = not reference.version or reference.version < last
    keys = frozenset(node.key for node in nodes)
    have_groups = all(proposal.has_groups for node in nodes for proposal in node.proposals)
    is_known = committed is not None and committed.members == keys and committed.generation != "" and have_groups
    return ExchangeRound(
        id=secrets.token_hex(16),
        number=max(reference.version, last) + 1,
        lineage=secrets.token_hex(16) if is_branch else reference.lineage,
        generation=committed.generation if is_known and committed is not None else secrets.token_hex(16),
        members=members,
        healer=holders[0] if any(member.needs_state for member in members) else None,
    )


def _member(node: PresentNode, reference: Reference) -> RoundMember:
    needs_state = _needs_state(node, reference)
    return RoundMember(
        *node.key,
        version=node.version,
        samples=0.0 if needs_state else sum(proposal.samples for proposal in node.proposals),
        needs_state=needs_state,
        is_behind=not needs_state and node.version < reference.version,
        ends=all(proposal.ends for proposal in node.proposals),
        facts=tuple(proposal.facts for proposal in node.proposals),
    )
