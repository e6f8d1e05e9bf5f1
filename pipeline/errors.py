"""The one exception a user is meant to read."""


class PalimpsestError(Exception):
    """Something the user can mend. The message names the key, file or stage and says what to do.

    The runner prints it as a single line without a traceback and exits with status 1.
    """
