"""How much host memory the process has taken, and how much it may still take."""

import resource
import sys


def peak_host_bytes() -> int:
    """The most host memory that this process has had in use, pages of mapped files included.

    Source: getrusage(2): ``ru_maxrss`` is in KiB on Linux and in bytes on macOS.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 2**10
