"""The exception tree. Every error this library raises on purpose is one of these.

EvenlyError
├── SpecError         a value or file says something it may not say (bad field, wrong version, impossible shares)
├── LaunchError       the process does not know who it is, or the other ranks cannot be reached
├── PeerError         another rank failed, left, or did not arrive in time
│   └── LockstepError ranks are not at the same step
├── MismatchError     ranks were given different models, optimizers or settings
├── NonFiniteError    a loss or gradient became NaN or infinite
├── DataError         data are missing, empty or not in the expected form
├── CheckpointError   a checkpoint is missing, damaged or of another model, or its folder is in use
└── LabError          the emulated cluster cannot be built on this machine

A message has three parts: what was asked, what is the case (with values), what to do.
"""


class EvenlyError(Exception):
    """Root of every error raised on purpose by this library."""


class SpecError(EvenlyError):
    """A value or file says something it may not say."""


class LaunchError(EvenlyError):
    """The process does not know who it is, or cannot meet the other ranks."""


class PeerError(EvenlyError):
    """Another rank failed, left, or did not arrive in time."""


class LockstepError(PeerError):
    """Ranks are not at the same step."""


class MismatchError(EvenlyError):
    """Ranks were given different models, optimizers or settings."""


class NonFiniteError(EvenlyError):
    """A loss or gradient became NaN or infinite."""


class DataError(EvenlyError):
    """Data are missing, empty or not in the expected form."""


class CheckpointError(EvenlyError):
    """A checkpoint is missing, damaged or of another model, or the folder of a run is in use."""


class LabError(EvenlyError):
    """The emulated cluster cannot be built on this machine."""
