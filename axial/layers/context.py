"""Context variables that have a value within a `with` statement."""

import contextlib


@contextlib.contextmanager
def holds(variable, value):
    """Within this context, the context variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
