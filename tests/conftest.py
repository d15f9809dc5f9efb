"""Settings of hypothesis for all tests: no deadlines, as machines are shared; the same examples every time in CI."""

import os

from hypothesis import settings

settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
pytest_plugins = ["pytester"]
