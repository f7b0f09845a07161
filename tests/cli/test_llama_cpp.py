"""``offplan bench --vs llama.cpp`` with a program that stands in for llama.cpp's own."""

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("gguf")

import torch

from offplan.checkpoint.gguf.read import read_header
from offplan.checkpoint.gguf.split import Split, choose_split
from offplan.checkpoint.open import open_model
from offplan.errors import InputError
from offplan.library import llama_bench as llama
from offplan.plan import Budget
from offplan.runtime.measuring.bench import Bench
from tests.checkpoint.gguf_files import VOCABULARY, WIDTH, write_llama
from tests.cli import CLI

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "hidden_size": WIDTH,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}
QUICK = ("--device", "cpu", "--steps", 3, "--repeats", 1, "--dummy-weights")
FAKE = """\
#!{python}
import json, sys
arguments = sys.argv[1:]
with open({argv!r}, "a") as file:
    file.write(json.dumps(arguments) + "\\n")
value = lambda name: arguments[arguments.index(name) + 1]
rows = []
for depth in map(int, value("-d").split(",")):
    for prompt, steps, ns in ((int(value("-p")), 0, 7_000_000), (0, int(value("-n")), 9_000_000)):
        if not prompt + steps:
            continue
        rows.append({{
            "build_commit": "8cf427ff", "build_number": 5163, "cpu_info": "a CPU",
            "gpu_info": "", "backends": "CPU", "model_filename": value("-m"),
            "model_type": "llama ?B Q4_K - Medium", "model_size": 1, "model_n_params": 1,
            "n_batch": 2048, "n_ubatch": 512, "n_threads": 8, "n_gpu_layers": int(value("-ngl")),
            "flash_attn": True, "n_prompt": prompt, "n_gen": steps, "n_depth": depth,
            "test_time": "2026-10-24T11:58:50Z", "avg_ns": ns, "stddev_ns": 0, "avg_ts": 1.0,
            "stddev_ts": 0.0, "samples_ns": [ns + depth, ns + depth + 2], "samples_ts": [1.0, 1.0],
        }})
print(json.dumps(rows))
"""


def make_program(folder: Path, text: str = FAKE) -> Path:
    path = folder / "llama-bench"
    path.write_text(text.format(python=sys.executable, argv=str(folder / "argv")))
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder / "model.gguf")
    write_llama(folder / "other.gguf", num_experts=4)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def plan(model: Path, cli: CLI) -> Path:
    path = model / "plan.yaml"
    if not path.exists():
        asked = ("--machine", "cpu", "--prompt-tokens", 16, "--output-tokens", 8, "--context", 64)
        code, _, err = cli("plan", model / "config.json", *asked, "-o", path)
        assert code == 0, err
    return path


@pytest.mark.slow
def test_both_are_measured_and_shown(cli: CLI, plan: Path, tmp_path: Path) -> None:
    gguf, program = plan.with_name("model.gguf"), make_program(tmp_path)
    asked = ("--vs", "llama.cpp", "--gguf", gguf, "--llama-bench", program)
    code, out, err = cli("bench", plan, *QUICK, *asked, "--json")
    assert code == 0, err
    way = json.loads(out)["vs"]["llama.cpp"]
    assert way["prefill"]["step_min_s"] == pytest.approx(7e-3)
    # steps behind the plan's prompt of 16 tokens
    assert way["decode"]["step_s"] == pytest.approx((9_000_000 + 17) * 1e-9 / 3)
    steps, prompt = map(json.loads, (tmp_path / "argv").read_text().splitlines())
    told = f"-m {gguf} -o json -r 1 -ngl 0 -ub 512 -fa 1"
    assert steps == shlex.split(f"{told} -p 0 -n 3 -d 16")
    assert prompt == shlex.split(f"{told} -p 16 -n 0 -d 0")
    commands = ", ".join(f"`{program} {shlex.join(each)}`" for each in (prompt, steps))
    assert way["told"] == f"build 5163 (8cf427ff), CPU, 8 threads: {commands}"
    out = cli("bench", plan, *QUICK, *asked[2:]).out
    assert "\nllama.cpp " in out
    assert "llama.cpp: build 5163 (8cf427ff)" in " ".join(out.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('| model | size |')", "expected JSON with 3 steps behind 16 tokens"),
        ("print('[]')", "no such test"),
        ("import sys; sys.exit('error: failed to load model')", "1: error: failed to load model"),
    ],
)
def test_what_it_prints_is_not_understood(
    cli: CLI, plan: Path, tmp_path: Path, program: str, message: str
) -> None:
    fake = make_program(tmp_path, f"#!{{python}}\n{program}\n")
    asked = ("--gguf", plan.with_name("model.gguf"), "--llama-bench", fake)
    code, out, err = cli("bench", plan, *QUICK, *asked, "--json")
    assert code == 0, err
    assert message in json.loads(out)["vs"]["llama.cpp"]["why_not"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((), "name a GGUF file of the plan's model for llama.cpp: --gguf FILE"),
        (("--gguf", "none.gguf"), "none.gguf: found no such file, expected a GGUF file of"),
        (("--gguf", "config.json"), "config.json: found another kind of file"),
        (("--gguf", "other.gguf"), "other.gguf: found GGUF, llama, 2 layers, 3"),
        (("--gguf", "model.gguf", "--llama-bench", "none"), "none: found no such program"),
        (("--gguf", "model.gguf", "--llama-bench", ""), "not on PATH: --llama-bench FILE"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_measured(
    cli: CLI, plan: Path, tmp_path: Path, asked: tuple[Any, ...], message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(plan.parent)
    program = () if "--llama-bench" in asked else ("--llama-bench", make_program(tmp_path))
    code, out, err = cli("bench", plan, *QUICK, "--vs", "llama.cpp", *asked, *program)
    assert (code, out) == (2, "")
    assert message in err


def test_the_most_lies_on_the_gpu_that_fits(model: Path) -> None:
    dense = read_header(model / "model.gguf", "")
    sizes = {tensor.name: tensor.nbytes for tensor in dense.tensors}
    output = sizes["output.weight"] + sizes["output_norm.weight"]
    layer = sum(size for name, size in sizes.items() if name.startswith("blk.1."))
    cache = [1000, 1000]
    assert choose_split(dense, cache, 10**9) == Split(3, 0, output + 2 * (layer + 1000), 2000)
    assert choose_split(dense, cache, output + 2 * layer) == Split(
        2, 0, output + layer + 1000, 1000
    )
    assert choose_split(dense, cache, output) == Split(1, 0, output, 0)
    assert choose_split(dense, cache, output - 1).options == ("-ngl", "0")
    # llama.cpp counts a layer behind the last one that predicts further tokens
    more = {"llama.block_count": 3, "llama.nextn_predict_layers": 1}
    predicting = dense._replace(metadata={**dense.metadata, **more})
    for room in (10**9, output + 2 * layer, output):
        number, *rest = choose_split(dense, cache, room)
        assert choose_split(predicting, cache, room) == (number + 1, *rest)
    experts = read_header(model / "other.gguf", "")
    splits = [choose_split(experts, cache, room) for room in range(0, 3_000_000, 10_000)]
    assert list(dict.fromkeys(each.options for each in splits)) == [
        ("-ngl", "0"),
        ("-ngl", "1", "-ncmoe", "2"),
        ("-ngl", "2", "-ncmoe", "2"),
        ("-ngl", "3", "-ncmoe", "2"),
        ("-ngl", "3", "-ncmoe", "1"),
        ("-ngl", "3"),
    ]


def test_a_short_run_measures_what_is_taken_beside(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU whose card says what each run took: 5,000 bytes more than weights and cache."""
    header = read_header(model / "model.gguf", "")
    whole = choose_split(header, [1000, 1000], 10**9)
    one_less = choose_split(header, [1000, 1000], whole.gpu_bytes - 1)
    program, argv = make_program(tmp_path), tmp_path / "argv"

    def run(room: int) -> list[str]:
        argv.write_text("")
        budget = whole.gpu_bytes + room
        bench = llama.LlamaBench(str(program), model, header, budget, (1000, 1000), 2048)
        setup = Bench(
            *(None, None, 19, torch.device("cuda"), None, torch.zeros(1, 16), 3, 2, 0)  # type: ignore[arg-type]
        )
        bench.measure(setup, lambda _: lambda *_: None)
        return [" ".join(json.loads(line)) for line in argv.read_text().splitlines()]

    def watch(command: tuple[str, ...], _: object) -> tuple[str, int]:
        ngl = int(command[command.index("-ngl") + 1])
        placed = {3: whole, 2: one_less}.get(ngl, Split(0, 0, 0, 0))
        return real(command, torch.device("cpu"))[0], placed.gpu_bytes + 5000

    real = llama._run_watched
    monkeypatch.setattr(llama, "_run_watched", watch)
    monkeypatch.setattr(llama, "return_memory", lambda _: None)
    first, steps, prompt = run(5000)
    assert first.endswith("-r 1 -ngl 0 -ub 2048 -fa 1 -p 0 -n 3 -d 16")
    assert steps.endswith("-r 2 -ngl 3 -ub 2048 -fa 1 -p 0 -n 3 -d 16")
    assert prompt.endswith("-r 2 -ngl 3 -ub 2048 -fa 1 -p 16 -n 0 -d 0")
    first, steps, prompt = run(4999)
    assert "-ngl 2" in steps
    assert "-ngl 2" in prompt


def test_a_program_and_a_file_are_found(model: Path, tmp_path: Path) -> None:
    found = open_model(str(model / "config.json"))
    workload = SimpleNamespace(batch=1, context=64)
    plan: Any = SimpleNamespace(
        workload=workload, model=SimpleNamespace(source="a/b"), budget=Budget(gpu_memory=2**30),
        offload=SimpleNamespace(prefill_chunk=1024),
    )  # fmt: skip
    program, file = make_program(tmp_path), model / "model.gguf"
    bench = llama.find_llama_bench(plan, found, file, program)
    assert (bench.program, bench.file, bench.budget_bytes) == (str(program), file, 2**30)
    assert bench.cache_bytes == tuple(each.kv_cache.nbytes(1, 64) for each in found.layers)
    assert bench.part_tokens == 1024
    assert bench._logits_bytes() == 512 * VOCABULARY * 4
    for chunk, part in ((32, 512), (8192, 2048)):
        plan.offload.prefill_chunk = chunk
        assert llama.find_llama_bench(plan, found, file, program).part_tokens == part
    for wrong, message in (
        ((None, program), "name a GGUF file"),
        ((model / "config.json", program), "found another kind of file, expected a GGUF file"),
        ((model / "other.gguf", program), "name a GGUF file of that model"),
        ((file, tmp_path / "none"), "found no such program"),
    ):
        with pytest.raises(InputError, match=message):
            llama.find_llama_bench(plan, found, *wrong)
    workload.batch = 4
    with pytest.raises(InputError, match="llama-bench measures one sequence"):
        llama.find_llama_bench(plan, found, file, program)
