"""Models of more kinds under the real vLLM engine: the Hugging Face class's tokens, also beyond a window."""

import shutil
from collections.abc import Iterator

import engines
import pytest
from autoport.validation.shrink import WINDOW
from checkpoints import real_config
from engines import Ports, generate, prompts, tokens
from published import PUBLISHED

STEPS = 12
LENGTHS = [1, 31, 32, 33, WINDOW - 1, WINDOW, WINDOW + 1, 200]
PLAIN = {"neuron_config": {"num_batched_tokens_buckets": [64, 256], "num_seqs_buckets": [8]}}
CACHED = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 160,
}
# A window on every layer; windows with RoPE and whole contexts without in turn; windows in turn, sinks and
# experts, in the simulator's own model. The others share an architecture's name with one of these or of `ports`.
WINDOWED = {"mistral": PUBLISHED["mistral-7b-v0.1"], "cohere2": "cohere2", "gpt_oss": "gpt_oss"}
OTHERS = {"yi": real_config("yi-6b"), "mistral": real_config("mistral-7b-v0.3")}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    yield from made(tmp_path_factory, WINDOWED)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    yield from made(tmp_path_factory, OTHERS)


def made(tmp_path_factory, configs):
    folder = tmp_path_factory.mktemp("models")
    yield Ports(folder, configs)
    shutil.rmtree(folder)


def served(ports, name, texts, ranks, options, rounds=1):
    """Greedy tokens of each round, and of how many tokens the cache had the keys."""
    with (
        engines.simulated(ports.workspace),
        engines.engine(ports.checkpoints[name], tensor_parallel_size=ranks, **options) as llm,
    ):
        outputs = [generate(llm, texts, STEPS) for _ in range(rounds)]
    return [tokens(found) for found in outputs], [output.num_cached_tokens for output in outputs[-1]]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", OTHERS)
def test_ports(others, name, ranks):
    texts = prompts(LENGTHS)
    [found], _ = served(others, name, texts, ranks, PLAIN)
    assert found == [others.greedy(name, text, STEPS) for text in texts]


@pytest.mark.parametrize(("name", "ranks"), [("mistral", 1), ("cohere2", 1), ("gpt_oss", 2)])
def test_sliding_windows(windowed, name, ranks):
    texts = prompts(LENGTHS, windowed.reference(name).config.vocab_size)
    [found], _ = served(windowed, name, texts, ranks, PLAIN)
    assert found == [windowed.greedy(name, text, STEPS) for text in texts]


@pytest.mark.parametrize(("name", "ranks"), [("mistral", 2), ("cohere2", 2), ("gpt_oss", 1)])
def test_sliding_windows_with_segments_and_prefix_cache(windowed, name, ranks):
    long, short = prompts([700, 40], windowed.reference(name).config.vocab_size)
    texts = [long, short, long[:600] + short, long[:WINDOW] + short]
    expected = [windowed.greedy(name, text, STEPS) for text in texts]
    found, cached = served(windowed, name, texts, ranks, CACHED, rounds=2)
    assert found == [expected, expected]
    assert cached == [672, 32, 608, 96]


@pytest.mark.parametrize("name", WINDOWED)
def test_the_windows_decide_about_tokens(windowed, name, monkeypatch):
    model = windowed.reference(name)
    texts = prompts([200, 700], model.config.vocab_size)
    expected = [windowed.greedy(name, text, STEPS) for text in texts]
    assert 0 < model.config.sliding_window <= WINDOW
    monkeypatch.setattr(model.config, "sliding_window", 4096)
    assert [windowed.greedy(name, text, STEPS) for text in texts] != expected
