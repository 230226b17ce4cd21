"""Exceptions of the project. Each message says what was wrong, what is allowed and what to do."""


class InfiniGenError(Exception):
    """Base of every error that this package raises on purpose."""


class InputError(InfiniGenError, ValueError):
    """Something that the caller gave is wrong: a value, a file, a model. Exit status 2."""


class UnsupportedModelError(InputError):
    """The model's family has no adapter, or it uses a feature that none supports."""


class CalibrationError(InputError):
    """A calibration artefact cannot be read, is damaged, or belongs to another model."""


class CacheStateError(InfiniGenError, RuntimeError):
    """A cache was used where it cannot be: outside ``attach``, with another model or batch."""


class SettingLeftOut(UserWarning):
    """A setting of the user's model has no effect while it is attached."""


class DeviceError(InfiniGenError, RuntimeError):
    """The device that held a cache stopped working, and what was on it is lost."""


class HomeError(InfiniGenError, OSError):
    """A home cannot hold or return entries: its disk is full, fails, or is closed."""
