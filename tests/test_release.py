"""The release workflow, and the notes that it takes from the changelog."""

import importlib.util
from types import ModuleType

import pytest
import yaml

import offplan
from tests.cli import ROOT


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("changelog", ROOT / ".ci" / "changelog.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_notes_are_the_changelogs_section() -> None:
    text = (
        "# Changelog\n\n## Unreleased\n\n- b\n\n## 0.2.0 (2027-01-01)\n\n- a\n\n## 0.1.0\n\n- z\n"
    )
    find = load_script().find_section
    assert (find(text, "0.2.0"), find(text, "0.1.0"), find(text, "0.3.0")) == ("- a", "- z", None)


def test_a_tag_is_refused_that_is_not_the_version_or_has_no_section() -> None:
    script = load_script()
    with pytest.raises(SystemExit, match="another __version__"):
        script.main("v99.0.0")
    sections = script.find_section((ROOT / "CHANGELOG.md").read_text("utf-8"), offplan.__version__)
    if sections is None:
        with pytest.raises(SystemExit, match="has no text under"):
            script.main(f"v{offplan.__version__}")


def test_the_workflow_publishes_what_was_built_and_attested() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))
    jobs = workflow["jobs"]
    assert list(jobs) == ["build", "pypi", "release"]
    assert jobs["pypi"]["permissions"] == {"id-token": "write"}
    used = [step.get("uses", "") for job in jobs.values() for step in job["steps"]]
    assert any(each.startswith("actions/attest-build-provenance@") for each in used)
    assert any(each.startswith("pypa/gh-action-pypi-publish@") for each in used)
    assert any(".ci/changelog.py" in step.get("run", "") for step in jobs["build"]["steps"])


def test_what_the_docs_install_is_not_on_pypi() -> None:
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert "pip install offplan" not in path.read_text("utf-8")
        assert "pip install 'offplan" not in path.read_text("utf-8")
