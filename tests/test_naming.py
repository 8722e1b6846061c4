"""Names that a port can have."""

import pytest
from autoport.errors import Refusal
from autoport.naming import check_model_name, class_prefix
from refusals import rules


@pytest.mark.parametrize("name", ["yi", "gpt_neox", "llama_3_2", "qwen2"])
def test_good_names(name):
    assert check_model_name(name) == name


@pytest.mark.parametrize(
    "name", ["Yi", "yi-6b", "../evil", "a/b", "", "1st", "yi_", "_yi", "a__b", "yi.py", "yi\n", "ÿi"]
)
def test_names_that_are_not_snake_case(name):
    with pytest.raises(Refusal) as refusal:
        check_model_name(name)
    assert rules(refusal) == ["NAME-SNAKE"]


def test_a_name_that_no_file_system_takes():
    with pytest.raises(Refusal) as refusal:
        check_model_name("a" * 300)
    assert rules(refusal) == ["NAME-LONG"]


@pytest.mark.parametrize(("name", "hint"), [("PhiMoE", "phimoe"), ("yi-6b", "yi_6b"), ("None", "gpt_neox")])
def test_a_bad_name_comes_with_a_good_one(name, hint):
    with pytest.raises(Refusal, match=f"e.g. '{hint}'"):
        check_model_name(name)
    assert check_model_name(hint) == hint


@pytest.mark.parametrize("name", ["class", "registry", "kv_cache", "torch", "none"])
def test_reserved_names(name):
    with pytest.raises(Refusal) as refusal:
        check_model_name(name)
    assert rules(refusal) == ["NAME-RESERVED"]


@pytest.mark.parametrize(
    ("name", "prefix"), [("yi", "Yi"), ("gpt_neox", "GPTNeoX"), ("deepseek_v2", "DeepseekV2")]
)
def test_class_prefix(name, prefix):
    assert class_prefix(name) == prefix
