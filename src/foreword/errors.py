"""The one exception that a user's mistake raises."""


class ForewordError(ValueError):
    """Something the caller can put right: one line that says what is wrong, where, and what would be right.

    The command line prints it without a traceback and exits with code 2.
    """
