"""The wheel in an environment of its own: everything travels in it."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from autoport.install.bundle import MAIN_SKILL, bundled_skills
from autoport.resources import bundle_root

pytestmark = pytest.mark.slow

Run = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(bundle_root())], check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def run(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a program of an environment that has only the wheel, and this one's other packages."""
    root = tmp_path_factory.mktemp("environment with spaces")
    environment = root / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    site_packages = next((environment / "lib").glob("python*/site-packages"))
    (site_packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    variables = {**os.environ, "HOME": str(root / "home"), "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}

    def run_program(*command: str | Path, cwd: str | Path = "/") -> str:
        done = subprocess.run(
            [environment / "bin" / command[0], *command[1:]],
            cwd=cwd,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run_program


def test_contents(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    for file in bundled_skills()[MAIN_SKILL]:
        is_code = file.startswith("scripts/autoport/")
        assert (file.removeprefix("scripts/") if is_code else f"autoport/bundle/{file}") in names
    assert not [name for name in names if "__pycache__" in name]


def test_runs_from_anywhere(run: Run, tmp_path: Path):
    package = run("python", "-c", "import autoport; print(autoport.__file__)").strip()
    assert "environment with spaces" in package
    assert "install" in run("autoport", "--help")
    workspace = tmp_path / "a workspace"
    assert run("autoport", "init-workspace", workspace, cwd=tmp_path).strip() == str(workspace)
    assert (workspace / "vllm_neuron" / "functional" / "__init__.py").is_file()


def test_installs_the_same_skills_as_a_checkout(run: Run, tmp_path: Path):
    run("autoport", "install", "--agent", "codex", cwd=tmp_path)
    skills = tmp_path / ".agents" / "skills"
    for skill, files in bundled_skills().items():
        for file, source in files.items():
            assert (skills / skill / file).read_bytes() == source.read_bytes()
    assert os.access(skills / MAIN_SKILL / "scripts" / "setup.sh", os.X_OK)


def test_installed_skill_runs_by_its_own_path(run: Run, tmp_path: Path):
    run("autoport", "install", "--agent", "codex", cwd=tmp_path)
    skill = tmp_path / ".agents" / "skills" / MAIN_SKILL
    config = skill / "references" / "yi-6b-config.json"
    table = json.loads(run("python", skill / "scripts" / "compute_tp.py", config, "--json"))
    assert table["plan"]["recommended"] == 2


def test_ports_a_model(run: Run, tmp_path: Path):
    workspace = tmp_path / "workspace"
    run("autoport", "demo", "--workspace", workspace)
    manifest = json.loads((workspace / ".autoport" / "yi" / "port.json").read_bytes())
    assert {step["status"] for step in manifest["steps"].values()} == {"done"}
