"""The metaclass of pydantic's models, for values that take positional arguments; nothing here needs torch.

`type(BaseModel)` is the same class, but a type checker does not take it as the base of another one. The path is that
of pydantic 2.
"""

from pydantic._internal._model_construction import ModelMetaclass

__all__ = ["ModelMetaclass"]
