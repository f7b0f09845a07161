"""A checkpoint's own Python code runs where the command line grants it, and nowhere else."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.hub_server import COMMIT, REPO, Hub, start
from tests.cli import CLI, TINY_MOE, Finished
from tests.serve import END, TEMPLATE
from tests.warm import COMMAND, TORCH, Warm

CONFIG = """
from transformers import PreTrainedConfig

from .sizes import WIDTH


class OwnConfig(PreTrainedConfig):
    model_type = "tiny_own"

    def __init__(self, num_hidden_layers=4, hidden_size=WIDTH, vocab_size=64, **others):
        self.num_hidden_layers, self.hidden_size = num_hidden_layers, hidden_size
        self.vocab_size = vocab_size
        super().__init__(**others)
"""
MODEL = '''
import os
from pathlib import Path

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_own import OwnConfig

if "CODE_RAN" in os.environ:
    Path(os.environ["CODE_RAN"]).touch()


class Block(nn.Module):
    """One head that attends to what came before, by its own formula."""

    def __init__(self, config, index):
        super().__init__()
        self.index, width = index, config.hidden_size
        self.joined, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, cache):
        query, key, value = self.joined(x)[:, None].chunk(3, -1)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        num, seen = query.shape[2], key.shape[2]
        mask = torch.ones(num, seen, dtype=torch.bool, device=x.device).tril(seen - num)
        scores = (query @ key.mT / x.shape[-1]).tanh().masked_fill(~mask, -torch.inf)
        return x + self.out((scores.softmax(-1) @ value)[:, 0])


class OwnForCausalLM(PreTrainedModel, GenerationMixin):
    config_class, base_model_prefix, _no_split_modules = OwnConfig, "", ["Block"]

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, past_key_values=None, use_cache=True, **others):
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        x = self.embed_tokens(input_ids)
        for block in self.blocks:
            x = block(x, past_key_values)
        return CausalLMOutputWithPast(logits=self.lm_head(x), past_key_values=past_key_values)
'''
AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
}
PLAN = (
    *("--machine", "h200-pcie5", "--prompt-tokens", "8", "--output-tokens", "4"),
    *("--context", "32", "--gpu-memory", "1GiB"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("own"))


def write_checkpoint(folder: Path, *, vocabulary: int = 64, **changes: Any) -> Path:
    width = 32
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("embed_tokens.weight", "lm_head.weight"), (vocabulary, width)
    )
    for index in range(4):
        shapes |= {
            f"blocks.{index}.joined.weight": (3 * width, width),
            f"blocks.{index}.joined.bias": (3 * width,),
            f"blocks.{index}.out.weight": (width, width),
            f"blocks.{index}.out.bias": (width,),
        }
    tensors = {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    sizes = {"num_hidden_layers": 4, "hidden_size": width, "vocab_size": vocabulary}
    config = {
        "model_type": "tiny_own",
        "dtype": "float32",
        **sizes,
        "auto_map": AUTO_MAP,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "sizes.py").write_text(f"WIDTH = {width}\n")
    (folder / "configuration_own.py").write_text(CONFIG)
    (folder / "modeling_own.py").write_text(MODEL)
    return folder


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    hub = Hub({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})
    server = start(hub)
    yield hub
    hub.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def forget_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Forget the code that was imported: as in a process of its own, it runs when it is needed."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)

    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
            del sys.modules[name]

    forget()
    yield forget
    forget()


def offplan(home: Path, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """Call ``offplan`` with a home of its own; ``ran`` in it tells that the code has run."""
    command = [sys.executable, "-c", COMMAND, *map(str, arguments)]
    return subprocess.run(
        command, env=make_environment(home), input="", capture_output=True, text=True, timeout=300
    )


@contextmanager
def many_times(home: Path, **env: str) -> Iterator[Callable[..., Any]]:
    """Call ``offplan`` with a home of its own as often as you like: torch is imported once."""
    with closing(Warm(TORCH, make_environment(home, **env))) as warm:
        yield partial(warm.run, COMMAND)


def make_environment(home: Path, **env: str) -> dict[str, str]:
    environment = {key: v for key, v in os.environ.items() if not key.startswith("HF_")}
    environment |= {
        "HF_HOME": str(home),
        "XDG_CACHE_HOME": str(home),
        "CODE_RAN": str(home / "ran"),
    }
    environment |= {"NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1", **env}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return environment


REFUSAL = "names code of its own, 'modeling_own.OwnForCausalLM'"


@pytest.mark.slow
def test_code_in_a_folder_runs_where_the_command_line_grants_it(
    folder: Path, tmp_path: Path
) -> None:
    plan, ran = tmp_path / "plan.yaml", tmp_path / "ran"
    asked = ("plan", folder, *PLAN, "-o", plan)
    # no variable of the environment grants it
    env = {"TRUST_REMOTE_CODE": "1", "OFFPLAN_TRUST_REMOTE_CODE": "1", "HF_TRUST_REMOTE_CODE": "1"}
    with many_times(tmp_path, **env) as call:
        refused = call(*asked)
        assert REFUSAL in refused.stderr
        assert "--trust-remote-code" in refused.stderr
        assert not ran.exists()
        # from a start, as planning then asks a process of its own, which is to be granted it too
        granted = offplan(tmp_path, *asked, "--force", "--trust-remote-code")
        assert granted.returncode == 0, granted.stderr
        assert ran.exists()
        assert "stock: true" in plan.read_text()
        ran.unlink()
        # nor does the plan's file
        run = ("run", plan, "--device", "cpu", "--json")
        refused = call(*run)
        assert refused.returncode == 2
        assert REFUSAL in refused.stderr
        assert not ran.exists()
        granted = call(*run, "--trust-remote-code", given=b"hello\n/exit\n")
        assert granted.returncode == 0, granted.stderr
        assert json.loads(granted.stdout)["way"] == "stock"


@pytest.mark.slow
def test_commands_for_a_plan_run_code_where_they_are_granted_it(
    cli: CLI,
    warm: Warm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forget_code: Callable[[], None],
) -> None:
    for name in ("CODE_RAN", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, make_environment(tmp_path)[name])
    monkeypatch.setenv("TRUST_REMOTE_CODE", "1")
    # processes that count what transformers' own passes take
    monkeypatch.setattr("offplan.held.stock.subprocess", warm.as_subprocess())

    def call(*arguments: object) -> Finished:
        forget_code()
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/exit\n"))
        return cli(*arguments)

    own, plan, ran = tmp_path / "own", tmp_path / "plan.yaml", tmp_path / "ran"
    shutil.copytree(TINY_MOE, own, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    (own / "chat_template.jinja").write_text(TEMPLATE)
    write_checkpoint(own, vocabulary=END + 1)
    grant, cpu = "--trust-remote-code", ("--device", "cpu")
    assert call("plan", own, *PLAN, "-o", plan, grant).code == 0
    serve = ("serve", plan, *cpu, "--port", "0")
    chat = ("chat", plan, *cpu, "--max-new-tokens", "2")
    for command in (("replan", plan), chat):
        ran.unlink(missing_ok=True)
        refused = call(*command)
        assert (refused.code, REFUSAL in refused.err) == (2, True), refused.err
        assert not ran.exists()
    again = call("replan", plan, grant)
    assert again.out == plan.read_text(), again.err
    ran.unlink(missing_ok=True)
    talked = call(*chat, grant)
    assert (talked.code, ran.exists()) == (0, True), talked.err
    assert "made 2" in talked.err
    ran.unlink()
    unserved = warm.run(
        COMMAND, *serve, environment=make_environment(tmp_path, TRUST_REMOTE_CODE="1")
    )
    assert (unserved.returncode, REFUSAL in unserved.stderr) == (2, True), unserved.stderr
    assert not ran.exists()
    with warm.open(COMMAND, *serve, grant, environment=make_environment(tmp_path)) as process:
        assert process.stderr is not None
        assert any("own is served at http://" in line for line in process.stderr)
        assert ran.exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


@pytest.mark.slow
def test_code_on_the_hub_is_that_of_the_commit(hub: Hub, tmp_path: Path) -> None:
    plan, ran = tmp_path / "plan.yaml", tmp_path / "ran"
    grant = "--trust-remote-code"
    with many_times(tmp_path, HF_ENDPOINT=hub.url) as call:
        refused = call("plan", REPO, *PLAN, "-o", plan)
        assert REFUSAL in refused.stderr
        assert not [name for _, name, _ in hub.requests if name.endswith(".py")]
        assert not hub.shard_gets() or not ran.exists()
        granted = call("plan", REPO, *PLAN, "-o", plan, "--force", grant)
        assert granted.returncode == 0, granted.stderr
        assert COMMIT in plan.read_text()
        hub.files["modeling_own.py"] = b"raise SystemError('another commit')"
        done = call("run", plan, "--device", "cpu", grant, given=b"hello\n/exit\n")
        assert done.returncode == 0, done.stderr


def test_code_gives_the_same_bits_with_every_second_layer_offloaded(
    folder: Path, forget_code: Callable[[], None]
) -> None:
    from transformers import AutoModelForCausalLM

    from offplan.capabilities.stock import STOCK
    from offplan.checkpoint.open import open_model
    from offplan.runtime.session import Session
    from tests.runtime.families import PROMPT, extend, run_stock
    from tests.runtime.plans import CONTEXT, LateLink, group, offload

    stock = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    )
    expected, whole = (run_stock(stock, PROMPT, cached=cached) for cached in (True, False))
    # transformers 5.24 hands code that takes past_key_values no cache, and its own text goes wrong
    keeps = all(map(partial(torch.allclose, atol=1e-3), expected, whole))
    expected = expected if keeps else whole
    tokens = extend(PROMPT, expected)[:, PROMPT.shape[1] :]
    model = open_model(folder, trust_remote_code=True)
    decision, made = offload(group(2, 1), prefetch_step=1), []
    session = Session(
        model,
        decision,
        context=CONTEXT,
        device="cpu",
        folder=folder,
        way=STOCK,
        wrap_link=LateLink,
    )
    with session, session.stream():
        made = [session.prefill(PROMPT).clone()]
        made += [session.decode(token).clone() for token in tokens.split(1, 1)]
    for ours, theirs in zip(made, expected, strict=True):
        near = 0.0 if keeps else 1e-3
        torch.testing.assert_close(ours, theirs, atol=near, rtol=0.0)


def test_code_of_another_repository_is_refused(tmp_path: Path) -> None:
    from offplan.checkpoint.open import open_model
    from offplan.errors import CheckpointError
    from offplan.runtime.stock.skeleton import build_stock

    named = {key: f"someone/else--{name}" for key, name in AUTO_MAP.items()}
    folder = write_checkpoint(tmp_path, auto_map=named)
    with pytest.raises(CheckpointError, match="code of another repository"):
        build_stock(open_model(folder, trust_remote_code=True))


def test_a_fingerprint_follows_the_code(tmp_path: Path) -> None:
    from offplan.checkpoint.open import open_model

    folder = write_checkpoint(tmp_path)
    assert open_model(folder).code is None
    before = open_model(folder, trust_remote_code=True).code
    (folder / "sizes.py").write_text("WIDTH = 32  # as before\n")
    assert before != open_model(folder, trust_remote_code=True).code
    assert load_file(folder / "model.safetensors")
