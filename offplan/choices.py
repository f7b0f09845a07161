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
PartsChoice = Literal["off", "auto"]
"""Whether rules may have prompts stream a layer's routed experts in parts."""
DEFAULT_PARTS: PartsChoice = "off"
"""Whether they may where nobody says: ``auto`` once prompts in parts have been measured on a GPU.

They then have to take what is predicted, within what other predictions are off by.
"""
DeviceName = Literal["cuda", "cpu"]
"""What a machine is measured on: its current CUDA device, or the CPU as one that plays GPU."""
ExportFormat = Literal["command", "yaml", "env", "docker"]
"""How an engine's command is written."""
WeightType = Literal["bfloat16", "float16", "float32"]
"""The type that weights are stored in, where they are not quantised."""
TableFormat = Literal["text", "markdown"]
"""How tables are written."""
FileKind = Literal["plan", "profile"]
"""Which of the files that people write a schema is of."""
