"""The metaclass of pydantic's models, for values that take positional arguments; nothing here needs torch.

`type(BaseModel)` is the same class, but type checkers do not accept it as a base class. The path is that of pydantic 2.
"""

from pydantic._internal._model_construction import ModelMetaclass

__all__ = ["ModelMetaclass"]
