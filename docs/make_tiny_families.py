"""Makes tiny checkpoints of families that transformers' own passes run, to try offplan on them.

    python docs/make_tiny_families.py FOLDER [FAMILY ...]

Needs the tests' helpers, so it runs from a clone's root. Each checkpoint has random float32 weights
and no tokenizer; ``offplan run`` continues random tokens.
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM

from tests.runtime.families import PUBLISHED, draw_weights, make_config

FAMILIES = ("deepseek_v4", "nemotron_h", "kimi_linear", "granitemoehybrid", "jamba", "falcon")


def main() -> None:
    """Save a checkpoint of each family in a folder of its name."""
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER [FAMILY ...]; the families: {' '.join(FAMILIES)}")
    for family in sys.argv[2:] or FAMILIES:
        folder = Path(sys.argv[1]) / family
        model = AutoModelForCausalLM.from_config(make_config(family, {}))
        draw_weights(model).save_pretrained(folder)
        if family in PUBLISHED:
            PUBLISHED[family](folder)
        print(folder)


if __name__ == "__main__":
    main()
