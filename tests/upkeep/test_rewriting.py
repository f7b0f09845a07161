"""A plan's file keeps what people wrote around its values."""

from collections.abc import Sequence
from typing import Any

import pytest

from offplan.plan import Plan, dump_plan, load_plan, parse_plan
from offplan.records import load_yaml
from offplan.upkeep.rewriting import rewrite_plan
from tests.cli import ROOT

TEXT = (ROOT / "plans" / "tiny-moe.yaml").read_text("utf-8")
PLAN = load_plan(ROOT / "plans" / "tiny-moe.yaml")
EDITED = TEXT.replace("offplan: 1\n", "# Reviewed by Ann.\noffplan: 1\n\n").replace(
    "  prefetch_step: 1\n", "  # two were no faster\n  prefetch_step: 1 # slots\n"
)
RULE = {"group_size": 3, "num_in_group": 1, "prefill": "prefetch", "decode": "uva"}
CAPPED = {"max_bytes": "1 KiB", "prefill": "uva", "decode": "uva"}


def with_offload(**changes: Any) -> Plan:
    data = PLAN.model_dump(mode="json", by_alias=True)
    data["offload"] |= changes
    return parse_plan(data, "plan")


def test_the_same_values_leave_every_byte() -> None:
    again = EDITED.replace("1 MiB, host_memory: null", "1024 KiB")
    assert rewrite_plan(again, PLAN) == again


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({"prefetch_step": 2}, "prefetch_step: 1 #", "prefetch_step: 2 #"),
        ({"embeddings": "host"}, "prediction:", None),
        ({"rules": []}, "- {cpu_offload_params: [experts.down_proj], group_size: 2,", "[]"),
        ({"rules": [RULE]}, "group_size: 2", "group_size: 3"),
    ],
)
def test_comments_and_order_stay(
    changes: dict[str, object], before: str, after: str | None
) -> None:
    plan = with_offload(**changes)
    text = rewrite_plan(EDITED, plan)
    assert text is not None
    assert dump_plan(parse_plan(load_yaml(text), "plan")) == dump_plan(plan)
    assert "# Reviewed by Ann.\noffplan: 1\n\nmodel:" in text
    assert "  # two were no faster\n" in text
    assert "# slots\n" in text
    assert before in EDITED
    assert after is None or after in text


@pytest.mark.parametrize("layout", ["flow", "block"])
def test_packing_comes_and_goes(layout: str) -> None:
    packed = with_offload(packing={"group_size": 2, "num_in_group": 1, "output_head": True})
    text = rewrite_plan(EDITED, packed)
    assert text is not None
    assert "num_in_group: 1, output_head: true}" in text
    if layout == "block":
        flow = next(line for line in text.splitlines() if line.startswith("  packing:"))
        block = "  packing: # all\n    group_size: 2\n    num_in_group: 1\n    output_head: true"
        text = text.replace(flow, block)
    assert dump_plan(parse_plan(load_yaml(text), "plan")) == dump_plan(packed)
    again = rewrite_plan(text, PLAN)
    assert again is not None
    assert dump_plan(parse_plan(load_yaml(again), "plan")) == TEXT
    assert again.startswith("# Reviewed by Ann.")


@pytest.mark.parametrize("rules", [[RULE, CAPPED], [CAPPED], [], [RULE, RULE, RULE]])
@pytest.mark.parametrize("layout", ["block", "flow", "nested"])
def test_rules_of_any_number_and_layout(rules: Sequence[dict[str, object]], layout: str) -> None:
    text = EDITED
    at, to = text.index("  rules:\n"), text.index("prediction:")
    if layout == "flow":
        text = f"{text[:at]}  rules: [{text[at:to].partition('- ')[2].strip()}] # all\n{text[to:]}"
    if layout == "nested":
        segments = "cpu_offload_params:\n        - experts.down_proj\n"
        rule = f"{segments}      group_size: 2\n      num_in_group: 1"
        ways = "      prefill: prefetch # streamed\n      decode: prefetch\n"
        text = f"{text[:at]}  rules:\n    - {rule}\n{ways}{text[to:]}"
    assert dump_plan(parse_plan(load_yaml(text), "plan")) == TEXT
    plan = with_offload(rules=rules)
    written = rewrite_plan(text, plan)
    assert written is not None
    assert written.startswith("# Reviewed by Ann.")


def test_new_keys_are_lines_of_their_section() -> None:
    text = TEXT.replace("  revision: null\n", "").replace(
        "goal: {objective: latency, cached_experts: auto, parts: auto}\n", ""
    )
    goal = PLAN.goal.model_copy(update={"max_tpot_s": 0.05})
    model = PLAN.model.model_copy(update={"revision": "abc"})
    written = rewrite_plan(text, PLAN.model_copy(update={"goal": goal, "model": model}))
    assert written is not None
    assert "  dtype: bfloat16\n  revision: abc\n" in written
    told = "goal: {objective: latency, max_tpot: 50 ms, cached_experts: auto, parts: auto}"
    assert written.endswith(f"host_memory: 96 KiB\n{told}\n")


def test_an_unusual_layout_is_not_guessed_at() -> None:
    assert rewrite_plan(TEXT.replace("name: CPU", "name: |-\n    CPUs"), PLAN) is None
