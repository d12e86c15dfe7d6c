"""Errors a user can cause and can fix. Everything else is a bug and keeps its traceback."""


class QInferError(Exception):
    """An expected failure: one line saying what is wrong, one saying what to do.

    Args:
        message: What went wrong, naming the file, tensor or option involved.
        hint: What the user can do next, or None if there is nothing useful to say.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class CheckpointError(QInferError):
    """A checkpoint file or directory is missing, incomplete or malformed."""


class UnsupportedModelError(QInferError):
    """The checkpoint asks for something that has no implementation here."""


class PromptError(QInferError):
    """A prompt cannot be run as it stands: empty, too long, or not renderable."""


class NumericsError(QInferError):
    """The model produced NaN or infinite values."""
