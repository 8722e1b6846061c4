"""A mixture-of-experts port with expert parallelism: sub-group sizes, one group for every collective."""

import torch
import vllm_neuron.functional as NF
from nkilib.core.moe.moe_cte.moe_cte import MoECTEImplementation
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group, get_world_group
from vllm_neuron.model.kv_cache import KVSpec, LayerSpec
from vllm_neuron.nn import ColumnParallelLinear
from vllm_neuron.nn.embedding import VocabDimShardedEmbedding
from vllm_neuron.nn.sampler import Sampler
from vllm_neuron.parallel.neuron_parallel_state import (
    get_neuron_ep_degree,
    get_neuron_ep_rank,
    get_neuron_ep_tp_group,
)
from vllm_neuron.utils.checkpoints import SafetensorsCheckpoint
from vllm_neuron.utils.weight_loader import (
    expert_parallel_tensor_dim_loader,
    fused_qkv_weight_loader,
    set_weight_loader,
    sharding_weight_loader,
)

from .config import MixaConfig


class Groups:
    """tp_group sizes the weights, sp_group carries every collective."""

    def __init__(self):
        self.enabled = get_current_vllm_config().parallel_config.enable_expert_parallel
        self.ep_degree = get_neuron_ep_degree()
        self.ep_rank = get_neuron_ep_rank()
        self.tp_group = get_neuron_ep_tp_group() if self.ep_degree > 1 else get_tp_group()


class MixaRMSNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size, dtype=config.torch_dtype))
        self.eps = config.rms_norm_eps

    def forward(self, x):
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)).to(
            self.weight.dtype
        )


class MixaAttention(nn.Module):
    def __init__(self, config: MixaConfig, layer_idx):
        super().__init__()
        groups = Groups()
        self.name = f"layers.{layer_idx}.self_attn"
        self.sp_group = get_world_group()
        shards = groups.tp_group.world_size
        self.num_heads, self.head_dim = config.num_attention_heads // shards, config.head_dim
        self.num_kv_heads = config.num_key_value_heads // shards
        assert config.num_attention_heads % (2 * shards) == 0, f"{shards} shards"
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj_weight = nn.Parameter(
            torch.empty(config.hidden_size, q + 2 * kv, dtype=config.torch_dtype)
        )
        self.o_proj_weight = nn.Parameter(torch.empty(q, config.hidden_size, dtype=config.torch_dtype))
        set_weight_loader(self.qkv_proj_weight, fused_qkv_weight_loader(q, kv, 1, shards, True))
        set_weight_loader(self.o_proj_weight, sharding_weight_loader(0, q, shards, True))
        self.k_cache = self.v_cache = None

    def forward(self, hidden_states, position_embeddings, attn_metadata, is_prefill):
        metadata = attn_metadata[self.name]
        cos, sin = position_embeddings
        if is_prefill:
            hidden_states = self.sp_group.all_gather(hidden_states, dim=0)
            qkv = NF.qkv_proj(hidden_states.unsqueeze(0), self.qkv_proj_weight, d_head=self.head_dim)
            heads = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim).transpose(0, 1)
            q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads))
            attn = NF.flash_attention(q, k.transpose(1, 2), v, tp_out=True)
            output = NF.o_proj(attn.unsqueeze(0), self.o_proj_weight).squeeze(0)
            return self.sp_group.reduce_scatter(output, dim=0)
        batch = metadata["block_table_tensor"].shape[0]
        output = NF.attention_decode(
            hidden_states.view(batch, 1, -1),
            W_qkv=self.qkv_proj_weight,
            cos=cos,
            sin=sin,
            active_blocks_table=metadata["block_table_tensor"],
            K_cache=self.k_cache,
            V_cache=self.v_cache,
            pos_ids=metadata["cached_seq_len"].float(),
            update_cache=True,
            kv_cache_update_idx=metadata["slot_mapping"].view(batch, 1),
            W_out=self.o_proj_weight,
        )
        self.sp_group.all_reduce(output)
        return output


class MixaSharedMLP(nn.Module):
    def __init__(self, config: MixaConfig):
        super().__init__()
        shards = Groups().tp_group.world_size
        size = config.intermediate_size // shards
        self.gate_proj_weight = nn.Parameter(torch.empty(config.hidden_size, size, dtype=config.torch_dtype))
        self.up_proj_weight = nn.Parameter(torch.empty(config.hidden_size, size, dtype=config.torch_dtype))
        self.down_proj_weight = nn.Parameter(torch.empty(size, config.hidden_size, dtype=config.torch_dtype))
        for weight, dim in ((self.gate_proj_weight, 1), (self.up_proj_weight, 1), (self.down_proj_weight, 0)):
            set_weight_loader(weight, sharding_weight_loader(dim, size, shards, True))

    def forward(self, hidden_states):
        return NF.mlp(hidden_states, self.gate_proj_weight, self.up_proj_weight, self.down_proj_weight)


class MixaExperts(nn.Module):
    def __init__(self, config: MixaConfig):
        super().__init__()
        groups = Groups()
        self.sp_group = get_world_group()
        self.top_k = config.num_experts_per_tok
        self.num_local_experts = config.num_local_experts // groups.ep_degree
        local = list(
            range(groups.ep_rank * self.num_local_experts, (groups.ep_rank + 1) * self.num_local_experts)
        )
        shards, dtype = groups.tp_group.world_size, config.torch_dtype
        size, hidden = config.intermediate_size // shards, config.hidden_size
        self.router_weight = nn.Parameter(torch.empty(config.num_local_experts, hidden, dtype=torch.float32))
        self.router_bias = nn.Parameter(torch.empty(config.num_local_experts, dtype=torch.float32))
        self.gate_up_proj_weight = nn.Parameter(
            torch.empty(self.num_local_experts, hidden, 2 * size, dtype=dtype)
        )
        self.down_proj_weight = nn.Parameter(torch.empty(self.num_local_experts, size, hidden, dtype=dtype))
        for weight, dim in ((self.gate_up_proj_weight, 2), (self.down_proj_weight, 1)):
            loader = sharding_weight_loader(dim, size, shards)
            set_weight_loader(weight, expert_parallel_tensor_dim_loader(local, loader))
        self.shared_expert = MixaSharedMLP(config)
        self.post_attention_layernorm = MixaRMSNorm(config)

    def forward(self, hidden_states, is_prefill):
        if is_prefill:
            normed = self.sp_group.all_gather(self.post_attention_layernorm(hidden_states), dim=0)
            affinities = NF.router(normed, self.router_weight.t(), self.top_k, router_bias=self.router_bias)
            masked, positions, blocks, conditions = NF.build_blockwise_mapping(
                affinities, self.num_local_experts, self.top_k, 256, self.sp_group
            )
            output = NF.moe_cte(
                normed,
                masked,
                self.gate_up_proj_weight,
                self.down_proj_weight,
                positions,
                blocks,
                256,
                MoECTEImplementation.shard_on_block,
                conditions=conditions,
            )
            output = output + self.shared_expert(normed)
            return self.sp_group.reduce_scatter(output, dim=0)
        output = NF.moe_block_tkg(
            hidden_states,
            self.post_attention_layernorm.weight.view(1, -1),
            self.router_weight.t(),
            self.gate_up_proj_weight,
            self.down_proj_weight,
            top_k=self.top_k,
            router_bias=self.router_bias.unsqueeze(0),
            skip_router_logits=True,
        )
        output += self.shared_expert(self.post_attention_layernorm(hidden_states))
        self.sp_group.all_reduce(output)
        return output


class MixaDecoderLayer(nn.Module):
    def __init__(self, config: MixaConfig, layer_idx):
        super().__init__()
        self.input_layernorm = MixaRMSNorm(config)
        self.self_attn = MixaAttention(config, layer_idx)
        self.mlp = MixaExperts(config)

    def forward(self, hidden_states, position_embeddings, attn_metadata, is_prefill):
        residual = hidden_states
        normed = self.input_layernorm(hidden_states)
        hidden_states = residual + self.self_attn(normed, position_embeddings, attn_metadata, is_prefill)
        return hidden_states + self.mlp(hidden_states, is_prefill)


class MixaModel(nn.Module):
    def __init__(self, config: MixaConfig):
        super().__init__()
        self.sp_group = get_world_group()
        self.embed_tokens = VocabDimShardedEmbedding(
            config.vocab_size,
            config.hidden_size,
            dtype=config.torch_dtype,
            tp_group=self.sp_group.device_group,
        )
        self.layers = nn.ModuleList(MixaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = MixaRMSNorm(config)
        self.head_dim, self.theta = config.head_dim, config.rope_parameters["rope_theta"]

    def rotary(self, positions: torch.Tensor):
        steps = torch.arange(0, self.head_dim, 2, device=positions.device) / self.head_dim
        angles = positions.float()[:, None] * self.theta**-steps
        return angles.cos(), angles.sin()

    def forward(self, input_ids, positions, attn_metadata, is_prefill, rank):
        embeddings = self.rotary(positions)
        hidden_states = self.embed_tokens(input_ids, scatter_tokens=is_prefill, rank=rank)
        for layer in self.layers:
            hidden_states = layer(hidden_states, embeddings, attn_metadata, is_prefill)
        hidden_states = self.norm(hidden_states)
        return self.sp_group.all_gather(hidden_states, dim=0) if is_prefill else hidden_states


class MixaForCausalLM(nn.Module):
    def __init__(self, config: MixaConfig):
        super().__init__()
        self.config = config
        self.groups = Groups()
        self.ep_degree = self.groups.ep_degree
        self.sp_group = get_world_group()
        sampling = config.neuron_config.on_device_sampling_config
        group = self.sp_group.device_group
        self.model = MixaModel(config)
        self.lm_head = ColumnParallelLinear(
            config.hidden_size, config.vocab_size, bias=False, gather_output=sampling is None, tp_group=group
        )
        self.sampler = Sampler(sampling, process_group=group) if sampling else None

    @classmethod
    def from_configs(cls, hf_config, neuron_config):
        return cls(MixaConfig.from_configs(hf_config, neuron_config))

    def forward(self, input_ids, positions, attn_metadata, sampling_positions, rank=None, **kwargs):
        metadata = attn_metadata[self.model.layers[0].self_attn.name]
        is_prefill = metadata["max_query_len"] > metadata["decode_token_threshold"]
        if is_prefill and input_ids.shape[0] % self.sp_group.world_size:
            raise ValueError("the tokens do not divide by the ranks")
        hidden_states = self.model(input_ids, positions, attn_metadata, is_prefill, rank)
        logits = self.lm_head(hidden_states[sampling_positions])
        if self.sampler is None:
            return logits
        return self.sampler(logits, kwargs["sampling_params"], tp_rank=rank)

    def get_kv_spec(self):
        specs = []
        for layer in self.model.layers:
            attn = layer.self_attn
            specs.append(LayerSpec(attn.name, attn.num_kv_heads, attn.head_dim, self.config.torch_dtype))
        return KVSpec(layers=specs)

    def bind_kv_cache(self, kv_caches):
        for layer in self.model.layers:
            layer.self_attn.k_cache, layer.self_attn.v_cache = kv_caches[layer.self_attn.name]

    def load_weights(self, checkpoint_path, device, cache_dir=None):
        result = SafetensorsCheckpoint(checkpoint_path, cache_dir).load_sharded_pipelined(
            self.sp_group.rank_in_group, self.sp_group.world_size, self, self._mappings(), device
        )
        self.load_state_dict(result.state_dict, strict=False, assign=True)
        self._scale_replicated()

    def _mappings(self):
        mappings = {}
        for i in range(self.config.num_hidden_layers):
            layer = f"model.layers.{i}"
            moe = f"{layer}.mlp"
            mappings |= {
                f"{layer}.self_attn.qkv_proj_weight": [f"{layer}.self_attn.{x}_proj.weight" for x in "qkv"],
                f"{layer}.self_attn.o_proj_weight": f"{layer}.self_attn.o_proj.weight",
                f"{moe}.post_attention_layernorm.weight": f"{layer}.post_attention_layernorm.weight",
                f"{moe}.router_weight": f"{moe}.gate.weight",
                f"{moe}.router_bias": f"{moe}.gate.bias",
                f"{moe}.gate_up_proj_weight": f"{moe}.experts.gate_up_proj",
                f"{moe}.down_proj_weight": f"{moe}.experts.down_proj",
            }
            for name in ("gate", "up", "down"):
                key = f"{moe}.shared_expert.{name}_proj"
                mappings[f"{key}_weight"] = f"{key}.weight"
        return mappings

    def _scale_replicated(self):
        if self.ep_degree == 1:
            return
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj_weight", "shared_expert.down_proj_weight")):
                parameter.data.div_(self.ep_degree)
