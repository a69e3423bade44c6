"""The one exception a user of the engine is meant to read."""


class EagleError(ValueError):
    """A fault in what the user gave: a file, a model, an option, a prompt.

    The message names the fault and, where there is one, the remedy. The command line prints it and exits with status 2.
    """
