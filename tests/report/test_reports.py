"""Reports of a fixed plan, so that they change only when the report does."""

from collections.abc import Mapping

import pytest

from offplan.costs.floor import Floor
from offplan.plan import Goal, Plan, parse_plan
from offplan.planner.find import PlanResult
from offplan.report.payload import run_payload
from offplan.report.plan import describe_offload, render_plan
from offplan.report.run import RunResult, render_run
from offplan.runtime.generate import Measured
from tests.rendering import show

GIB = 2**30


def make_plan(*rules: Mapping[str, object]) -> Plan:
    prefill = {"step": 0.31, "compute": 0.012, "link": 0.3, "stall": 0.298, "bound": 0.3}
    decode = {"step": 0.034, "compute": 0.005, "link": 0.029, "stall": 0.029, "bound": 0.029}
    memory = {"resident": 14, "ring": 1, "kv_cache": 0.5, "activations": 0.1, "overhead": 0.4}
    terms = {name: round(value * GIB) for name, value in memory.items()}
    return parse_plan(
        {
            "offplan": 1,
            "model": {"source": "me/model", "headers_sha256": "0", "dtype": "bfloat16"},
            "workload": {},
            "budget": {"gpu_memory": "16 GiB"},
            "machine": {
                "name": "NVIDIA H200",
                "link": "PCIe 5 x16",
                "h2d": "55.4 GB/s",
                "uva": "51 GB/s",
                "basis": "measured",
                "fingerprint": "0",
            },
            "offload": {"prefetch_step": 2, "prefill_chunk": 512, "rules": list(rules)},
            "prediction": {
                "objective": 4.7,
                "basis": "estimated",
                "prefill": prefill | {"link_bytes": 15 * GIB},
                "decode": decode | {"link_bytes": round(1.4 * GIB)},
                "gpu_memory": terms | {"total": sum(terms.values())},
                "host_memory": 15 * GIB,
            },
        },
        "plan",
    )


EXPERTS = {"cpu_offload_params": ["experts"], "group_size": 2, "num_in_group": 1}
STREAMED = {**EXPERTS, "prefill": "prefetch", "decode": "prefetch"}
SPLIT = {**EXPERTS, "prefill": "prefetch", "decode": "uva"}
CAPPED = {"max_bytes": "7 GiB", "prefill": "uva", "decode": "uva"}
WHOLE = {"group_size": 1, "num_in_group": 1, "prefill": "prefetch", "decode": "prefetch"}


def test_offload_in_words() -> None:
    chunks = "prompts are read in chunks of 512 tokens"
    ring = "slots in the ring (prefetch_step): 2"
    assert describe_offload(make_plan()) == [
        "everything fits the GPU; nothing is offloaded",
        chunks,
    ]
    assert describe_offload(make_plan(CAPPED)) == [
        "on the host: all parameters from layer 0 on, up to 7 GiB (prefill uva, decode uva)",
        chunks,
    ]
    assert describe_offload(make_plan(SPLIT, WHOLE)) == [
        "on the host: experts of every 2nd layer (prefill prefetch, decode uva)",
        "on the host: all parameters of every layer (prefill prefetch, decode prefetch)",
        ring,
        chunks,
    ]


@pytest.mark.parametrize(
    ("last", "group", "told"),
    [
        (1, 1, "of every layer"),
        (1, 10, "of every 10th layer"),
        (1, 11, "of every 11th layer"),
        (1, 23, "of every 23rd layer"),
        (6, 7, "of the last 6 in each 7 layers"),
    ],
)
def test_layers_in_words(last: int, group: int, told: str) -> None:
    rule = {**SPLIT, "group_size": group, "num_in_group": last}
    assert f"experts {told} (" in describe_offload(make_plan(rule))[0]


def test_a_second_gpu_in_words() -> None:
    plan = make_plan(WHOLE)
    on_peer = plan.offload.model_copy(update={"store": "peer"})
    lines = describe_offload(plan.model_copy(update={"offload": on_peer}))
    assert lines[0].startswith("on the second GPU: all parameters of every layer")


def test_an_embedding_on_the_host_in_words() -> None:
    plan = make_plan()
    on_host = plan.offload.model_copy(update={"embeddings": "host"})
    lines = describe_offload(plan.model_copy(update={"offload": on_host}))
    assert lines[0] == "on the host: embeddings, read by row"


PLAN = """\
Plan:
  on the host: experts of every 2nd layer (prefill prefetch, decode uva)
  slots in the ring (prefetch_step): 2
  prompts are read in chunks of 512 tokens
Why (estimated):
  at least 15 GiB of weights do not fit 16 GiB beside KV cache, activations and
  overhead; the plan keeps 15 GiB on the host
  9 plans of one rule fit; 2 plans were priced, and no estimate of another is
  better
  no faster plan of up to two rules was found
  prefill is link-bound: 12 ms of compute, 300 ms of link, 310 ms in all
  decode is link-bound: 5 ms of compute, 29 ms of link, 34 ms in all
  a prompt needs all of experts and copies it; a decode step reads its part in
  place

Memory
term                 bytes
──────────────────────────
weights             14 GiB
ring                 1 GiB
KV cache           512 MiB
activations      102.4 MiB
overhead         409.6 MiB
GPU, of 16 GiB      16 GiB
host                15 GiB

Prediction (estimated)
figure          prefill of 512   decode, a token
────────────────────────────────────────────────
step                    310 ms             34 ms
compute                  12 ms              5 ms
link                    300 ms             29 ms
stall                   298 ms             29 ms
bound                   300 ms             29 ms
floor                   280 ms             27 ms
over the link           15 GiB           1.4 GiB

A request takes 4.7 s, estimated: 29.41 tokens/s in decode.
Bound of its bytes 3.983 s (x1.180); floor of any plan 3.7 s (x1.270); all
estimated.
"""


def test_plan() -> None:
    floor = Floor(15 * GIB, GIB, 15 * GIB, decode_s=0.027, prefill_s=0.28, objective_s=3.7)
    plan = make_plan(SPLIT)
    result = PlanResult(plan, plan.prediction.objective_s, 9, 2, 1.0, 2, floor)
    assert show(*render_plan(result)) == PLAN


MEASURED = Measured(0.341, [0.0343] * 127, 15 * GIB, round(1.4 * GIB), num_decodes=1)


def make_result(**changes: object) -> RunResult:
    values: dict[str, object] = {
        "device": "NVIDIA H200",
        "batch": 1,
        "prompt_tokens": 512,
        "gpu_bytes": 15 * GIB,
        "measured": MEASURED,
    }
    return RunResult(**(values | changes))  # type: ignore[arg-type]


RUN = """\
Predicted and measured
what                     predicted   measured   ratio
─────────────────────────────────────────────────────
time to first token         310 ms     341 ms   1.100
time per token               34 ms    34.3 ms   1.009
GPU memory                  16 GiB     15 GiB   0.938
over the link, prompt       15 GiB     15 GiB   1.000
over the link, a token     1.4 GiB    1.4 GiB   1.000

Predicted with estimated times of the layers.
"""

RUN_ELSEWHERE = """\
Predicted and measured
what                     predicted   measured   ratio
─────────────────────────────────────────────────────
time to first token         310 ms     31.3 s     101
time per token               34 ms          -       -
GPU memory                  16 GiB          -       -
over the link, prompt       15 GiB     15 GiB   1.000
over the link, a token     1.4 GiB          -       -

Predicted with estimated times of the layers.
Predicted for NVIDIA H200; ran on CPU.
Predicted for batch 1 and a prompt of 512; ran with batch 1 and a prompt of 7.
What kernels read in place over the link cannot be counted.
"""


def test_run() -> None:
    assert show(render_run(make_plan(STREAMED), make_result())).strip() == RUN.strip()
    said = "Of the experts that a layer misses the host's cores multiply 1 of 1."
    shown = show(render_run(make_plan(STREAMED), make_result(settled=[said])))
    assert said in " ".join(shown.split())


def test_run_elsewhere_says_what_differs() -> None:
    measured = Measured(31.3, prefill_link_bytes=15 * GIB)
    result = make_result(device="CPU", prompt_tokens=7, gpu_bytes=None, measured=measured)
    assert show(render_run(make_plan(SPLIT), result)) == RUN_ELSEWHERE


def test_run_json() -> None:
    payload = run_payload(make_plan(STREAMED), make_result(), [])
    assert (payload["output_tokens"], payload["text"], payload["texts"]) == (128, None, [])
    assert payload["predicted"]["decode"]["step_s"] == 0.034
    assert payload["measured"] == {
        "decode": {"step_s": 0.0343, "link_bytes": round(1.4 * GIB)},
        "prefill": {"step_s": 0.341, "link_bytes": 15 * GIB},
        "gpu_memory": {"total_bytes": 15 * GIB},
    }


def test_run_of_an_engines_plan_says_so() -> None:
    plan = make_plan(STREAMED)
    plan = plan.model_copy(update={"goal": Goal(engine="vllm")})
    told = "Predicted as vllm runs it, the plan's profile not being here; ran by offplan's own"
    assert told in " ".join(show(render_run(plan, make_result())).split())
