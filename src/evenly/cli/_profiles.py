"""Measured profiles in the user's cache folder."""

import hashlib
from pathlib import Path

from evenly.errors import SpecError
from evenly.spec import Cluster, Graph, Profile


class ProfileCache:
    """The cache file of one profile; its key is cluster, memory limits, network, batch, versions and thoroughness."""

    def __init__(self, cluster: Cluster, graph: Graph, *, limits: list[int] | None, quick: bool) -> None:
        import torch

        from evenly.survey.measure import versions

        self._cluster, self._graph = cluster, graph
        threads, thoroughness = f"{torch.get_num_threads()} threads", "quick" if quick else "thorough"
        key_parts = [cluster.to_json(), graph.fingerprint, versions(), threads, thoroughness, *map(str, limits or ())]
        name = hashlib.sha256("\n".join(key_parts).encode()).hexdigest()[:24]
        self.path = Path.home() / ".cache" / "evenly" / "profiles" / f"{name}.json"

    def find(self) -> Profile | None:
        """Returns the cached profile; None if there is none or it cannot be read."""
        if not self.path.is_file():
            return None
        try:
            profile = Profile.load(self.path)
            profile.require_fit(self._cluster, self._graph)
        except SpecError:
            return None
        return profile

    def keep(self, profile: Profile) -> bool:
        """Writes a profile to the cache; returns whether that was possible."""
        part = self.path.with_suffix(".part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(profile.to_json() + "\n", encoding="utf-8")
            part.replace(self.path)
        except OSError:
            return False
        return True
