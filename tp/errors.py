"""TestbedError: the root of every error that the test bed itself raises."""


class TestbedError(Exception):
    """The test bed was asked for something it cannot do; the message says what was given, what is allowed and what to do."""

    __test__ = False  # the name starts with Test, and pytest would collect it
