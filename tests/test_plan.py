"""The plan file: what is written reads back, and what is wrong is named."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from offplan import units
from offplan.backends import BACKENDS, find_backend
from offplan.capabilities.packing import Packing
from offplan.errors import DriftError, PlanError
from offplan.library.asking import pose
from offplan.library.planned import open_planned_model
from offplan.plan import (
    Backend,
    Budget,
    GPUMemoryPrediction,
    Offload,
    PhasePrediction,
    Plan,
    Prediction,
    Rule,
    Workload,
    dump_plan,
    load_plan,
    parse_plan,
)
from offplan.planner.make import make_plan
from offplan.records import Basis, dump_yaml, load_yaml
from tests.cli import ROOT
from tests.costs.builders import dense_model, make_machine, moe_model, rule

WORKLOAD = Workload(prompt_tokens=600, output_tokens=20, context=700)


def example() -> Plan:
    """A plan that offloads experts."""
    budget = Budget(gpu_memory=3_000_000, host_memory=2**30)
    plan = make_plan(pose(moe_model(8), make_machine(), WORKLOAD, budget)).plan
    assert plan.offload.rules
    return plan


seconds = st.floats(0, 1e5)
sizes = st.integers(0, 2**44)
phases = st.builds(
    PhasePrediction,
    step=seconds,
    compute=seconds,
    link=seconds,
    stall=seconds,
    bound=seconds,
    link_bytes=sizes,
)
memories = st.builds(
    GPUMemoryPrediction,
    resident=sizes,
    ring=sizes,
    kv_cache=sizes,
    activations=sizes,
    overhead=sizes,
    total=sizes,
)
predictions = st.builds(
    Prediction,
    objective=seconds,
    basis=st.sampled_from(get_args(Basis)),
    prefill=phases,
    decode=phases,
    gpu_memory=memories,
    host_memory=sizes,
)
segments = st.lists(st.sampled_from(["mlp", "experts", "o_proj", "yes", "1.5"]), unique=True)
backends = st.sampled_from([each for each in BACKENDS.values() if len(each.phases) == 2])
rules = st.one_of(
    st.builds(
        lambda names, size, share, prefill, decode: rule(
            *names, group=(size, max(1, round(share * size))), prefill=prefill, decode=decode
        ),
        segments,
        st.integers(1, 99),
        st.floats(0, 1),
        backends,
        backends,
    ),
    st.builds(
        Rule,
        cpu_offload_params=segments,
        max_bytes=st.integers(1, 2**44),
        prefill=st.just(Backend.UVA),
        decode=st.just(Backend.UVA),
    ),
)
counts = st.integers(1, 5)
offloads = st.builds(
    Offload,
    prefetch_step=st.integers(1, 9),
    prefill_chunk=st.integers(1, 10**6),
    packing=st.none()
    | st.builds(Packing, cpu_offload_params=segments, group_size=st.just(5), num_in_group=counts),
    rules=st.lists(rules, max_size=3),
) | st.builds(
    Offload,
    prefill_chunk=st.integers(1, 10**6),
    store=st.just("peer"),
    rules=st.lists(st.just(rule(group=(2, 1))), max_size=2),
)
budgets = st.builds(
    Budget, gpu_memory=st.integers(1, 2**44), host_memory=st.none() | st.integers(1, 2**44)
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    prediction, budget = draw(predictions), draw(budgets)
    least = prediction.gpu_memory.total_bytes  # a plan keeps its budget
    stored = prediction.host_memory_bytes + prediction.peer_memory_bytes
    roomy = {"gpu_memory": budget.gpu_memory + least}
    if budget.host_memory is not None:
        roomy["host_memory"] = budget.host_memory + stored
    kept = budget.model_copy(update=roomy)
    decided = {"prediction": prediction, "offload": draw(offloads), "budget": kept}
    return example_plan.model_copy(update=decided)


@pytest.mark.slow
@given(plans())
def test_yaml_round_trip(plan: Plan) -> None:
    text = dump_plan(plan)
    again = parse_plan(yaml.safe_load(text), "again")
    assert dump_plan(again) == text
    # decisions read back exactly
    assert (again.offload, again.budget) == (plan.offload, plan.budget)


@pytest.mark.slow
@given(plans())
def test_json_is_exact(plan: Plan) -> None:
    assert parse_plan(plan.model_dump(mode="json"), "json") == plan


@pytest.mark.parametrize(
    ("show", "read", "value"),
    [
        (units.format_bytes, units.parse_bytes, 2**40 - 2**28),
        (units.format_seconds, units.parse_seconds, 0.99999),
    ],
)
def test_rounding_up_to_the_next_unit_is_stable(
    show: Callable[[float], str], read: Callable[[str], float], value: float
) -> None:
    assert show(read(show(value))) == show(value)


example_plan = example()


def test_made_plan_reads_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(dump_plan(example_plan), "utf-8")
    again = load_plan(path)
    assert dump_plan(again) == dump_plan(example_plan)
    assert again.offload == example_plan.offload


@pytest.mark.slow
def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(dump_plan(example()).replace("workload: {", "workload: {batch: 7, "))
    with pytest.raises(PlanError, match="the key 'batch' is given twice"):
        load_plan(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "? [a]\n: b\n",
        "!!map foo",
        "{a: b, a: c}",
        "[{a: b, a: c}]",
        "&a [1, *a]",
        "&a {<<: *a}",
        'a: "\\e[2J"',
        "{? '' : 1, ? '' : 2}",
        "a: " + "9" * 5000,
        "a: !!int 1:30",
        "a: !!float 1:1.5",
        "a: !!int ''",
        "a: !!bool maybe",
        "a: !!timestamp x",
        "[" * 3000,
    ],
)
def test_odd_documents_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(PlanError, match="is not YAML"):
        load_plan(path)


@pytest.mark.parametrize("value", ["1:30", "0x10", "0o7", "1_000", "2001-01-01", "yes", ".inf"])
def test_values_are_what_they_look_like(value: str) -> None:
    assert load_yaml(f"a: {value}") == {"a": value}
    assert load_yaml("[1, -2.5, 1e-05, true, null, ~]") == [1, -2.5, 1e-05, True, None, None]


@pytest.mark.parametrize("text", ["589e57806582", "1e5", "-2", "0.5", "nULL", "TRue", "", "1:30"])
def test_texts_are_read_back_as_texts(text: str) -> None:
    """A layer's digest may have digits and one ``e`` alone."""
    for value in ({"a": text}, [text], text):
        assert load_yaml(dump_yaml(value, width=100)) == value
        assert load_yaml(dump_yaml(value, width=100, on_one_line=True)) == value
    assert dump_yaml([1, 1e-05, True, None], width=100, on_one_line=True).count("'") == 0


@pytest.mark.slow
def test_many_keys_are_compared_at_once(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(dump_plan(example_plan) + "".join(f"k{i}: {i}\n" for i in range(5000)))
    with pytest.raises(PlanError, match=r"k19: there is no such key; and 4980 more$"):
        load_plan(path)


def test_all_errors_of_a_file_are_told_at_once_and_shortly() -> None:
    data = yaml.safe_load(dump_plan(example_plan))
    data["offload"] |= {"prefetch_steps": 2, "prefill_chunk": 2**63}
    data["budget"]["gpu_memory"] = "1" * 10**6
    del data["machine"]["name"]
    data["k" * 10**6] = 1
    with pytest.raises(PlanError) as refused:
        parse_plan(data, "a plan")
    told = str(refused.value)
    assert len(told) < 1000
    for part in (
        "offload.prefetch_steps: there is no such key; is prefetch_step meant?",
        "offload.prefill_chunk: Input should be less than",
        "budget.gpu_memory: '111",
        "machine.name: it is missing",
    ):
        assert part in told


def test_a_file_without_an_end_is_no_plan() -> None:
    with pytest.raises(PlanError, match="is no plan: it is longer than 256 KiB"):
        load_plan(Path("/dev/zero"))


def test_json_has_the_keys_that_scripts_rely_on() -> None:
    data = example_plan.model_dump(mode="json")
    assert set(data["prediction"]["decode"]) == {
        *("step_s", "compute_s", "link_s", "stall_s", "bound_s", "link_bytes")
    }
    assert set(data["prediction"]["gpu_memory"]) == {
        *("resident_bytes", "ring_bytes", "kv_cache_bytes", "activation_bytes"),
        *("overhead_bytes", "total_bytes"),
    }
    assert isinstance(data["prediction"]["objective_s"], float)
    assert "rules" in data["offload"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("offplan",), 2, "version 2"),
        (("extra",), 1, "extra"),
        (("offload", "rules", 0, "group_size"), 0, "group_size"),
        (("offload", "rules", 0, "decode"), "dma", "decode"),
        (("offload", "prefetch_step"), 0, "prefetch_step"),
        (("offload", "rules", 0, "segments"), [], "segments"),
        (("offload", "store"), "disk", "'host' or 'peer'"),
        (("offload", "rules", 0, "cpu_offload_params"), "mlp", "should be a list"),
        (("offload",), 3, "should be a valid mapping"),
        (("budget", "gpu_memory"), "much", "write it as 16GiB"),
        (("budget", "gpu_memory"), "1 MiB", "more than its budget of 1 MiB: plan it again"),
        (("workload", "context"), 10, "raise `context`"),
        (("prediction", "decode", "step"), "soon", "write it as 31 ms"),
    ],
)
def test_what_is_wrong_is_named(path: tuple[object, ...], value: object, message: str) -> None:
    data = yaml.safe_load(dump_plan(example_plan))
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(PlanError, match=message):
        parse_plan(data, "a plan")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "needs group_size"),
        ({"group_size": 2}, "needs group_size"),
        ({"group_size": 2, "num_in_group": 3}, "more than group_size"),
        ({"group_size": 2, "num_in_group": 1, "max_bytes": 5}, "either max_bytes"),
        ({"max_bytes": 5, "decode": "prefetch"}, "read in place"),
    ],
)
def test_rules_have_one_form(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rule.model_validate({"prefill": "uva", "decode": "uva", **fields})


GROUP = {"group_size": 1, "num_in_group": 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**GROUP, "decode": "prefetch"}, "found decode: prefetch with cached_experts"),
        ({"max_bytes": 5}, "keeps single experts"),
        ({**GROUP, "cached_experts": 0}, "greater than or equal to 1"),
        ({**GROUP, "cached_experts_more": 0}, "greater than or equal to 1"),
        ({**GROUP, "cached_experts": None, "cached_experts_more": 1}, "which is missing"),
        ({**GROUP, "decode": "host", "later_experts": 8.1}, "less than or equal to 8"),
        ({**GROUP, "decode": "host", "later_experts": -0.1}, "greater than or equal to 0"),
        ({**GROUP, "decode": "host", "later_experts": "few"}, "should be a valid number"),
        ({**GROUP, "later_experts": 0.5}, "found later_experts: 0.5 with decode: uva and 2 cached"),
        (
            {**GROUP, "cached_experts": None, "decode": "host", "later_experts": 1},
            "found later_experts: 1 with decode: host and no cached_experts: the link brings",
        ),
        (
            {**GROUP, "decode": "host", "host_share": 0.5, "split_expert": True},
            "found host_share and split_expert: .* divide .* by their rates now.* offplan replan",
        ),
        ({**GROUP, "decode": "host", "host_share": 1}, "found host_share: cores and link"),
    ],
)
def test_rules_that_cannot_keep_experts(fields: dict[str, object], message: str) -> None:
    usual: dict[str, object] = {"prefill": "uva", "decode": "uva", "cached_experts": 2}
    with pytest.raises(ValueError, match=message):
        Rule.model_validate({**usual, **fields})


def test_experts_are_kept_out_of_host_memory_alone() -> None:
    keeps = {"prefill": "prefetch", "decode": "uva", "cached_experts": 2, **GROUP}
    with pytest.raises(ValueError, match=r"rule 1 has cached_experts.*expected `store: host`"):
        Offload.model_validate({"prefill_chunk": 8, "store": "peer", "rules": [keeps]})


def test_what_a_rule_keeps_is_in_the_file() -> None:
    keeps = rule("mlp", group=(1, 1), prefill=Backend.PREFETCH, decode=Backend.UVA)
    for changed in ({}, {"cached_experts": 48}, {"cached_experts": 48, "cached_experts_more": 3}):
        written = keeps.model_copy(update=changed)
        offload = example_plan.offload.model_copy(update={"rules": (written,)})
        plan = example_plan.model_copy(update={"offload": offload})
        text = dump_plan(plan)
        assert text.count("cached_experts") == len(changed)
        assert parse_plan(yaml.safe_load(text), "a plan").offload == offload


@pytest.mark.parametrize("later", [None, 0.6, 8.0])
def test_what_is_missed_is_divided(later: float | None) -> None:
    keeps = rule("mlp", group=(1, 1), prefill=Backend.PREFETCH, decode=Backend.HOST)
    assert not keeps.divides_missed
    fields = {"cached_experts": 4, "later_experts": later}
    divided = Rule.model_validate(keeps.model_dump(mode="json") | fields)
    assert divided.divides_missed
    offload = example_plan.offload.model_copy(update={"rules": (divided,)})
    text = dump_plan(example_plan.model_copy(update={"offload": offload}))
    assert ("later_experts" in text) == (later is not None)
    assert parse_plan(yaml.safe_load(text), "a plan").offload == offload


def test_packing_takes_the_last_layers_of_each_group() -> None:
    packing = Packing(group_size=3, num_in_group=2)
    assert [packing.selects_layer(index) for index in range(6)] == [False, True, True] * 2
    with pytest.raises(ValueError, match="num_in_group 3 is more than group_size 2"):
        Packing(group_size=2, num_in_group=3)


@pytest.mark.parametrize("backends", [("uva", "uva"), ("prefetch", "uva"), ("uva", "prefetch")])
def test_a_peer_is_not_read_in_place(backends: tuple[str, str]) -> None:
    prefill, decode = map(find_backend, backends)
    data = yaml.safe_load(dump_plan(example_plan))
    in_place = rule("mlp", group=(1, 1), prefill=prefill, decode=decode)
    first = rule("self_attn", group=(1, 1), prefill=Backend.PREFETCH, decode=Backend.PREFETCH)
    data["offload"]["rules"] = [
        each.model_dump(mode="json", exclude_none=True) for each in (first, in_place)
    ]
    data["offload"]["store"] = "peer"
    with pytest.raises(PlanError, match=r"offload: rule 2 is read in place \(uva\)"):
        parse_plan(data, "a plan")


def test_the_store_is_named_where_it_is_not_the_host() -> None:
    assert "store" not in dump_plan(example_plan)
    offload = Offload(prefill_chunk=64, store="peer")
    text = dump_plan(example_plan.model_copy(update={"offload": offload}))
    assert "\n  store: peer\n  rules: []\n" in text


@pytest.mark.parametrize("text", ["", "[]", "offload: {}", "{", "offplan: [1]"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text, "utf-8")
    with pytest.raises(PlanError, match="plan"):
        load_plan(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        load_plan(tmp_path / "none.yaml")


SCHEMA = Draft202012Validator(Plan.model_json_schema())


@pytest.mark.slow
@given(plans())
def test_the_schema_takes_every_plan_that_is_written(plan: Plan) -> None:
    SCHEMA.validate(load_yaml(dump_plan(plan)))


@pytest.mark.parametrize(
    ("written", "edited", "key"),
    [
        ("gpu_memory: 3", "gpu_memory: '3'", "$.budget.gpu_memory"),
        ("gpu_memory: ", "gpu_memory: about ", "$.budget.gpu_memory"),
        ("batch: 1", "batch: 0", "$.workload.batch"),
        ("prefetch_step: ", "prefetch_steps: ", "$.offload"),
        ("objective: latency", "objective: speed", "$.goal.objective"),
    ],
)
def test_the_schema_names_the_key_that_is_wrong(written: str, edited: str, key: str) -> None:
    text = re.sub(
        f"{written}[0-9]*( [A-Z]i?B)?", lambda _: edited, dump_plan(example_plan), count=1
    )
    assert key in {error.json_path for error in SCHEMA.iter_errors(load_yaml(text))}
    with pytest.raises(PlanError, match=re.escape(key.removeprefix("$."))):
        parse_plan(load_yaml(text), "a plan")


def test_nothing_to_offload_is_an_empty_list() -> None:
    budget = Budget(gpu_memory=2**30)
    plan = make_plan(pose(dense_model(2), make_machine(), WORKLOAD, budget)).plan
    assert "rules: []" in dump_plan(plan)


@pytest.mark.parametrize(
    ("change", "is_drift"),
    [
        ({"num_experts_per_tok": 1}, True),
        ({"rope_theta": 1.0}, True),
        ({"transformers_version": "9"}, False),
        ({"_name_or_path": "elsewhere"}, False),
    ],
)
def test_an_edited_config_is_drift(
    tmp_path: Path, change: dict[str, object], is_drift: bool
) -> None:
    plans = Path(__file__).parents[1] / "plans"
    copy = shutil.copytree(plans / "tiny-moe", tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    plan = load_plan(plans / "tiny-moe.yaml")
    with pytest.raises(DriftError, match="for config") if is_drift else nullcontext():
        open_planned_model(plan, str(copy))


def test_what_takes_everything_is_written_as_all() -> None:
    text = (ROOT / "plans" / "qwen3-8b-h200-8gib.yaml").read_text("utf-8")
    assert "packing: {cpu_offload_params: all, group_size: 1" in text
    rule = "{cpu_offload_params: all, group_size: 2, num_in_group: 1, prefill: prefetch, "
    text = re.sub(r"    - .*", f"    - {rule}decode: prefetch}}", text)
    plan = parse_plan(load_yaml(text), "plan")
    assert plan.offload.rules[0].cpu_offload_params == ()
    assert rule in dump_plan(plan)
    assert plan.model_dump(mode="json")["offload"]["packing"]["cpu_offload_params"] == []
    # as it was written before
    assert parse_plan(load_yaml(text.replace(": all,", ": [],")), "plan") == plan
    with pytest.raises(PlanError, match="should be a list of segments, or all"):
        parse_plan(load_yaml(text.replace(": all,", ": every,")), "plan")


def test_located_paths_are_plain(tmp_path: Path) -> None:
    """A path has no ``..`` but where the path without is another file's."""
    plan = load_plan(ROOT / "plans" / "tiny-moe.yaml")
    plan._file = tmp_path / "plans" / "here" / "plan.yaml"
    assert plan.locate("../../models/a") == str(tmp_path / "models" / "a")
    assert plan.locate("/models/b") == "/models/b"
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "plans" / "here").mkdir(parents=True)
    (tmp_path / "plans" / "here" / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    assert plan.locate("link/../c") == str(tmp_path / "plans" / "here" / "link" / ".." / "c")
