"""The documents say what the program does: commands, options, links, paths, rule ids, help texts."""

from pathlib import Path

import doc_checks
import pytest
import yaml
from autoport.install.bundle import MAIN_SKILL, bundled_skills
from doc_checks import ROOT

DOCUMENTS = sorted(
    [
        ROOT / "README.md",
        ROOT / "SKILL.md",
        *(ROOT / "skills").glob("*/SKILL.md"),
        *(ROOT / "references").glob("*.md"),
    ]
)


@pytest.fixture(params=DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def document(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_commands(document: Path):
    text = document.read_text(encoding="utf-8")
    problems = [
        *(doc_checks.command_problem(words, complete=True) for words in doc_checks.block_commands(text)),
        *(doc_checks.command_problem(words, complete=False) for words in doc_checks.span_commands(text)),
    ]
    assert not list(filter(None, problems))


def test_links_paths_and_names(document: Path):
    text = document.read_text(encoding="utf-8")
    assert not doc_checks.link_problems(document, text)
    assert not doc_checks.path_problems(text)
    assert not doc_checks.name_problems(text)
    assert not doc_checks.help_problems(text)


def test_links_stay_inside_the_installed_skill(document: Path):
    skill = document.parent.name if document.parent.parent == ROOT / "skills" else MAIN_SKILL
    installed = bundled_skills()[skill].values()
    assert document in installed
    linked = [path for path, _ in doc_checks.links(document.read_text(encoding="utf-8")) if path]
    assert {(document.parent / path).resolve() for path in linked} <= set(installed)


def test_main_skill_names_the_commands_of_every_phase():
    text = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    commands = [*doc_checks.block_commands(text), *doc_checks.span_commands(text)]
    named = {words[0] for words in commands if words}
    assert named >= {"port", "research", "analyze", "generate", "register", "document", "review", "prove"}
    assert named >= {"doctor", "init-workspace", "status", "diagnose", "search-ops", "compute-tp", "inspect"}


def test_pages_that_diagnose_points_at_exist():
    catalogue = yaml.safe_load((ROOT / "references" / "failures.yaml").read_text(encoding="utf-8"))
    pages = [
        entry["page"]
        for entries in catalogue.values()
        for entry in entries
        if isinstance(entry, dict) and "page" in entry
    ]
    assert pages
    text = "".join(f"[page]({page})\n" for page in pages)
    assert not doc_checks.link_problems(ROOT / "references" / "failures.yaml", text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```bash\nautoport prot yi x\n```", "no command 'prot'"),
        ("```bash\nX=1 '/a b/autoport' port yi x --dryrun # c\n```", "has no option --dryrun"),
        ("```bash\ncd x && autoport research yi\n```", "needs more arguments"),
        ("```bash\nautoport status yi \\\n  more\n```", "takes 1 arguments, not 2"),
        ("```bash\nautoport install --agent kiro --scope world\n```", "does not take 'world'"),
        ("```bash\nautoport prove yi --workspace\n```", "needs a value"),
        ("run `autoport port NAME\nSOURCE [--no-such]`", "has no option --no-such"),
    ],
)
def test_a_wrong_command_is_found(text: str, problem: str):
    found = [
        *(doc_checks.command_problem(words, complete=True) for words in doc_checks.block_commands(text)),
        *(doc_checks.command_problem(words, complete=False) for words in doc_checks.span_commands(text)),
    ]
    assert problem in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "[a](references/nowhere.md)",
        "[a](SKILL.md#nowhere)",
        "see `references/nowhere.md`",
        '```bash\nbash "$SKILL_DIR/scripts/nowhere.sh"\n```',
        "```text\n./\n├── scripts/\n│   └── nowhere/\n```",
        "`NO-SUCH-RULE`",
        "read nowhere.json",
        "```console\n$ autoport status --help\nUsage: something else\n```",
    ],
)
def test_what_does_not_exist_is_found(text: str):
    found = [
        *doc_checks.link_problems(ROOT / "README.md", text),
        *doc_checks.path_problems(text),
        *doc_checks.name_problems(text),
        *doc_checks.help_problems(text),
    ]
    assert len(found) == 1
