"""What joining and reshaping operations can do with tensors that are cut: the record follows its dim where it can."""

from collections.abc import Iterator

from evenly.planner.cuts import matched
from evenly.planner.scene import Option, Scene, others
from evenly.planner.wishes import kept_dims
from evenly.spec.layout import COPIED, PARTIAL, Record


def join(scene: Scene) -> Iterator[Option]:
    """Operands are brought to one layout."""
    out = scene.layer.outputs[0]
    seen: set[Record] = set()
    for index, tensor in enumerate(scene.inputs):
        for record in scene.cut_dims(index) + scene.spread(index):
            dim = record.dim + len(out.shape) - len(tensor.shape)
            made = Record("sharded", dim, record.cut)
            if dim >= 0 and out.shape[dim] == tensor.shape[record.dim] and made not in seen:
                seen.add(made)
                yield Option("local", _aligned(scene, made), (made,))
    same = all(tensor.shape == out.shape for tensor in scene.inputs)
    if scene.layer.options["linear"] and same and all(scene.has("partial", i) for i in range(len(scene.inputs))):
        yield Option("summand", (PARTIAL,) * len(scene.inputs), (PARTIAL,))


def _aligned(scene: Scene, made: Record) -> tuple[Record, ...]:
    """Returns what each operand must be: cut alike where it has the dim, copied where it is broadcast along it."""
    ndim = len(scene.layer.outputs[0].shape)
    size = scene.layer.outputs[0].shape[made.dim]
    needs = []
    for tensor in scene.inputs:
        own = made.dim - ndim + len(tensor.shape)
        has = own >= 0 and tensor.shape[own] == size
        needs.append(Record("sharded", own, made.cut) if has else COPIED)
    return tuple(needs)


def concat(scene: Scene) -> Iterator[Option]:
    """Shards concatenate: their ranges join."""
    dim, count = scene.layer.options["dim"], len(scene.inputs)
    here = [next(iter([r for r in scene.cut_dims(i) if r.dim == dim]), None) for i in range(count)]
    if any(record is not None for record in here):
        needs = [record or scene.own_cut(scene.inputs[i], dim) for i, record in enumerate(here)]
        joined = scene.cuts.joined([record.cut for record in needs])
        if joined is not None:
            yield Option("local", tuple(needs), (Record("sharded", dim, joined),))
    for record in sorted({r for i in range(count) for r in scene.cut_dims(i) if r.dim != dim}):
        yield Option("local", (record,) * count, (record,))
    if all(scene.has("partial", i) for i in range(count)):
        yield Option("summand", (PARTIAL,) * count, (PARTIAL,))


def view(scene: Scene) -> Iterator[Option]:
    """The cut follows its dim into the new shape where it can."""
    x, out = scene.inputs[0], scene.layer.outputs[0]
    groups = matched(x.shape, out.shape) or []
    for record in scene.cut_dims(0):
        if record.dim > 0 and any(0 in group and record.dim in group for group, _ in groups):
            continue  # joined with the batch, whose size may change
        found = scene.cuts.viewed(x.shape, out.shape, record.dim, record.cut)
        if found is not None:
            yield Option("local", others(scene, [record], COPIED), (Record("sharded", *found),))
    if scene.has("partial"):
        yield Option("summand", others(scene, [PARTIAL], COPIED), (PARTIAL,))


def permute(scene: Scene) -> Iterator[Option]:
    """The cut moves with its dim."""
    for record in scene.cut_dims(0):
        after = scene.layer.options["dims"].index(record.dim)
        yield Option("local", (record,), (Record("sharded", after, record.cut),))
    if scene.has("partial"):
        yield Option("summand", (PARTIAL,), (PARTIAL,))


def split(scene: Scene) -> Iterator[Option]:
    """Every part takes its piece of the cut."""
    dim, sizes = scene.layer.options["dim"], scene.layer.options["sizes"]
    for record in scene.cut_dims(0):
        if record.dim != dim:
            yield Option("local", (record,), (record,) * len(sizes))
            continue
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [scene.cuts.narrowed(record.cut, a, a + size) for a, size in zip(starts, sizes, strict=True)]
        if None not in parts:
            yield Option("local", (record,), tuple(Record("sharded", dim, part) for part in parts if part is not None))
    if scene.has("partial"):
        yield Option("summand", (PARTIAL,), (PARTIAL,) * len(sizes))


def kept(scene: Scene) -> Iterator[Option]:
    """Dims that stay whole keep their cut."""
    dims = kept_dims(scene.layer, len(scene.inputs[0].shape))
    x, outs = scene.inputs[0], scene.layer.outputs
    for record in scene.cut_dims(0):
        after = dims.get(record.dim)
        if after is not None and outs[0].shape[after] == x.shape[record.dim]:
            made = Record("sharded", after, record.cut)
            yield Option("local", others(scene, [record], COPIED), (made,) * len(outs))
    if scene.has("partial") and scene.layer.options.get("name", "sum") in ("sum", "mean"):
        yield Option("summand", others(scene, [PARTIAL], COPIED), (PARTIAL,) * len(outs))


def narrow(scene: Scene) -> Iterator[Option]:
    """A slice takes its piece of the cut."""
    yield from kept(scene)
    options = scene.layer.options
    for record in scene.cut_dims(0):
        if record.dim == options["dim"]:
            cut = scene.cuts.narrowed(record.cut, options["start"], options["stop"])
            if cut is not None:
                yield Option("local", (record,), (Record("sharded", record.dim, cut),))


def summed(scene: Scene) -> Iterator[Option]:
    """Sums along the dim that is cut are summands."""
    yield from kept(scene)
    if scene.layer.options["name"] in ("sum", "mean"):
        for record in scene.cut_dims(0):
            if record.dim in scene.layer.options["dims"]:
                yield Option("reduced", (record,), (PARTIAL,))


def repeat(scene: Scene) -> Iterator[Option]:
    """Every index becomes several."""
    dim, times = scene.layer.options["dim"], scene.layer.options["times"]
    for record in scene.cut_dims(0):
        cut = scene.cuts.scaled(record.cut, times) if record.dim == dim else record.cut
        if cut is not None and not (record.dim == dim and scene.rows(record)):
            yield Option("local", (record,), (Record("sharded", record.dim, cut),))


def pixel_shuffle(scene: Scene) -> Iterator[Option]:
    """Several channels become one."""
    for record in scene.cut_dims(0):
        cut = scene.cuts.scaled(record.cut, 1, scene.layer.options["units"]) if record.dim == 1 else record.cut
        if cut is not None and record.dim < 2:
            yield Option("local", (record,), (Record("sharded", record.dim, cut),))
