import pytest
from vllm_neuron.model.neuron_config import NeuronConfig


def test_sampling_on_the_device_is_on_unless_it_is_none():
    assert NeuronConfig.from_dict({}).on_device_sampling_config.max_top_k == 256
    assert NeuronConfig.from_dict({"on_device_sampling_config": None}).on_device_sampling_config is None
    options = {"all_greedy": "true", "max_top_k": 8, "unknown": 1}
    sampling = NeuronConfig.from_dict({"on_device_sampling_config": options}).on_device_sampling_config
    assert (sampling.all_greedy, sampling.max_top_k, sampling.deterministic) == (True, 8, False)


def test_unknown_keys_are_ignored():
    assert NeuronConfig.from_dict({"no_such_key": 1, "max_logprobs": 5}).max_logprobs == 5


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2"])
def test_parallel_sizes_are_positive_integers(value):
    with pytest.raises(ValueError, match="ep_degree must be an integer of at least 1"):
        NeuronConfig(ep_degree=value)


def test_structured_outputs_is_a_bool():
    with pytest.raises(ValueError, match="must be a bool"):
        NeuronConfig.from_dict({"enable_structured_outputs": 1})
