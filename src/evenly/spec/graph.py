"""A network as a list of operations: shapes, work, bytes, inputs, what may be cut.

Kinds of operation and what they mean for a tensor that is cut along one dim:

| kind | ops |
|---|---|
| source | input, parameter, number |
| pointwise | unary, dropout |
| along | softmax and others that look along one dim and treat the others alike; roll |
| per channel | bias, batch_norm, instance_norm, group_norm, layer_norm, rms_norm, spatial, prelu |
| mixing | conv, linear, embedding, matmul, attention, cross_entropy, recurrent |
| joining | join, concat |
| reshaping | view, permute, split, unbind, narrow, select, expand, repeat, pixel_shuffle, sum |
| opaque | anything else: computed whole |
"""

import hashlib
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from evenly.spec._value import Document, Value

Kind = Literal["source", "pointwise", "along", "per channel", "mixing", "joining", "reshaping", "opaque", "output"]


class Tensor(Value):
    """An output of one operation, with the shape it has for the example input."""

    name: str
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    dtype: str
    has_grad: bool = Field(default=False, description="whether a gradient flows back into it")

    @property
    def numel(self) -> int:
        """The number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def size_bytes(self) -> int:
        """The bytes it takes."""
        return self.numel * _BYTES.get(self.dtype, 4)


_BYTES = {"float64": 8, "int64": 8, "complex64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1}
_BYTES |= {"bool": 1, "complex128": 16}


class Layer(Value):
    """One operation of a network."""

    name: str
    op: str
    kind: Kind
    where: str = Field(default="", description="the module it belongs to, or the parameter's name")
    inputs: tuple[str, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    options: dict[str, Any] = Field(default_factory=dict)
    flops: Annotated[int, Field(ge=0)] = 0
    note: str = Field(default="", description="why it is opaque")

    @property
    def is_measurable(self) -> bool:
        """Whether it is timed by itself: convolutions and linear layers."""
        return self.op in ("conv", "linear") and len(self.inputs) > 1


class Graph(Document):
    """A network traced with an example: its operations in order."""

    version: Literal[1] = 1
    model: str
    layers: tuple[Layer, ...]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        defined_names: set[str] = set()
        for layer in self.layers:
            if unknown := [name for name in layer.inputs if name not in defined_names]:
                raise ValueError(f"layer {layer.name!r} takes {unknown[0]!r}, which no layer before it gives out")
            output_names = {tensor.name for tensor in layer.outputs}
            if duplicates := sorted(defined_names & output_names):
                raise ValueError(f"more than one layer gives out {duplicates[0]!r}")
            defined_names |= output_names
        return self

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        return {tensor.name: tensor for layer in self.layers for tensor in layer.outputs}

    @property
    def fingerprint(self) -> str:
        """Text that is equal for equal networks and examples."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    @property
    def batch_size(self) -> int:
        """The samples of the example: the leading size of the first input; 0 without one."""
        shapes = [layer.outputs[0].shape for layer in self.layers if layer.op == "input" and layer.outputs]
        return next((shape[0] for shape in shapes if shape), 0)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters."""
        return sum(layer.outputs[0].size_bytes for layer in self.layers if layer.op == "parameter")

    @property
    def sample_bytes(self) -> int:
        """Estimated bytes that a sample needs until backward: everything computed from it."""
        computed = [
            t for layer in self.layers if layer.kind not in ("source", "reshaping", "output") for t in layer.outputs
        ]
        return sum(tensor.size_bytes for tensor in computed) // max(1, self.batch_size)

    def form_of(self, layer: Layer) -> str:
        """Returns text that is equal for layers that compute alike: operation, shapes and options."""
        tensors = self.tensors
        shapes = [tensors[name].shape for name in layer.inputs if name in tensors]
        shapes += [tensor.shape for tensor in layer.outputs]
        sizes = ["x".join(map(str, shape)) for shape in shapes]
        return " ".join([layer.op, *sizes, *(f"{key}={value}" for key, value in sorted(layer.options.items()))])

    def explain(self) -> str:
        """Returns a table of the operations that compute, with the unit in which each may be cut."""
        rows = [f"{self.model}: {len(self.layers)} operations, {sum(x.flops for x in self.layers) / 1e9:.2f} GFlop"]
        for layer in self.layers:
            if layer.kind in ("source", "output"):
                continue
            shapes = ", ".join("x".join(map(str, tensor.shape)) for tensor in layer.outputs)
            note = f"  ({layer.note})" if layer.note else ""
            rows.append(f"  {layer.where or layer.name:32} {layer.kind:12} {layer.op:14} {shapes}{note}")
        return "\n".join(rows)
