"""Lets what a call used be freed when the call ends, and not by a later garbage collection.

An exception refers to its traceback, and so to the local variables of all functions that it passed
through. Some of them refer to the exception again: a task group to the errors of its tasks, a call
to the error that ended it. Nothing in such a cycle is freed before a collection, which visits all
objects of the server and stops its event loop meanwhile.
"""


def drop_tracebacks(error: BaseException) -> None:
    """Drops the traceback of an exception that was handled, and the exceptions that led to it."""
    errors: list[BaseException | None] = [error]
    seen = set[int]()
    while errors:
        linked = errors.pop()
        if linked is None or id(linked) in seen:
            continue
        seen.add(id(linked))
        errors += (linked.__cause__, linked.__context__)
        linked.__traceback__ = linked.__cause__ = linked.__context__ = None
        if isinstance(linked, BaseExceptionGroup):
            errors += linked.exceptions
