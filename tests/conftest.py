"""For all tests: how Hypothesis draws its examples, and how many threads torch takes."""

import os

from hypothesis import settings

# before torch is imported: threads that wait for each other cost more than these tiny products, and
# each of pytest's workers would have as many as there are cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")
