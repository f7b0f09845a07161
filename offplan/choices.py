"""Words of which one is chosen, the same in a plan, in a call and on the command line."""

from typing import Literal

Store = Literal["host", "peer"]
"""Where what is offloaded lies: in pinned host memory, or in that of a second GPU."""
ObjectiveName = Literal["latency", "throughput"]
"""What a plan is best at: the time of one request, or tokens a second."""
DEFAULT_CACHED_EXPERTS: Literal["off", "auto"] = "off"
"""Whether plans may keep experts one by one where nobody says.

``auto`` once it has been measured on an H200 that with uniform routing no plan is slower by more
than 1 % and that with the published reuse gpt-oss-120b in 24 GiB makes a token in 10 ms or less.
"""
DeviceName = Literal["cuda", "cpu"]
"""What a machine is measured on: its current CUDA device, or the CPU as one that plays GPU."""
ExportFormat = Literal["command", "yaml", "env", "docker"]
"""How an engine's command is written."""
TableFormat = Literal["text", "markdown"]
"""How tables are written."""
FileKind = Literal["plan", "profile"]
"""Which of the files that people write a schema is of."""
