"""Errors that are the user's to mend: bad input, told in one line."""


class UserError(Exception):
    """Bad input. The message is one line that says what is wrong, where, and what to do about it."""
