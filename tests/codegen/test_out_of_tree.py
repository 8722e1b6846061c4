"""Ports that are packages of their own: what is written, what is refused, and the check of the plugin's API."""

import importlib
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import pytest
from autoport.cli.port import _place as place
from autoport.codegen import add_variant, document, generate, register
from autoport.codegen.out_of_tree import check_free, used_api
from autoport.codegen.registry_rows import unregister
from autoport.errors import Refusal
from autoport.package_workspace import PackageWorkspace
from autoport.port_state import Port
from autoport.resources import simulator_dir
from autoport.review import step as review
from autoport.step import Options
from autoport.workspace import Workspace
from plans import YI, plan
from refusals import rules

ARCHITECTURE = "YiForCausalLM"


def begin(
    folder: Path, name: str = "yi", architecture: str = ARCHITECTURE, plugin: Path | None = None
) -> Port:
    port = Port(PackageWorkspace.open(folder, name, plugin), name, "01-ai/Yi-6B")
    port.write_state("plan.json", plan(msgspec.structs.replace(YI, hf_name=architecture), name, name.title()))
    return port


def write(port: Port) -> Port:
    for step in (generate, register, document):
        assert step.run(port, Options()).status == "done"
    return port


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(begin(tmp_path_factory.mktemp("written") / "package")).workspace.root


@pytest.fixture
def port(written: Path, tmp_path: Path) -> Port:
    root = shutil.copytree(written, tmp_path / "package")
    return Port(PackageWorkspace.open(root, "yi", None), "yi")


# --- What is written ----------------------------------------------------------------------------------------


def test_the_package_has_all_that_an_installation_needs(port: Port) -> None:
    root = port.workspace.root
    files = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert {path for path in files if not path.startswith(".autoport/")} == {
        "README.md",
        "examples/results/results.md",
        "examples/run.py",
        "pyproject.toml",
        "tests/test_logits.py",
        "tests/test_registration.py",
        *(f"vllm_neuron_yi/{name}.py" for name in ("__init__", "config", "factory", "model", "plugin_api")),
    }
    assert 'vllm_neuron_yi = "vllm_neuron_yi:register"' in (root / "pyproject.toml").read_text()
    readme = (root / "README.md").read_text()
    assert "python -m pip install ." in readme
    assert "](../" not in readme
    assert "python examples/run.py" in (root / "examples" / "run.py").read_text()


def test_it_is_found_again_as_a_workspace_and_nothing_is_written_twice(port: Port) -> None:
    found = Workspace.find(port.workspace.root)
    assert isinstance(found, PackageWorkspace)
    again = Port(found, "yi")
    assert [step.run(again, Options()).files for step in (generate, register, document)] == [[], [], []]


def test_the_checkout_is_only_read(tmp_path: Path) -> None:
    checkout = Workspace.create(tmp_path / "checkout").root
    before = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}
    port = write(begin(tmp_path / "package", plugin=checkout))
    assert port.workspace.plugin_root == checkout
    assert {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()} == before


def test_a_package_made_without_the_checkout_says_what_that_leaves_open(port: Port, tmp_path: Path) -> None:
    checkout = Workspace.create(tmp_path / "checkout").root
    init = checkout / "vllm_neuron" / "__init__.py"
    init.write_text(init.read_text().replace("__simulator__", "_other"))
    for package, said in ((port, True), (write(begin(tmp_path / "other", plugin=checkout)), False)):
        readme = (package.workspace.root / "README.md").read_text()
        assert ("checked against autoport's simulator only" in readme) == said
        assert ("of the simulator only" in register.run(package, Options()).summary) == said


def test_an_edited_file_is_kept(port: Port) -> None:
    metadata = port.workspace.root / "pyproject.toml"
    metadata.write_text(metadata.read_text().replace('version = "0.1.0"', 'version = "1.0"'))
    outcome = register.run(port, Options())
    assert outcome.files == []
    assert "kept: pyproject.toml" in outcome.summary
    assert 'version = "1.0"' in metadata.read_text()


def test_the_review_has_rules_for_it(port: Port) -> None:
    def statuses() -> dict[str, str]:
        wanted = ("OOT-ENTRY", "NAME-FACTORY", "REG-ROW", "REG-ARCH", "FILES")
        return {rule.id: rule.status for rule in review.run(port, Options()).data.rules if rule.id in wanted}

    na = "not applicable"
    green = {"OOT-ENTRY": "pass", "NAME-FACTORY": "pass", "REG-ROW": na, "REG-ARCH": na, "FILES": na}
    assert statuses() == green
    metadata = port.workspace.root / "pyproject.toml"
    metadata.write_text(metadata.read_text().replace("vllm.general_plugins", "vllm.platform_plugins"))
    assert statuses() == green | {"OOT-ENTRY": "fail"}


def test_a_variant_goes_into_the_package(port: Port) -> None:
    added = add_variant.run(port, add_variant.declare("fp8"))
    names = ("factory", "model_fp8", "plugin_api", "quantized_weights")
    assert set(added.files) == {"tests/test_yi_fp8.py", *(f"vllm_neuron_yi/{name}.py" for name in names)}
    used = (port.workspace.root / "vllm_neuron_yi" / "plugin_api.py").read_text()
    assert '"get_weight_loader": ()' in used  # the loader of the variant, which the plugin has to have, too
    assert generate.run(port, Options()).files == []
    assert "from vllm_neuron_yi import factory" in (port.workspace.root / "tests/test_yi_fp8.py").read_text()
    assert not (port.workspace.root / "vllm_neuron").exists()


# --- What is refused ----------------------------------------------------------------------------------------


def test_an_architecture_that_the_plugin_has_is_refused(tmp_path: Path) -> None:
    port = begin(tmp_path / "package", architecture="LlamaForCausalLM")
    generate.run(port, Options())
    with pytest.raises(Refusal) as refusal:
        register.run(port, Options(replace_row=True))
    assert rules(refusal) == ["REG-CONFLICT"]
    assert not (port.workspace.root / "pyproject.toml").exists()


def test_what_only_a_row_of_the_registry_has_is_refused(port: Port) -> None:
    registry = port.workspace.registry_path.read_bytes()
    with pytest.raises(Refusal) as refusal:
        register.run(port, Options(aliases=["YIForCausalLM"]))
    assert rules(refusal) == ["REG-ALIAS"]
    with pytest.raises(Refusal, match="python -m pip uninstall vllm-neuron-yi"):
        unregister(port)
    assert port.workspace.registry_path.read_bytes() == registry


def test_a_folder_of_the_plugin_is_refused(tmp_path: Path) -> None:
    checkout = Workspace.create(tmp_path / "checkout").root
    for folder in (checkout, checkout / "packages" / "yi"):
        with pytest.raises(Refusal) as refusal:
            PackageWorkspace.open(folder, "yi", None)
        assert rules(refusal) == ["OOT-CHECKOUT"]
    assert not (checkout / ".autoport").exists()


def test_a_file_is_no_folder_for_a_package(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for path in (tmp_path / "notes.txt", tmp_path / "notes.txt" / "yi"):
        with pytest.raises(Refusal, match=r"OOT-FILE: .*notes.txt is a file, .*--out-of-tree DIR"):
            PackageWorkspace.open(path, "yi", None)


def test_a_package_holds_one_port(port: Port) -> None:
    with pytest.raises(Refusal) as refusal:
        PackageWorkspace.open(port.workspace.root, "qwen2", None)
    assert rules(refusal) == ["OOT-OTHER"]
    with pytest.raises(Refusal, match=r"OOT-OTHER: .* of port 'yi', not of 'qwen2'"):
        Port(Workspace.find(port.workspace.root), "qwen2")


def test_a_port_that_step_1_refused_leaves_the_folder_to_another(tmp_path: Path) -> None:
    assert not PackageWorkspace.open(tmp_path, "yi", None).is_begun
    assert PackageWorkspace.open(tmp_path, "qwen2", None).name == "qwen2"


def test_until_it_is_planned_a_package_takes_the_plugin_that_is_named(tmp_path: Path) -> None:
    checkout = Workspace.create(tmp_path / "checkout").root
    package = PackageWorkspace.open(tmp_path / "package", "yi", None)
    Port(package, "yi", "01-ai/Yi-6B").save()  # Step 1, before the registry is looked at
    with pytest.raises(Refusal, match=r"bundled simulator.* --workspace CHECKOUT"):
        check_free(package, "LlamaForCausalLM")
    for plugin in (checkout, None):
        package = PackageWorkspace.open(package.root, "yi", plugin)
        assert package.plugin_root == checkout
    check_free(package, "LlamaForCausalLM")


def test_a_planned_package_keeps_its_plugin(tmp_path: Path) -> None:
    checkout, other = (Workspace.create(tmp_path / name).root for name in ("checkout", "other"))
    root = begin(tmp_path / "package", plugin=checkout).workspace.root
    for plugin in (None, checkout):
        assert PackageWorkspace.open(root, "yi", plugin).plugin_root == checkout
    with pytest.raises(Refusal, match=f"OOT-PLUGIN: .*{checkout}.*{other}.*leave --workspace away"):
        PackageWorkspace.open(root, "yi", other)
    checkout.rename(tmp_path / "moved")
    assert PackageWorkspace.open(root, "yi", None).plugin_root == simulator_dir()
    assert PackageWorkspace.open(root, "yi", tmp_path / "moved").plugin_root == tmp_path / "moved"
    assert Workspace.find(root).plugin_root == tmp_path / "moved"


def test_a_damaged_record_is_told_from_a_step(port: Port) -> None:
    (port.workspace.root / PackageWorkspace.RECORD).write_text("{")
    with pytest.raises(Refusal, match="begin the package again in a new folder"):
        Workspace.find(port.workspace.root)


def test_a_plugin_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refusal:
        PackageWorkspace.open(tmp_path / "package", "yi", tmp_path)
    assert rules(refusal) == ["WS-MISSING"]
    assert not (tmp_path / "package").exists()


def test_where_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = Workspace.create(tmp_path / "checkout").root
    monkeypatch.chdir(tmp_path)
    assert place(Path(), tmp_path / "a", "yi").plugin_root == simulator_dir()
    assert place(checkout, tmp_path / "b", "yi").plugin_root == checkout
    with pytest.raises(Refusal) as refusal:
        place(tmp_path / "a", tmp_path / "c", "yi")
    assert rules(refusal) == ["WS-MISSING"]
    monkeypatch.chdir(checkout)
    assert place(Path(), tmp_path / "d", "yi").plugin_root == checkout
    assert place(Path(), None, "yi").root == checkout


# --- The plugin's API ---------------------------------------------------------------------------------------


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the plugin, which the package finds in place of the simulator."""
    root = tmp_path / "plugin" / "vllm_neuron"
    shutil.copytree(simulator_dir() / "vllm_neuron", root, ignore=shutil.ignore_patterns("__pycache__"))
    copied = ModuleType("vllm_neuron")
    copied.__path__ = [str(root)]
    monkeypatch.setitem(sys.modules, "vllm_neuron", copied)
    return root


@pytest.fixture
def package(port: Port, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(port.workspace.root)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("vllm_neuron_yi", "vllm_neuron_yi.plugin_api"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module("vllm_neuron_yi.plugin_api")
    return importlib.import_module("vllm_neuron_yi")


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_an_upgrade_that_adds_and_moves_is_taken(plugin: Path, package: ModuleType) -> None:
    package.plugin_api.check()
    folder = plugin / "functional" / "attention"
    (folder / "attention_decode.py").rename(folder / "decode_kernel.py")
    change(
        plugin / "functional" / "__init__.py",
        "attention.attention_decode import",
        "attention.decode_kernel import",
    )
    change(
        plugin / "model" / "kv_cache.py", "    head_size: int\n", "    head_size: int\n    page: int = 0\n"
    )
    package.plugin_api.check()


def test_an_upgrade_that_takes_away_is_named_with_the_generation(plugin: Path, package: ModuleType) -> None:
    change(plugin / "functional" / "__init__.py", "qkv_proj", "fused_projection")
    change(plugin / "functional" / "attention" / "attention_decode.py", "kv_cache_update_idx", "slots")
    (plugin / "nn" / "sampler.py").unlink()
    with pytest.raises(package.plugin_api.PluginApiError) as error:
        package.plugin_api.check()
    text = str(error.value)
    assert "generated for vllm_neuron simulator" in text
    for missing in (
        "vllm_neuron.functional.qkv_proj",
        "vllm_neuron.functional.attention_decode(kv_cache_update_idx=)",
        "vllm_neuron.nn.sampler",
    ):
        assert missing in text
    assert "flash_attention" not in text


def test_without_the_plugin(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_neuron", None)
    with pytest.raises(package.plugin_api.PluginApiError, match="needs the plugin vllm_neuron"):
        package.plugin_api.check()


def test_what_is_used_is_read_from_the_code() -> None:
    text = (
        "import vllm_neuron.functional as NF\nimport torch\nfrom vllm_neuron.nn import Sampler as S\n"
        "from .config import C\nNF.mlp(x, act=1)\nNF.mlp(x, bias=2)\nS(group=1)\ntorch.sum(dim=0)\n"
    )
    assert used_api({"model.py": text}, "vllm_neuron") == {
        "vllm_neuron.functional": {"mlp": ("act", "bias")},
        "vllm_neuron.nn": {"Sampler": ("group",)},
    }


# --- Registration -------------------------------------------------------------------------------------------


class FakeRegistry:
    """What `register` uses of vLLM's registry."""

    def __init__(self, **models: object):
        self.models: dict[str, object] = dict(models)

    def register_model(self, architecture: str, factory: str) -> None:
        self.models[architecture] = SimpleNamespace(module_name=factory.split(":")[0])


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    registry = FakeRegistry()
    platform = type("NeuronPlatform", (), {"__module__": "vllm_neuron.vllm.platform"})()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    return registry


def test_it_replaces_vllms_own_class_and_registers_once(
    plugin: Path, package: ModuleType, fake_vllm: FakeRegistry
) -> None:
    fake_vllm.models[ARCHITECTURE] = SimpleNamespace(module_name="vllm.model_executor.models.yi")
    package.register()
    entry = fake_vllm.models[ARCHITECTURE]
    assert entry == SimpleNamespace(module_name="vllm_neuron_yi.factory")
    package.register()
    assert fake_vllm.models[ARCHITECTURE] is entry


@pytest.mark.parametrize(
    "entry", [SimpleNamespace(module_name="other.factory"), SimpleNamespace(model_cls=SimpleNamespace)]
)
def test_another_packages_architecture_is_an_error(
    plugin: Path, package: ModuleType, fake_vllm: FakeRegistry, entry: object
) -> None:
    fake_vllm.models[ARCHITECTURE] = entry
    owner = "other" if hasattr(entry, "module_name") else "types"
    with pytest.raises(
        package.AlreadyRegisteredError, match=f"registered by {owner}, so vllm_neuron_yi cannot"
    ):
        package.register()
    assert fake_vllm.models[ARCHITECTURE] is entry


def test_a_row_that_the_upgraded_plugin_has_is_an_error(
    plugin: Path, package: ModuleType, fake_vllm: FakeRegistry
) -> None:
    change(plugin / "model" / "registry.py", '("LlamaForCausalLM"', f'("{ARCHITECTURE}"')
    with pytest.raises(package.AlreadyRegisteredError, match="registered by vllm_neuron,"):
        package.register()


def test_another_platform_is_left_alone(
    plugin: Path, package: ModuleType, fake_vllm: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["vllm.platforms"], "current_platform", object())
    (plugin / "nn" / "sampler.py").unlink()  # not even looked at
    package.register()
    assert not fake_vllm.models
