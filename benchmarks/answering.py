"""CPU seconds in which ``offplan analyze`` answers from a config: asked first, and once more.

``python -m benchmarks.answering FOLDER ... [--machine NAME] [--context N] [--repeats N]``
prints JSON. A folder
holds a ``config.json``, or folders that do. Each is asked on one core, with one thread and an empty
home, imports and processes that are started included. Of several repeats the least counts, since
whatever else runs makes them slower.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def cpu_seconds(command: list[str], environment: dict[str, str]) -> float:
    """Run a command, and return what it and all its processes took of the CPU."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if done.returncode not in (0, 3):  # that no plan fits is an answer
        sys.exit(f"{command}: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(config: Path, options: list[str], repeats: int) -> dict[str, Any]:
    """Return the least CPU seconds of a config's first answer, and of its second."""
    command = [sys.executable, "-m", "offplan", "analyze", str(config), *options]
    found = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as home:
            own = {"HOME": home, "HF_HOME": f"{home}/hf", "XDG_CACHE_HOME": f"{home}/cache"}
            environment = os.environ | own | {"OMP_NUM_THREADS": "1"}
            found.append([cpu_seconds(command, environment) for _ in range(2)])
    first, second = (round(min(each), 2) for each in zip(*found, strict=True))
    return {"config": str(config), "first_s": first, "second_s": second}


def list_configs(folders: list[Path]) -> Iterator[Path]:
    """List the configs of these folders, or of those in them."""
    for folder in folders:
        yield from sorted([*folder.glob("config.json"), *folder.glob("*/config.json")])


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--machine", default="rtx4090")
    parser.add_argument("--context", default="4096")
    parser.add_argument("--repeats", type=int, default=1)
    asked = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    options = ["--machine", asked.machine, "--context", asked.context]
    answers = [measure(each, options, asked.repeats) for each in list_configs(asked.folders)]
    told = {"host": platform.processor() or platform.machine(), "machine": asked.machine}
    told["context"] = asked.context
    print(json.dumps({**told, "answers": answers}, indent=1))


if __name__ == "__main__":
    main()
