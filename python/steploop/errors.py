"""The typed errors that steploop raises; the native core raises these same classes."""


class SteploopError(Exception):
    """Base of every error that steploop raises on purpose."""


class InvalidArgumentError(SteploopError, ValueError):
    """A setting of the engine cannot be used; says what must hold and what was given."""


class InvalidRequestError(SteploopError, ValueError):
    """One request cannot be served as given; nothing was added to the engine."""


class RequestTooLongError(InvalidRequestError):
    """The prompt is longer than `max_model_len` or `max_num_queued_tokens`, or could never fit the KV cache."""


class DuplicateRequestError(InvalidRequestError):
    """A request with this id is still in flight."""


class QueueFullError(SteploopError):
    """The waiting queue holds as many requests or tokens as it may, or the engine is draining. Nothing was added."""


class ModelLoadError(SteploopError):
    """The model's files are missing, damaged, or do not match each other."""


class UnsupportedModelError(SteploopError):
    """The files are sound, but the engine lacks something the model needs."""


class UnsupportedDeviceError(SteploopError):
    """The device asked for is not there, or not in this build."""


class EngineDeadError(SteploopError):
    """The engine is closed, or failed in a way it cannot recover from."""


class LoadTestError(SteploopError):
    """What a load test is to test does not answer, so that there is nothing to measure."""


class InternalError(SteploopError):
    """An invariant of the engine does not hold: a bug in steploop."""


__all__ = [
    "DuplicateRequestError",
    "EngineDeadError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidRequestError",
    "LoadTestError",
    "ModelLoadError",
    "QueueFullError",
    "RequestTooLongError",
    "SteploopError",
    "UnsupportedDeviceError",
    "UnsupportedModelError",
]
