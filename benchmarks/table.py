"""Print the tables of ``docs/benchmarks.md`` from the results of the benchmarks.

    python -m benchmarks.table benchmarks/results/h200.json
    python -m benchmarks.table benchmarks/results/h200-peer.json
    python -m benchmarks.table benchmarks/results/predictions-h200.json
    python -m benchmarks.table benchmarks/results/versus-h200.json

Which table it is follows from what is in the file.
"""

import json
import sys
from collections.abc import Iterable
from typing import Any

BYTES_PER_EXPERT = 17_301_504
"""Of DeepSeek-V2-Lite."""
LITE_LAYERS_IN_PLACE = 11
"""Of 13 offloaded layers, two are found in the ring's slots, where prefill left them."""
GIB = 2**30


def main() -> None:
    """Print the table of a file."""
    with open(sys.argv[1], encoding="utf-8") as file:
        results = json.load(file)
    if "link_bytes_per_s" in results:
        table = show_speeds(results)
    elif "plans" in results:
        table = show_peer(results)
    elif "vs" in results:
        table = show_versus(results)
    else:
        table = show_predictions(results)
    print("\n".join(table))


def show_speeds(results: dict[str, Any]) -> Iterable[str]:
    """List a row for every offloaded measurement: time, bound, and time over bound."""
    link = results["link_bytes_per_s"]
    rows = {
        (case["name"], r["batch"]): (case, r) for case in results["cases"] for r in case["results"]
    }
    yield "| model, on the host | what | resident | offplan | bound | ratio |"
    yield "|---|---|---|---|---|---|"
    for (name, batch), (case, row) in rows.items():
        if not case["rules"]:
            continue
        phase, key = ("8k prompt", "prefill_s") if "prefill_s" in row else ("decode", "step_s")
        model = name.split()[0]
        resident_name = f"{model} resident" + (", long" if key == "prefill_s" else "")
        resident = rows[resident_name, batch][1][key]
        bound = find_bound(case, row, resident, link)
        title = name.removesuffix(", long")
        what = phase if key == "prefill_s" else f"{phase}, batch {batch}"
        yield (
            f"| {title} | {what} | {ms(resident)} | {ms(row[key])} | {ms(bound)} "
            f"| {row[key] / bound:.3f} |"
        )


def find_bound(
    case: dict[str, Any], row: dict[str, Any], resident: float, link: dict[str, float]
) -> float:
    """Seconds that physics allows: the larger of compute and link, or their sum for in-place reads.

    Experts read in place take the link while their layer waits, so their time adds to compute.
    """
    if "prefill_s" in row:
        return max(resident, case["offloaded_bytes"] / link["h2d"])
    if row["link_bytes"]:
        return max(resident, row["link_bytes"] / link["h2d"])
    touched = row["touched_experts"] * BYTES_PER_EXPERT
    return resident + LITE_LAYERS_IN_PLACE * touched / link["uva"]


def show_peer(results: dict[str, Any]) -> Iterable[str]:
    """List a row for every measurement with a second GPU as the store."""
    yield "| Qwen3-8B, on the second GPU | what | resident | offplan | bound | ratio |"
    yield "|---|---|---|---|---|---|"
    for row in results["plans"]:
        decode = f"decode, batch {row['batch']}"
        yield (
            f"| {row['plan'].removesuffix(', long')} "
            f"| {'8k prompt' if row['what'] == 'prefill_s' else decode} | {ms(row['resident_s'])} "
            f"| {ms(row['measured_s'])} | {ms(row['bound_s'])} | {row['ratio']:.3f} |"
        )


def show_versus(results: dict[str, Any]) -> Iterable[str]:
    """List the plan and each other way of running the model, as ``offplan bench --vs`` timed it."""
    yield "| way | first token | a token | GPU memory |"
    yield "|---|---|---|---|"
    for name, way in {"the plan": results["measured"], **results["vs"]}.items():
        memory = way["gpu_memory"]["total_bytes"] / GIB
        prefill, decode = (way[phase]["step_s"] for phase in ("prefill", "decode"))
        yield f"| {name} | {ms(prefill)} | {ms(decode)} | {memory:.2f} GiB |"


def show_predictions(results: dict[str, Any]) -> Iterable[str]:
    """List what each plan promised and what was measured, and the worst case last."""
    yield "| plan | first token | ratio | a token | ratio | over the floor | GPU memory | ratio |"
    yield "|---|---|---|---|---|---|---|---|"
    cases = [case for case in results["cases"] if "failed" not in case]
    for case in cases:
        memory = case["gpu_memory"]
        yield (
            f"| {case['name']} | {pair(case['prefill'])} | {case['prefill']['ratio']:.3f} "
            f"| {pair(case['decode'])} | {case['decode']['ratio']:.3f} "
            f"| {case['decode']['over_floor']:.3f} "
            f"| {memory['predicted_bytes'] / GIB:.2f} / {memory['measured_bytes'] / GIB:.2f} GiB "
            f"| {memory['ratio']:.3f} |"
        )
    worst = {
        what: max((case[what]["ratio"] for case in cases), key=lambda ratio: abs(ratio - 1))
        for what in ("prefill", "decode", "gpu_memory")
    }
    yield (
        f"| worst | | {worst['prefill']:.3f} | | {worst['decode']:.3f} | | "
        f"| {worst['gpu_memory']:.3f} |"
    )


def pair(phase: dict[str, float]) -> str:
    """Predicted and measured."""
    return f"{ms(phase['predicted_s']).removesuffix(' ms')} / {ms(phase['measured_s'])}"


def ms(seconds: float) -> str:
    """Milliseconds."""
    return f"{seconds * 1e3:.1f} ms"


if __name__ == "__main__":
    main()
