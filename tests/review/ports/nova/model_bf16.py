"""A dense port as a person would write it: biases everywhere, branches on the number of ranks."""

import torch
import vllm_neuron.functional as NF
import vllm_neuron.nn as neuron_nn
from torch import nn
from vllm.distributed.parallel_state import get_tp_group
from vllm_neuron.model.kv_cache import KVSpec, LayerSpec
from vllm_neuron.nn.embedding import VocabDimShardedEmbedding
from vllm_neuron.nn.sampler import Sampler
from vllm_neuron.utils.checkpoints import SafetensorsCheckpoint
from vllm_neuron.utils.weight_loader import (
    SafetensorsWeightLoader,
    fused_qkv_weight_loader,
    scaled_bias_loader,
    set_weight_loader,
    sharding_weight_loader,
)

from .config import NovaConfig
from .rope import NovaRotaryEmbedding


class NovaRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        x = hidden_states.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight * x).to(hidden_states.dtype)


class NovaAttention(nn.Module):
    def __init__(self, config: NovaConfig, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.hidden_size = config.hidden_size
        self.scaling = self.head_dim**-0.5
        self.tp_group = get_tp_group()
        self.world_size = self.tp_group.world_size
        self.num_heads = config.num_attention_heads // self.world_size
        assert self.num_heads % 2 == 0, f"{self.num_heads} heads on each rank"
        self.num_kv_heads = max(1, config.num_key_value_heads // self.world_size)
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        dtype = config.torch_dtype
        self.qkv_proj_weight = nn.Parameter(torch.empty(self.hidden_size, q_size + 2 * kv_size, dtype=dtype))
        self.qkv_proj_bias = nn.Parameter(torch.empty(q_size + 2 * kv_size, dtype=dtype))
        self.o_proj_weight = nn.Parameter(torch.empty(q_size, self.hidden_size, dtype=dtype))
        self.o_proj_bias = nn.Parameter(torch.empty(self.hidden_size, dtype=dtype))
        set_weight_loader(
            self.qkv_proj_weight,
            fused_qkv_weight_loader(q_size, kv_size, 1, self.world_size, is_storage_transposed=True),
        )
        set_weight_loader(self.qkv_proj_bias, qkv_bias_loader(q_size, kv_size, self.world_size))
        set_weight_loader(
            self.o_proj_weight,
            sharding_weight_loader(0, q_size, self.world_size, is_storage_transposed=True),
        )
        set_weight_loader(self.o_proj_bias, scaled_bias_loader(scale=self.world_size))
        self.k_cache = None
        self.v_cache = None

    def forward(self, hidden_states, positions, position_embeddings, attn_metadata):
        metadata = attn_metadata[f"layers.{self.layer_idx}.self_attn"]
        is_decode = metadata["max_query_len"] <= metadata["decode_token_threshold"]
        if is_decode:
            return self.forward_decode(hidden_states, positions, position_embeddings, metadata)
        if self.world_size > 1:
            hidden_states = self.tp_group.all_gather(hidden_states, dim=0)
        return self.forward_prefill(hidden_states, position_embeddings, metadata)

    def forward_prefill(self, hidden_states: torch.Tensor, position_embeddings, metadata):
        cos, sin = position_embeddings
        q, k_cache, v_cache = NF.qkv_proj(
            hidden_states.unsqueeze(0),
            self.qkv_proj_weight,
            bias=self.qkv_proj_bias.unsqueeze(0),
            d_head=self.head_dim,
            cos_cache=cos.unsqueeze(0),
            sin_cache=sin.unsqueeze(0),
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            use_block_kv=True,
            block_size=metadata["block_size"],
            slot_mapping=metadata["slot_mapping"],
        )
        attn = NF.segmented_attention(
            q.view(-1, self.num_heads, self.head_dim).transpose(0, 1),
            k_cache,
            v_cache,
            block_tables=metadata["block_table_tensor"],
            prior_tokens=metadata["cached_seq_len"],
            block_size=metadata["block_size"],
            kv_segment_size=metadata["kv_segment_size"],
            scale=self.scaling,
            tp_out=True,
        )
        output = NF.o_proj(attn.unsqueeze(0), self.o_proj_weight, self.o_proj_bias[None])
        output = output.squeeze(0)
        if self.world_size > 1:
            output = self.tp_group.reduce_scatter(output, dim=0)
        return output

    def forward_decode(self, hidden_states: torch.Tensor, positions, position_embeddings, metadata):
        block_table = metadata["block_table_tensor"].to(torch.int32)
        batch = block_table.shape[0]
        cos, sin = (x[:, : self.head_dim // 2].t().reshape(-1, batch, 1) for x in position_embeddings)
        mask = NF.gen_attention_decode_mask(
            positions.to(torch.float32).view(1, -1),
            bs=batch,
            q_head=self.num_heads,
            s_active=1,
            s_prior=metadata["max_blocks_per_seq"] * metadata["block_size"],
            block_len=metadata["block_size"],
        )
        output = NF.attention_decode(
            hidden_states.view(batch, -1, self.hidden_size),
            W_qkv=self.qkv_proj_weight,
            bias_qkv=self.qkv_proj_bias.view(1, -1),
            cos=cos,
            sin=sin,
            active_blocks_table=block_table,
            K_cache=self.k_cache,
            V_cache=self.v_cache,
            attention_mask=mask,
            softmax_scale=self.scaling,
            update_cache=True,
            kv_cache_update_idx=metadata["slot_mapping"].view(batch, -1),
            W_out=self.o_proj_weight,
            bias_out=self.o_proj_bias.unsqueeze(0),
        )
        if self.world_size > 1:
            self.tp_group.all_reduce(output)
        return output


class NovaMLP(nn.Module):
    def __init__(self, config: NovaConfig):
        super().__init__()
        self.tp_group = get_tp_group()
        size = config.intermediate_size // self.tp_group.world_size
        self.gate_proj_weight = self._weight(config.hidden_size, size, 1, config)
        self.up_proj_weight = self._weight(config.hidden_size, size, 1, config)
        self.down_proj_weight = self._weight(size, config.hidden_size, 0, config)

    def _weight(self, rows, columns, shard_dim, config):
        weight = nn.Parameter(torch.empty(rows, columns, dtype=config.torch_dtype))
        size = (rows, columns)[shard_dim]
        set_weight_loader(weight, sharding_weight_loader(shard_dim, size, self.tp_group.world_size, True))
        return weight

    def forward(self, hidden_states, is_prefill):
        if is_prefill and self.tp_group.world_size > 1:
            hidden_states = self.tp_group.all_gather(hidden_states, dim=0)
        output = NF.mlp(hidden_states, self.gate_proj_weight, self.up_proj_weight, self.down_proj_weight)
        if is_prefill and self.tp_group.world_size > 1:
            output = self.tp_group.reduce_scatter(output, dim=0)
        if not is_prefill and self.tp_group.world_size > 1:
            self.tp_group.all_reduce(output)
        return output


class NovaDecoderLayer(nn.Module):
    def __init__(self, config: NovaConfig, layer_idx):
        super().__init__()
        self.input_layernorm = NovaRMSNorm(config.hidden_size, config.rms_norm_eps, config.torch_dtype)
        self.post_attention_layernorm = NovaRMSNorm(
            config.hidden_size, config.rms_norm_eps, config.torch_dtype
        )
        self.self_attn = NovaAttention(config, layer_idx)
        self.mlp = NovaMLP(config)

    def forward(self, hidden_states, positions, position_embeddings, attn_metadata, is_prefill):
        attn = self.self_attn(
            self.input_layernorm(hidden_states), positions, position_embeddings, attn_metadata
        )
        hidden_states = hidden_states + attn
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states), is_prefill)


class NovaModel(nn.Module):
    def __init__(self, config: NovaConfig):
        super().__init__()
        self.tp_group = get_tp_group()
        self.embed_tokens = VocabDimShardedEmbedding(
            config.vocab_size,
            config.hidden_size,
            dtype=config.torch_dtype,
            tp_group=self.tp_group.device_group,
        )
        self.layers = nn.ModuleList([NovaDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = NovaRMSNorm(config.hidden_size, config.rms_norm_eps, config.torch_dtype)
        self.rotary_emb = NovaRotaryEmbedding(config)
        self.dtype = config.torch_dtype

    def forward(self, input_ids, positions, attn_metadata, rank):
        metadata = attn_metadata["layers.0.self_attn"]
        is_prefill = metadata["max_query_len"] > metadata["decode_token_threshold"]
        hidden_states = self.embed_tokens(input_ids, scatter_tokens=is_prefill, rank=rank)
        embeddings = self.rotary_emb(positions, self.dtype)
        for layer in self.layers:
            hidden_states = layer(hidden_states, positions, embeddings, attn_metadata, is_prefill)
        hidden_states = self.norm(hidden_states)
        if is_prefill and self.tp_group.world_size > 1:
            hidden_states = self.tp_group.all_gather(hidden_states, dim=0)
        return hidden_states


class NovaForCausalLM(nn.Module):
    def __init__(self, config: NovaConfig):
        super().__init__()
        self.config = config
        self.tp_group = get_tp_group()
        sampling = config.neuron_config.on_device_sampling_config
        self.model = NovaModel(config)
        self.lm_head = neuron_nn.ColumnParallelLinear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            gather_output=not sampling,
            dtype=config.torch_dtype,
            tp_group=self.tp_group.device_group,
        )
        self.sampler = Sampler(sampling, process_group=self.tp_group.device_group) if sampling else None

    @classmethod
    def from_configs(cls, hf_config, neuron_config):
        return cls(NovaConfig.from_configs(hf_config, neuron_config))

    @torch.no_grad()
    def forward(self, input_ids, positions, attn_metadata=None, sampling_positions=None, rank=None, **kwargs):
        world_size = self.tp_group.world_size
        metadata = attn_metadata["layers.0.self_attn"]
        is_prefill = metadata["max_query_len"] > metadata["decode_token_threshold"]
        if is_prefill and (input_ids.shape[0] <= world_size or input_ids.shape[0] % world_size):
            raise ValueError("Prompt Length (T) must be > world_size (W) for SP.")
        hidden_states = self.model(input_ids, positions.to(torch.int32), attn_metadata, rank)
        logits = self.lm_head(hidden_states.index_select(0, sampling_positions))
        if self.sampler is not None:
            tokens = self.sampler(logits, kwargs.get("sampling_params"), tp_rank=rank)
            return tokens, None
        return logits

    def get_kv_spec(self):
        return KVSpec(
            layers=[
                LayerSpec(
                    name=f"layers.{i}.self_attn",
                    num_kv_heads=layer.self_attn.num_kv_heads,
                    head_size=layer.self_attn.head_dim,
                    dtype=self.config.torch_dtype,
                )
                for i, layer in enumerate(self.model.layers)
            ]
        )

    def bind_kv_cache(self, kv_caches):
        for i, layer in enumerate(self.model.layers):
            layer.self_attn.k_cache, layer.self_attn.v_cache = kv_caches[f"layers.{i}.self_attn"]

    def load_weights(self, checkpoint_path, device, cache_dir=None):
        mappings = {}
        for i in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{i}"
            attn = f"{prefix}.self_attn"
            for kind in ("weight", "bias"):
                mappings[f"{attn}.qkv_proj_{kind}"] = [
                    f"{attn}.{name}_proj.{kind}" for name in ("q", "k", "v")
                ]
                mappings[f"{attn}.o_proj_{kind}"] = f"{attn}.o_proj.{kind}"
            for name in ("gate", "up", "down"):
                mappings[f"{prefix}.mlp.{name}_proj_weight"] = f"{prefix}.mlp.{name}_proj.weight"
        if self.config.tie_word_embeddings:
            mappings["lm_head.weight"] = "model.embed_tokens.weight"
        checkpoint = SafetensorsCheckpoint(checkpoint_path, cache_dir)
        group = self.tp_group
        result = checkpoint.load_sharded_pipelined(
            group.rank_in_group, group.world_size, self, mappings, device
        )
        self.load_state_dict(result.state_dict, strict=False, assign=True)


def qkv_bias_loader(q_size, kv_size, num_shards):
    def transform(slices, rank):
        sizes = (q_size, kv_size, kv_size)
        parts = [s[size * rank : size * (rank + 1)] for s, size in zip(slices, sizes, strict=True)]
        return torch.cat([part.cpu() for part in parts])

    return SafetensorsWeightLoader(transform=transform)
