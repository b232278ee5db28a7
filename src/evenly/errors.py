"""The exception tree. Errors that this library raises are of these classes, but for a few wrong arguments (TypeError).

EvenlyError
├── SpecError         an argument, a value, a file or a call is invalid (bad field, impossible shares, wrong order)
├── LaunchError       the rank of a process is unknown, or the other ranks cannot be reached
├── PeerError         another rank failed, left, or did not arrive in time
│   ├── LockstepError ranks are not at the same step
│   └── CoordinatorLostError  the coordinator of an elastic run is not reached at the moment
├── MismatchError     ranks have different models, optimizers or settings, or their parameters have diverged
├── NonFiniteError    a loss, gradient, parameter or buffer became NaN or infinite
├── DeviceMemoryError a device has no memory for an exchange
├── DataError         data are missing, empty or not in the expected form
├── CheckpointError   a checkpoint is missing, damaged or of another model, or its folder is in use
│   ├── CheckpointWriteError   it could not be written: the disk is full, or the folder is read-only
│   └── CheckpointDamageError  a file of it is missing, changed, or not what a checkpoint has
└── LabError          the emulated cluster cannot be built on this machine

A message has three parts: what was asked, what is the case (with values), what to do.
"""


class EvenlyError(Exception):
    """Root of every error raised on purpose by this library."""


class SpecError(EvenlyError):
    """An argument, a value, a file or a call is invalid."""


class LaunchError(EvenlyError):
    """The rank of the process is unknown, or the other ranks cannot be reached."""


class PeerError(EvenlyError):
    """Another rank failed, left, or did not arrive in time."""


class LockstepError(PeerError):
    """Ranks are not at the same step."""


class CoordinatorLostError(PeerError):
    """The coordinator of an elastic run is not reached at the moment; training can go on without exchanges."""


class MismatchError(EvenlyError):
    """Ranks have different models, optimizers or settings, or their parameters have diverged."""


class NonFiniteError(EvenlyError):
    """A loss, gradient, parameter or buffer became NaN or infinite."""


class DeviceMemoryError(EvenlyError):
    """A device has no memory for an exchange."""


class DataError(EvenlyError):
    """Data are missing, empty or not in the expected form."""


class CheckpointError(EvenlyError):
    """A checkpoint is missing, damaged or of another model, or the folder of a run is in use."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint or the record of a run could not be written: the disk is full, or the folder is read-only."""


class CheckpointDamageError(CheckpointError):
    """A file of a checkpoint is missing, was changed, or is not what a checkpoint has."""


class LabError(EvenlyError):
    """The emulated cluster cannot be built on this machine."""
