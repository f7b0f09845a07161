"""Measure the host's cores beside a GPU as ``offplan measure`` does, and nothing else, as JSON.

    python -m benchmarks.cores [CONFIG_JSON] [--set JSON] [--machine h200-pcie5 --write PROFILE]

Weights are random, of the model's forms and expert sizes; without a config they are bf16 experts.
``--write`` adds the figures to the profile of ``--machine``, so that plans can be priced with them.
"""

import argparse
import json
from pathlib import Path

import torch

from benchmarks.replay import read_config
from benchmarks.run_plan import describe_machine
from offplan.held.held import hold
from offplan.library.machines import load_machine
from offplan.machine.profile import MachineProfile, dump_profile
from offplan.runtime.measuring.cores import measure_cores


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("--set", type=json.loads, default={}, help="keys of the config, as JSON")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--machine", default="h200-pcie5")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    stage = options.config and hold(read_config(options.config, options.set))
    figures = measure_cores(stage, torch.device(options.device), options.threads)
    if options.write is not None:
        known = load_machine(options.machine).profile
        profile = MachineProfile.model_validate(known.model_dump() | figures)
        options.write.write_text(dump_profile(profile), "utf-8")
    machine = describe_machine() if options.device == "cuda" else {}
    print(json.dumps({"config": str(options.config), "machine": machine, "figures": figures}))


if __name__ == "__main__":
    main()
