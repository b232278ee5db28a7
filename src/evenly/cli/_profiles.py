"""Profiles that were measured before, kept in the user's cache folder."""

import hashlib
from pathlib import Path

from evenly.errors import SpecError
from evenly.spec import Cluster, Graph, Profile


class ProfileCache:
    """The place of one profile: of these machines and limits, this network and batch, this torch, this care."""

    def __init__(self, cluster: Cluster, graph: Graph, *, limits: list[int] | None, quick: bool) -> None:
        import torch

        from evenly.survey.measure import versions

        self._cluster, self._graph = cluster, graph
        threads, care = f"{torch.get_num_threads()} threads", "quick" if quick else "thorough"
        marks = [cluster.to_json(), graph.fingerprint, versions(), threads, care, *map(str, limits or ())]
        name = hashlib.sha256("\n".join(marks).encode()).hexdigest()[:24]
        self.path = Path.home() / ".cache" / "evenly" / "profiles" / f"{name}.json"

    def find(self) -> Profile | None:
        """Returns the profile that was kept; None where there is none that can be read."""
        if not self.path.is_file():
            return None
        try:
            found = Profile.load(self.path)
            found.require_fit(self._cluster, self._graph)
        except SpecError:
            return None
        return found

    def keep(self, profile: Profile) -> bool:
        """Keeps a profile for the next time; returns whether the folder allows that."""
        part = self.path.with_suffix(".part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(profile.to_json() + "\n", encoding="utf-8")
            part.replace(self.path)
        except OSError:
            return False
        return True
