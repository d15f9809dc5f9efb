"""TestbedError: the root of every error that the test bed itself raises."""


class TestbedError(Exception):
    """The test bed was asked for what it cannot do; the message says what was given, what is allowed, what to do."""

    __test__ = False  # the name starts with Test, and pytest would collect it
