"""Devices of one make that cannot be told apart by what was measured are taken to be equally fast."""

from collections.abc import Sequence
from statistics import mean

from evenly.spec import Cluster, Curve, Device, DeviceProfile, LayerCurves

LEAST_NOISE, MOST_NOISE = 0.1, 0.15  # closer devices are taken to be equal, those further apart to be unequal


def pooled(devices: Sequence[DeviceProfile], cluster: Cluster, batch: int) -> list[DeviceProfile]:
    """Returns the devices; those of one node and make whose steps differ less than they vary share their mean.

    Without that, chance would deal equal devices unequal batches. A few readings may agree by chance, so devices must
    be further apart than a machine varies from one moment to the next.
    """
    found = {device.rank: device for device in devices}
    for node in cluster.nodes:
        for ranks in _alike([found[rank] for rank in node.ranks], cluster, batch):
            group = [found[rank] for rank in ranks]
            step, layers = _mean([device.step for device in group]), _mean_layers([device.layers for device in group])
            common = {"step": step, "layers": layers}
            found |= {device.rank: device.model_copy(update=common) for device in group}
    return [found[rank] for rank in sorted(found)]


def _alike(devices: Sequence[DeviceProfile], cluster: Cluster, batch: int) -> list[list[int]]:
    """Returns groups of ranks whose devices cannot be told apart, of two or more."""
    groups: list[list[DeviceProfile]] = []
    for device in sorted(devices, key=lambda device: (device.step.at(batch), device.rank)):
        for group in groups:
            spreads = [MOST_NOISE if one.spread is None else one.spread for one in (device, *group)]
            noise = min(MOST_NOISE, max(LEAST_NOISE, *spreads))
            is_close = device.step.at(batch) <= (1 + noise) * group[0].step.at(batch)
            if is_close and _make(cluster.device_of(device.rank)) == _make(cluster.device_of(group[0].rank)):
                group.append(device)
                break
        else:
            groups.append([device])
    return [[device.rank for device in group] for group in groups if len(group) > 1]


def _make(device: Device) -> tuple[object, ...]:
    return device.kind, device.name, device.memory_bytes, device.cores


def _mean(curves: Sequence[Curve]) -> Curve:
    """Returns the mean at the sizes that any curve has, as far as all reach."""
    reach = min(curve.sizes[-1] for curve in curves)
    sizes = sorted({size for curve in curves for size in curve.sizes if size <= reach})
    return Curve(sizes=tuple(sizes), seconds=tuple(mean(curve.at(size) for curve in curves) for size in sizes))


def _mean_layers(layers: Sequence[dict[str, LayerCurves]]) -> dict[str, LayerCurves]:
    """Returns the mean of the layers, of those that know each."""
    forms = {form: [own[form] for own in layers if form in own] for own in layers for form in own}
    return {
        form: LayerCurves(
            outputs=_mean([own.outputs for own in known]),
            inputs=_mean([own.inputs for own in known]),
            samples=_mean([own.samples for own in known]),
        )
        for form, known in forms.items()
    }
