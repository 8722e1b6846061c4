"""The skills keep to the Agent Skills specification, as an agent finds them after installation."""

import json
import re
from pathlib import Path

import pytest
from autoport import __version__
from autoport.install.bundle import bundled_skills
from autoport.install.installer import install
from autoport.install.manifest import frontmatter
from doc_checks import ROOT

SKILLS = {name: files["SKILL.md"] for name, files in bundled_skills().items()}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("home") / "skills"
    install(target)
    return target


@pytest.mark.parametrize("name", SKILLS)
def test_skills_ref_accepts(installed: Path, name: str):
    skills_ref = pytest.importorskip("skills_ref", reason="skills-ref needs Python 3.11")
    assert skills_ref.validate(installed / name) == []


@pytest.mark.parametrize("name", SKILLS)
def test_frontmatter(name: str):
    fields = frontmatter(SKILLS[name])
    assert fields["name"] == name
    assert fields["metadata"]["version"] == __version__
    assert {type(value) for value in fields["metadata"].values()} == {str}
    assert "Use when" in fields["description"]
    assert "Do not use" in fields["description"]


@pytest.mark.parametrize("name", SKILLS)
def test_length(name: str):
    text = SKILLS[name].read_text(encoding="utf-8")
    assert len(text.splitlines()) < 500
    assert len(text) / 4 < 5000  # tokens, at four characters each


def test_sentences_for_routing_cover_every_skill_and_none():
    wanted = [case["skill"] for case in json.loads((ROOT / "evals" / "routing.json").read_text())]
    assert set(wanted) == {*SKILLS, None}
    assert all(wanted.count(name) >= 2 for name in SKILLS if name != "autoport-out-of-tree")


def test_what_another_skill_does_is_left_to_it():
    others = frontmatter(SKILLS["autoport-vllm-neuron"])["description"].partition("Do not use")[2]
    for task in ("variant", "outside the plugin's checkout", "crash log", "accuracy report"):
        assert task in others


def test_references_are_one_level_deep():
    text = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((references/[^)#]+)", text))
    assert linked == {f"references/{path.name}" for path in (ROOT / "references").glob("*.md")}
