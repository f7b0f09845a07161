"""Print the README's speed table from the results of ``decode_and_prefill``.

python -m benchmarks.table benchmarks/results/h200.json
"""

import json
import sys
from typing import Any

from offplan.checkpoint.model import Experts

LITE_EXPERTS = Experts(num_experts=64, num_experts_per_token=6, bytes_per_expert=17_301_504)
LITE_LAYERS_IN_PLACE = 11
"""Of 13 offloaded layers, two are found in the ring's slots, where prefill left them."""


def main() -> None:
    """Print a row for every offloaded measurement: time, bound, and time over bound."""
    with open(sys.argv[1], encoding="utf-8") as file:
        results = json.load(file)
    link = results["link_bytes_per_s"]
    rows = {
        (case["name"], r["batch"]): (case, r) for case in results["cases"] for r in case["results"]
    }
    print("| model, on the host | what | resident | offplan | bound | ratio |")
    print("|---|---|---|---|---|---|")
    for (name, batch), (case, row) in rows.items():
        if not case["rules"]:
            continue
        phase, key = ("8k prompt", "prefill_s") if "prefill_s" in row else ("decode", "step_s")
        model = name.split()[0]
        resident_name = f"{model} resident" + (", long" if key == "prefill_s" else "")
        resident = rows[resident_name, batch][1][key]
        bound = find_bound(case, row, batch, resident, link)
        title = name.removesuffix(", long")
        what = phase if key == "prefill_s" else f"{phase}, batch {batch}"
        print(
            f"| {title} | {what} | {resident * 1e3:.1f} ms | {row[key] * 1e3:.1f} ms "
            f"| {bound * 1e3:.1f} ms | {row[key] / bound:.3f} |"
        )


def find_bound(
    case: dict[str, Any], row: dict[str, Any], batch: int, resident: float, link: dict[str, float]
) -> float:
    """Seconds that physics allows: the larger of compute and link, or their sum for in-place reads.

    Experts read in place take the link while their layer waits, so their time adds to compute.
    """
    if "prefill_s" in row:
        return max(resident, case["offloaded_bytes"] / link["h2d"])
    if row["link_bytes"]:
        return max(resident, row["link_bytes"] / link["h2d"])
    touched = LITE_EXPERTS.touched(batch) * LITE_EXPERTS.bytes_per_expert
    return resident + LITE_LAYERS_IN_PLACE * touched / link["uva"]


if __name__ == "__main__":
    main()
