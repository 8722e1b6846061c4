import json
import subprocess
import sys
from pathlib import Path

import pytest
from autoport.cli import app
from autoport.errors import Refusal
from autoport.package_workspace import PackageWorkspace
from autoport.search_ops import Offer, meanings, search
from autoport.workspace import Workspace
from typer.testing import CliRunner

FILES = {
    "functional/__init__.py": 'from .mlp import mlp\n\n__all__ = ["mlp", "flash_attention"]\n',
    "functional/mlp.py": 'def mlp(hidden, gate_w, eps: float = 1e-6):\n    """Gated MLP."""\n',
    "functional/attention/cte.py": "def flash_attention(q, k, v, sliding_window=None):\n    pass\n",
    "functional/topk.py": 'def topk(tensor, k: int) -> "Tensor":\n    """Largest values."""\n\n\n'
    "def _private_mlp():\n    pass\n",
    "functional/broken.py": "def mlp_broken(:\n",
    "nn/norm.py": 'class RMSNorm:\n    """Root mean square norm.\n\n    More.\n    """\n\n'
    "    def __init__(self, size: int, eps: float = 1e-5):\n        raise RuntimeError\n",
    "utils/weight_loader.py": "def sharding_weight_loader(shard_dim, shard_size, num_shards):\n    pass\n",
    "model/__init__.py": "",
    "model/registry.py": "def get_norms():\n    return []\n",
    "model/yi/model.py": 'class YiMLP:\n    """down(silu(gate(x)))."""\n\n\nclass YiRMSNorm:\n    pass\n',
    "__init__.py": "raise RuntimeError('imported')\n",
}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    for name, text in FILES.items():
        path = tmp_path / "vllm_neuron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Workspace.find(tmp_path)


@pytest.fixture
def kernels(tmp_path: Path) -> list[Path]:
    path = tmp_path / "site" / "nkilib" / "core" / "mlp_kernel.py"
    path.parent.mkdir(parents=True)
    path.write_text('raise RuntimeError("imported")\n\n\ndef mlp_tkg(x):\n    """Decode MLP."""\n')
    return [tmp_path / "site" / "nkilib"]


def names(offers: list[Offer]) -> list[tuple[str, str]]:
    return [(offer.place, offer.name) for offer in offers]


def test_places_come_in_the_order_of_priority(workspace: Workspace, kernels: list[Path]):
    assert names(search(workspace, ["mlp"], kernels)) == [
        ("functional", "mlp"),
        ("model", "YiMLP"),
        ("kernels", "mlp_tkg"),
    ]


def test_an_offer_says_how_and_where(workspace: Workspace, kernels: list[Path]):
    mlp, *_, kernel = search(workspace, ["mlp"], kernels)
    assert mlp == Offer(
        "functional",
        "mlp",
        "(hidden, gate_w, eps: float=1e-06)",
        "Gated MLP.",
        "vllm_neuron/functional/mlp.py:1",
        "NF.mlp",
    )
    assert kernel.use == "from nkilib.core.mlp_kernel import mlp_tkg"
    (norm, _) = search(workspace, ["norm"], [])
    assert (norm.signature, norm.summary) == ("(size: int, eps: float=1e-05)", "Root mean square norm.")
    assert norm.use == "from vllm_neuron.nn.norm import RMSNorm"


def test_a_package_out_of_tree_offers_what_its_plugin_has(workspace: Workspace, tmp_path: Path):
    package = PackageWorkspace.open(tmp_path.parent / f"{tmp_path.name}-package", "yi", workspace.root)
    (offer, _) = search(package, ["norm"], [])
    assert offer.use == "from vllm_neuron.nn.norm import RMSNorm"
    assert offer.where == f"{workspace.root}/vllm_neuron/nn/norm.py:1"


def test_what_functional_does_not_export_is_imported_by_module(workspace: Workspace):
    (topk,) = search(workspace, ["topk"], [])
    assert topk.use == "from vllm_neuron.functional.topk import topk"
    assert topk.signature == "(tensor, k: int) -> 'Tensor'"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["swiglu"], "mlp"),
        (["layernorm"], "RMSNorm"),
        (["RMSNorm"], "RMSNorm"),
        (["sliding_window"], "flash_attention"),
        (["swa", "attention"], "flash_attention"),
        (["shard", "loader"], "sharding_weight_loader"),
    ],
)
def test_synonyms_and_parameters_are_searched(workspace: Workspace, words: list[str], found: str):
    assert search(workspace, words, [])[0].name == found


def test_all_words_have_to_match(workspace: Workspace):
    assert search(workspace, ["rope"], []) == []
    assert search(workspace, ["swiglu", "window"], []) == []


def test_meanings_do_not_leak():
    assert "swiglu" in meanings("MLP")
    assert meanings("zebra") == {"zebra"}


def test_a_word_without_letters_is_refused(workspace: Workspace):
    with pytest.raises(Refusal) as refusal:
        search(workspace, ["mlp", "--", "?"], [])
    assert refusal.value.problems[0].found == "no letters in '--', '?'"


def test_command(workspace: Workspace):
    arguments = ["--workspace", str(workspace.root)]
    result = CliRunner().invoke(app, ["search-ops", "swiglu", *arguments])
    assert result.exit_code == 0
    assert result.output.startswith("functional:\n  mlp(hidden, gate_w")
    found = json.loads(CliRunner().invoke(app, ["search-ops", "swiglu", "--json", *arguments]).output)
    assert found[0]["where"] == "vllm_neuron/functional/mlp.py:1"
    result = CliRunner().invoke(app, ["search-ops", "zebra", *arguments])
    assert (result.exit_code, result.output) == (1, "nothing for zebra\n")


def test_reading_tools_import_neither_torch_nor_transformers():
    code = (
        "import sys, autoport.doctor, autoport.search_ops, autoport.diagnose, autoport.review.step\n"
        "print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
