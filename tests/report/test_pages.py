"""``offplan report``: pages that stand alone, and tables on terminals of any width."""

import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from offplan.plan import load_plan
from offplan.report.pictures.canvas import STYLE
from offplan.report.pictures.frontier import list_ticks
from offplan.report.portrait import MARGIN, WIDTH
from offplan.report.trace import NUM_STEPS
from tests.cli import CLI, ROOT
from tests.tiers import first_quick

PLAN = ROOT / "plans" / "tiny-moe.yaml"
VOID = {"meta"}
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
TINY = "plans/tiny-moe --machine cpu --gpu-memory 1MiB --prompt-tokens 32 --context 256"


class Page(HTMLParser):
    """Reads a page strictly: every tag that is opened is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: dict[str, set[str]] = {}
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def write_bench(path: Path, **changes: Any) -> Path:
    """Write what ``bench --json`` would print where everything takes twice the prediction."""
    plan = load_plan(PLAN)
    prediction = plan.prediction.model_dump(mode="json")
    predicted = {key: prediction[key] for key in ("decode", "prefill", "gpu_memory")}
    measured: dict[str, Any] = json.loads(json.dumps(predicted))
    for phase in ("decode", "prefill"):
        measured[phase]["step_s"] *= 2
    measured["gpu_memory"]["total_bytes"] = None
    facts = {"offplan": 1, "device": "CPU", "batch": 1, "prompt_tokens": 32, "vs": {}}
    decision = {
        "headers_sha256": plan.model.headers_sha256,
        "offload": plan.offload.model_dump(mode="json"),
    }
    facts |= {"plan": decision, "runtime": {"predicted": "offplan", "measured": "offplan"}}
    path.write_text(json.dumps({**facts, "predicted": predicted, "measured": measured, **changes}))
    return path


def report(cli: CLI, folder: Path, *arguments: object) -> str:
    path = folder / "report.html"
    code, out, err = cli("report", *arguments, "-o", path)
    assert (code, out) == (0, ""), err
    return path.read_text("utf-8")


@pytest.mark.slow
def test_a_page_stands_alone(cli: CLI, tmp_path: Path) -> None:
    text = report(cli, tmp_path, PLAN, "--bench", write_bench(tmp_path / "bench.json"))
    page = Page(text)
    told = " ".join(" ".join(page.texts).split())
    for heading in ("Layers", "Memory", "A prompt of 32 tokens", "A decode step", "more memory"):
        assert heading in told
    assert "A token 2.427 ms, measured 4.854 ms (x 2.000)" in told
    assert "GPU memory" not in page.texts  # nobody measured it
    assert not page.tags & {"script", "link", "img", "image", "iframe", "use", "a", "base"}
    assert not page.attributes.keys() & {"src", "href", "xlink:href", "srcset", "action"}
    assert set(re.findall(r"https?:[^\s\"]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


MEASURE = """\
<iframe id="page" width="%d" height="900"></iframe><pre id="found"></pre><script>
const page = document.getElementById("page");
page.onload = () => {
  const inside = page.contentDocument;
  const edges = [...inside.querySelectorAll("h1, h2, p, rect, text")]
    .map(each => [each.getBoundingClientRect().right, each.textContent])
    .sort((one, other) => other[0] - one[0]);
  const shown = page.contentWindow.getComputedStyle(inside.body).backgroundColor;
  document.getElementById("found").textContent = JSON.stringify([...edges[0], shown]);
};
page.srcdoc = %s;
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize(
    ("width", "scheme", "page"),
    [
        (360, 1, "rgb(255, 255, 255)"),
        (360, 0, "rgb(13, 17, 23)"),
        (500, 1, "rgb(255, 255, 255)"),
        (1200, 0, "rgb(13, 17, 23)"),
    ],
)
def test_a_browser_shows_all_of_a_page(
    cli: CLI, tmp_path: Path, width: int, scheme: int, page: str
) -> None:
    text = report(cli, tmp_path, PLAN, "--bench", write_bench(tmp_path / "bench.json"))
    measure = tmp_path / "measure.html"
    quoted = json.dumps(text).replace("</", "<\\/")
    measure.write_text(MEASURE % (width, quoted), "utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path}", f"--blink-settings=preferredColorScheme={scheme}"]
    done = subprocess.run(
        [*command, measure.as_uri()], capture_output=True, text=True, timeout=100, check=True
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout)
    assert found is not None
    edge, text, background = json.loads(found[1])
    assert edge <= width, text
    assert background == page


OVERLAPS = """\
<div>%s</div><pre id="found"></pre><script>
const texts = [...document.querySelectorAll("text")].filter(each => each.textContent);
const boxes = texts.map(each => each.getBoundingClientRect());
const found = [Math.max(...boxes.map(each => each.right))];
boxes.forEach((a, i) => boxes.forEach((b, j) => {
  if (i < j && a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom)
    found.push(texts[i].textContent + " | " + texts[j].textContent);
}));
document.getElementById("found").textContent = JSON.stringify(found);
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_shows_all_of_the_pictures(cli: CLI, tmp_path: Path) -> None:
    """No text runs out, the longest title included, and none is over another."""
    folder = tmp_path / "a-long-name-of-a-folder-that-somebody-has" / "and-another-one-in-it"
    shutil.copytree(PLAN.parent / "tiny-moe", folder / "tiny-moe")
    plan = shutil.copy(PLAN, folder)
    assert cli("report", plan, "--svg", tmp_path / "plan.svg").code == 0
    page = tmp_path / "page.html"
    page.write_text(OVERLAPS % (tmp_path / "plan.svg").read_text("utf-8"), "utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path}", "--window-size=1600,900", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout)
    assert found is not None
    right, *overlapping = json.loads(found[1])
    assert right <= WIDTH - MARGIN + 8  # the page's own margin
    assert not overlapping


@pytest.mark.slow
def test_the_cores_have_a_lane(cli: CLI, tmp_path: Path) -> None:
    config = ROOT / "tests" / "models" / "deepseek-v2-lite" / "config.json"
    plan, trace = tmp_path / "plan.yaml", tmp_path / "trace.json"
    asked = [config, "--machine", "rtx4090-pcie4", "--gpu-memory", "8GiB", "-o", plan]
    assert cli("plan", *asked).code == 0
    text = report(cli, tmp_path, plan, "--trace", trace)
    told = Page(text).texts
    assert "the host's cores" in told
    assert any(each.startswith("multiplied by the host's cores for tokens: ") for each in told)
    (multiplied,) = (each for each in told if each.startswith("the host's cores multiply "))
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [(e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["cat"] == "multiply"]
    step_ms = sum(took for _, took in spans) / NUM_STEPS / 1000
    assert multiplied == f"the host's cores multiply {step_ms:.4g} ms"
    # one pair of hands: no layer's work begins before the layer's before it has ended
    assert all(a + took <= b + 1e-3 for (a, took), (b, _) in pairwise(spans))
    # one speed
    (rate,) = {told[told.index(each) - 1] for each in told if each.startswith("tokens a second (")}
    assert any(each.startswith(f"{rate} tokens a second, ") for each in told)
    assert f"this plan, 8 GiB: {rate} tokens/s" in told


@pytest.mark.slow
def test_four_figures_come_first(cli: CLI, tmp_path: Path) -> None:
    page = Page(report(cli, tmp_path, PLAN))
    figures = [
        *("fits", "1018 KiB of 1 MiB on the GPU"),
        *("320 to 480", "tokens a second (estimated)"),
        *("2.1 to 3.5 ms", "to the first token"),
        *("96 KiB", "of page-locked host memory"),
    ]
    start = page.texts.index("fits")
    assert [each for each in page.texts[start:] if each.strip()][:8] == figures


def test_a_colour_has_one_meaning() -> None:
    for half in STYLE.split("@media"):
        values = re.findall(r"--(\w+): (#\w+);", half)
        names = {name: value for name, value in values if name not in ("predicted", "measured")}
        names.pop("best")  # drawn as faint text is
        assert len({*names.values()}) == len(names) > 15


def test_the_scale_of_speeds_has_round_ticks() -> None:
    assert list_ticks(4.7, 160.0) == [5, 10, 20, 50, 100]
    assert list_ticks(0.06, 0.3) == [0.1, 0.2]
    assert list_ticks(3.0, 4.0) == [3.0, 4.0]


@pytest.mark.slow
def test_the_pictures_alone(cli: CLI, tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    code, out, err = cli("report", PLAN, "--svg", path)
    assert (code, out, err) == (0, "", f"offplan: wrote {path}\n")
    text = path.read_text("utf-8")
    assert text.startswith("<svg")
    assert "What more memory buys" in text
    assert "to the first token" in text


@pytest.mark.slow
def test_a_page_is_the_same_again(cli: CLI, tmp_path: Path) -> None:
    first = report(cli, tmp_path, PLAN)
    assert report(cli, tmp_path, PLAN, "--force") == first


@pytest.mark.slow
def test_names_are_no_markup(cli: CLI, tmp_path: Path) -> None:
    name = "</title></style><script>alert(1)</script>&amp;"
    profile = (ROOT / "offplan/machine/profiles/cpu.yaml").read_text("utf-8")
    machine = tmp_path / "machine.yaml"
    machine.write_text(profile.replace("name: CPU", f"name: {name!r}"), "utf-8")
    page = Page(report(cli, tmp_path, PLAN, "--machine", machine))
    assert "script" not in page.tags
    assert name in " ".join(page.texts)


def test_what_is_not_known_is_not_drawn(cli: CLI, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    text = PLAN.read_text("utf-8").replace("source: tiny-moe", f"source: {PLAN.parent}/tiny-moe")
    plan.write_text(text.replace("profile: cpu", "profile: null"), "utf-8")
    told = " ".join(Page(report(cli, tmp_path, plan)).texts)
    assert "Neither time nor frontier is shown" in told
    assert "Memory" in told
    assert "A decode step" not in told


def test_a_smaller_machine_is_told(cli: CLI, tmp_path: Path) -> None:
    profile = (ROOT / "offplan/machine/profiles/cpu.yaml").read_text("utf-8")
    machine = tmp_path / "machine.yaml"
    machine.write_text(profile.replace("value: 4 GiB", "value: 200 KiB"), "utf-8")
    told = " ".join(Page(report(cli, tmp_path, PLAN, "--machine", machine)).texts)
    assert "more than its budget of 200 KiB" in told
    assert "It fits" not in told
    assert "There is no frontier: no plan fits" in told


def test_a_trace_has_both_sides(cli: CLI, tmp_path: Path) -> None:
    waits = [{"layer": 3, "start_s": 0.001, "stop_s": 0.002}]
    recorded = {"num_passes": 3, "seconds": 0.009, "waits": waits}
    path = write_bench(tmp_path / "bench.json")
    data = json.loads(path.read_text())
    for phase in ("decode", "prefill"):
        data["measured"][phase]["recorded"] = recorded
    path.write_text(json.dumps(data))
    trace = tmp_path / "trace.json"
    assert cli("report", PLAN, "--bench", path, "--trace", trace).code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["predicted", "compute", "link", "measured", "compute"]
    sums: dict[tuple[int, str], float] = {}
    for event in (event for event in events if event["ph"] == "X"):
        assert event["dur"] >= 0
        key = event["pid"], event["cat"]
        sums[key] = sums.get(key, 0.0) + event["dur"]
    prediction = load_plan(PLAN).prediction
    computed_s = prediction.prefill.compute_s + 3 * prediction.decode.compute_s
    assert sums[1, "compute"] == pytest.approx(1e6 * computed_s, rel=1e-3)
    assert sums[2, "wait"] == pytest.approx(2 * 1000)
    assert sums[2, "compute"] == pytest.approx(2 * 8000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "error"),
    first_quick(
        [
            ("{", "is not what bench --json prints"),
            ("[]", "bench.json: "),
            ('{"offplan": 2}', "offplan: "),
        ]
    ),
)
def test_a_file_that_is_no_benchmark(cli: CLI, tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    code, _, err = cli("report", PLAN, "-o", tmp_path / "report.html", "--bench", path)
    assert code == 2
    assert error in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_benchmark_of_another_plan_is_refused(cli: CLI, tmp_path: Path) -> None:
    path = write_bench(tmp_path / "bench.json")
    data = json.loads(path.read_text())
    data["predicted"]["decode"]["step_s"] *= 1.01
    path.write_text(json.dumps(data))
    code, _, err = cli("report", PLAN, "-o", tmp_path / "report.html", "--bench", path)
    assert code == 2
    assert "is of another plan: it was predicted 2.451 ms for decode, this plan 2.427 ms" in err


class Terminal(io.StringIO):
    """What is printed to a terminal, without its colours."""

    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> list[str]:
        return [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", self.getvalue()).split("\n")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        f"plan {TINY} --frontier",
        f"analyze {TINY} -v",
        "explain plans/tiny-moe.yaml",
        "machines",
        "machines rtx4090",
    ],
)
def test_tables_fit_the_terminal(cli: CLI, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TERM", "xterm")
    figures = []
    for asked, width in ((20, 60), (60, 60), (80, 80), (300, 120)):
        monkeypatch.setenv("COLUMNS", str(asked))
        terminal = Terminal()
        monkeypatch.setattr("sys.stdout", terminal)
        assert cli(*command.split()).code == 0
        # a command is in one piece, to be copied
        shown = [line for line in terminal.shown if not line.startswith("Next: ")]
        assert max(map(len, shown)) <= width
        lines = "\n".join(terminal.shown)
        figures.append(re.findall(r"\d (?:[KMGT]iB|[num]?s|[GT]B/s)\b", lines))
    # no figure of a table is parted from its unit; the words around tables may be
    assert abs(len(figures[1]) - len(figures[2])) <= len(figures[2]) // 20
