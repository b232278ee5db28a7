"""Treats devices of one model whose measurements hardly differ as equally fast."""

from collections.abc import Sequence
from statistics import mean

from evenly.spec import Cluster, Curve, Device, DeviceProfile, LayerCurves

LEAST_NOISE, MOST_NOISE = 0.1, 0.15  # relative difference below which devices are equal, above which unequal


def pooled(devices: Sequence[DeviceProfile], cluster: Cluster, batch: int) -> list[DeviceProfile]:
    """Returns the devices; those of one node and model whose steps differ less than the noise get their mean.

    Otherwise noise would give equal devices unequal batches. A few readings may agree by chance, so the noise is at
    least `LEAST_NOISE`.
    """
    devices_by_rank = {device.rank: device for device in devices}
    for node in cluster.nodes:
        for ranks in _alike([devices_by_rank[rank] for rank in node.ranks], cluster, batch):
            group = [devices_by_rank[rank] for rank in ranks]
            step, layers = _mean([device.step for device in group]), _mean_layers([device.layers for device in group])
            common = {"step": step, "layers": layers}
            devices_by_rank |= {device.rank: device.model_copy(update=common) for device in group}
    return [devices_by_rank[rank] for rank in sorted(devices_by_rank)]


def _alike(devices: Sequence[DeviceProfile], cluster: Cluster, batch: int) -> list[list[int]]:
    """Returns groups of two or more ranks whose devices are equal up to noise."""
    groups: list[list[DeviceProfile]] = []
    for device in sorted(devices, key=lambda device: (device.step.at(batch), device.rank)):
        for group in groups:
            spreads = [MOST_NOISE if member.spread is None else member.spread for member in (device, *group)]
            noise = min(MOST_NOISE, max(LEAST_NOISE, *spreads))
            is_close = device.step.at(batch) <= (1 + noise) * group[0].step.at(batch)
            if is_close and _model_of(cluster.device_of(device.rank)) == _model_of(cluster.device_of(group[0].rank)):
                group.append(device)
                break
        else:
            groups.append([device])
    return [[device.rank for device in group] for group in groups if len(group) > 1]


def _model_of(device: Device) -> tuple[object, ...]:
    return device.kind, device.name, device.memory_bytes, device.cores


def _mean(curves: Sequence[Curve]) -> Curve:
    """Returns the mean at the sizes of all curves, up to the largest size that all have."""
    reach = min(curve.sizes[-1] for curve in curves)
    sizes = sorted({size for curve in curves for size in curve.sizes if size <= reach})
    return Curve(sizes=tuple(sizes), seconds=tuple(mean(curve.at(size) for curve in curves) for size in sizes))


def _mean_layers(layers: Sequence[dict[str, LayerCurves]]) -> dict[str, LayerCurves]:
    """Returns the mean curves of each layer, over the devices that measured it."""
    forms = {
        form: [device_layers[form] for device_layers in layers if form in device_layers]
        for device_layers in layers
        for form in device_layers
    }
    return {
        form: LayerCurves(
            outputs=_mean([device_layers.outputs for device_layers in curves]),
            inputs=_mean([device_layers.inputs for device_layers in curves]),
            samples=_mean([device_layers.samples for device_layers in curves]),
        )
        for form, curves in forms.items()
    }
