"""Qwen3MoeForCausalLM for the vLLM Neuron backend.

Marks, for whoever adapts this file to another architecture:
    # >>> PARALLELISM: ... <<<   how the work is split over ranks; keep.
    # <-- MODEL-SPECIFIC: ...    what this architecture decides; change.

Tensor parallel: attention heads, MLP columns and the vocabulary are split over the ranks. Sequence parallel
in prefill: between the blocks a rank holds T/TP tokens, gathered before attention and MLP, then scattered.

Shapes: T tokens of a step, padded; in decode T = B*S, B sequences with S new tokens each. R sampled
positions, H hidden size, V vocabulary, Nh query and Nkv KV heads of a rank, Dh head dim, E experts,
of which a token passes K. Weights [in, out].
"""

import re
from typing import Any

import nki.language as nl
import torch
from nkilib.core.moe.moe_cte.moe_cte import MoECTEImplementation
from nkilib.core.utils.common_types import ActFnType, ExpertAffinityScaleMode, NormType, RouterActFnType
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.models.interfaces import SupportsEagle3

import vllm_neuron.functional as NF
from vllm_neuron.functional.moe.router import RouterComputationOrder
from vllm_neuron.model.kv_cache import KVSpec, LayerSpec
from vllm_neuron.model.neuron_config import NeuronConfig
from vllm_neuron.nn import ColumnParallelLinear
from vllm_neuron.nn.embedding import VocabDimShardedEmbedding
from vllm_neuron.nn.rejection_sampler import rejection_sampler
from vllm_neuron.nn.sampler import Sampler
from vllm_neuron.utils.checkpoints import SafetensorsCheckpoint
from vllm_neuron.utils.weight_loader import fused_qkv_weight_loader, set_weight_loader, sharding_weight_loader

from .config import Qwen3MoeConfig
from .weight_loaders import expert_down_loader, expert_gate_up_loader

CosSin = tuple[Tensor, Tensor]  # [1, T, Dh] each in prefill, [Dh/2, B, S] in decode
Metadata = dict[str, Any]

EXPERT_BLOCK_SIZE = 256  # tokens of one expert that the prefill kernel takes at a time; a multiple of 128


# ===== Section 1: Normalization ===================================================================
class Qwen3MoeRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), computed in float32, times the weight in the input's dtype."""

    def __init__(self, size: int, config: Qwen3MoeConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=config.torch_dtype))
        self.variance_epsilon = config.rms_norm_eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)  # <-- MODEL-SPECIFIC: plain weight, no 1 + weight


# ===== Section 2: Rotary position embedding =======================================================
class Qwen3MoeRotaryEmbedding(nn.Module):
    """cos and sin of the rotary angles; the halves of a head are rotated against each other."""

    def __init__(self, config: Qwen3MoeConfig, rope: dict[str, Any]):
        super().__init__()
        self.head_dim = config.head_dim
        self.dtype = config.torch_dtype
        self.rope = rope

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin [T, Dh/2]."""
        freqs = positions.float()[:, None] * self.inv_freq(positions.device)  # [T, Dh/2]
        return freqs.cos().to(self.dtype), freqs.sin().to(self.dtype)

    def inv_freq(self, device: torch.device) -> Tensor:
        """Inverse frequencies [Dh/2], float32. No buffer: the model is created on the meta device."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
        return 1.0 / self.rope["rope_theta"] ** exponents  # <-- MODEL-SPECIFIC: no RoPE scaling


# ===== Section 3: Attention =======================================================================
class Qwen3MoeAttention(nn.Module):
    """Grouped-query attention over a paged KV cache."""

    k_cache: Tensor  # [blocks, Nkv, block_size, Dh], bound by bind_kv_cache
    v_cache: Tensor

    def __init__(self, config: Qwen3MoeConfig, layer_idx: int):
        super().__init__()
        self.layer_name = f"layers.{layer_idx}.self_attn"
        self.hidden_size = config.hidden_size
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5  # <-- MODEL-SPECIFIC: the usual scale

        # >>> PARALLELISM: heads are split over the ranks, KV heads replicated when fewer than ranks <<<
        self.tp_group = get_tp_group()
        tp_size = self.tp_group.world_size
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        assert heads % tp_size == 0, f"{heads} heads, TP {tp_size}"
        assert kv_heads % tp_size == 0 or tp_size % kv_heads == 0, f"{kv_heads} KV heads, TP {tp_size}"
        self.num_heads = heads // tp_size
        self.num_kv_heads = max(1, kv_heads // tp_size)
        num_kv_replicas = max(1, tp_size // kv_heads)
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv_size, dtype = q_size + 2 * kv_size, config.torch_dtype

        self.qkv_proj_weight = nn.Parameter(torch.empty(self.hidden_size, qkv_size, dtype=dtype))
        qkv_loader = fused_qkv_weight_loader(
            q_size, kv_size, 1, tp_size, is_storage_transposed=True, num_kv_replicas=num_kv_replicas
        )
        set_weight_loader(self.qkv_proj_weight, qkv_loader)
        # <-- MODEL-SPECIFIC: q and k are normalised before they are rotated
        self.qk_norm_eps = config.rms_norm_eps
        self.q_norm_weight = nn.Parameter(torch.empty(self.head_dim, dtype=dtype))
        self.k_norm_weight = nn.Parameter(torch.empty(self.head_dim, dtype=dtype))
        self.o_proj_weight = nn.Parameter(torch.empty(q_size, self.hidden_size, dtype=dtype))
        row_loader = sharding_weight_loader(0, q_size, tp_size, is_storage_transposed=True)
        set_weight_loader(self.o_proj_weight, row_loader)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin,
        attn_metadata: dict[str, Metadata],
        decode_mask: Tensor | None,
    ) -> Tensor:
        """Prefill (no mask): [T/TP, H] -> [T/TP, H]. Decode: [T, H] -> [T, H]."""
        metadata = attn_metadata[self.layer_name]
        if decode_mask is not None:
            output = self.decode(hidden_states, position_embeddings, metadata, decode_mask)
            # >>> PARALLELISM: sum over the ranks' heads, in place <<<
            self.tp_group.all_reduce(output)
            return output

        # >>> PARALLELISM: gather the sequence; after, sum over the ranks' heads and scatter it <<<
        hidden_states = self.tp_group.all_gather(hidden_states, dim=0)  # [T, H]
        prefill = self.segmented_prefill if metadata.get("kv_segment_size") else self.full_prefill
        attn_output = prefill(hidden_states, position_embeddings, metadata)  # [Nh, Dh, T]
        output = NF.o_proj(attn_output.unsqueeze(0), self.o_proj_weight).squeeze(0)  # [T, H]
        return self.tp_group.reduce_scatter(output, dim=0)  # [T/TP, H]

    def full_prefill(self, hidden_states: Tensor, position_embeddings: CosSin, metadata: Metadata) -> Tensor:
        """A whole prompt [T, H] -> [Nh, Dh, T]; K and V are written to the cache."""
        qkv = self.qkv_proj(hidden_states, position_embeddings)  # [1, T, (Nh + 2*Nkv)*Dh]
        qkv = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)  # [T, Nh + 2*Nkv, Dh]
        q, k, v = qkv.transpose(0, 1).split((self.num_heads, self.num_kv_heads, self.num_kv_heads))

        blocks = metadata["slot_mapping"] // metadata["block_size"]  # [T]
        offsets = metadata["slot_mapping"] % metadata["block_size"]  # [T]
        heads = torch.arange(self.num_kv_heads, device=blocks.device)[:, None]  # [Nkv, 1]
        self.k_cache.index_put_((blocks, heads, offsets), k)
        self.v_cache.index_put_((blocks, heads, offsets), v)

        # q [Nh, Dh, T], k [Nkv, Dh, T], v [Nkv, T, Dh]
        return NF.flash_attention(
            q.transpose(1, 2), k.transpose(1, 2), v, scale=self.scaling, tp_q=False, tp_out=True
        )

    def segmented_prefill(
        self, hidden_states: Tensor, position_embeddings: CosSin, metadata: Metadata
    ) -> Tensor:
        """A segment of a prompt [T, H] -> [Nh, Dh, T]; attends to the cached segments before it, too."""
        q, k_cache, v_cache = self.qkv_proj(
            hidden_states,
            position_embeddings,
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            use_block_kv=True,
            block_size=metadata["block_size"],
            slot_mapping=metadata["slot_mapping"].to(torch.int32),
        )  # q [1, T, Nh*Dh]
        return NF.segmented_attention(
            q.view(-1, self.num_heads, self.head_dim).transpose(0, 1),  # [Nh, T, Dh]
            k_cache,
            v_cache,
            block_tables=metadata["block_table_tensor"],
            prior_tokens=metadata["cached_seq_len"],
            block_size=metadata["block_size"],
            kv_segment_size=metadata["kv_segment_size"],
            scale=self.scaling,
            tp_q=True,
            tp_out=True,
        )

    def qkv_proj(self, hidden_states: Tensor, position_embeddings: CosSin, **cache_write: Any) -> Any:
        """Project [T, H] and rotate q and k; `cache_write` makes the operator store K and V itself."""
        cos, sin = position_embeddings
        return NF.qkv_proj(
            hidden_states.unsqueeze(0),
            self.qkv_proj_weight,
            d_head=self.head_dim,
            cos_cache=cos,
            sin_cache=sin,
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            qk_norm_pre_rope_q_norm=NormType.RMS_NORM,
            qk_norm_pre_rope_k_norm=NormType.RMS_NORM,
            qk_norm_pre_rope_eps=self.qk_norm_eps,
            qk_norm_pre_rope_q_gamma=self.q_norm_weight.unsqueeze(0),
            qk_norm_pre_rope_k_gamma=self.k_norm_weight.unsqueeze(0),
            **cache_write,
        )

    def decode(
        self, hidden_states: Tensor, position_embeddings: CosSin, metadata: Metadata, mask: Tensor
    ) -> Tensor:
        """[T, H] -> this rank's share of the output [T, H]; K and V are written to the cache."""
        cos, sin = position_embeddings
        block_table = metadata["block_table_tensor"]  # [B, blocks per sequence], int32
        num_seqs = block_table.shape[0]
        return NF.attention_decode(
            hidden_states.view(num_seqs, -1, self.hidden_size),  # [B, S, H]
            W_qkv=self.qkv_proj_weight,
            rmsnorm_QK_pre_rope_enabled=True,
            rmsnorm_QK_pre_rope_eps=self.qk_norm_eps,
            rmsnorm_QK_pre_rope_W_Q=self.q_norm_weight.unsqueeze(0),
            rmsnorm_QK_pre_rope_W_K=self.k_norm_weight.unsqueeze(0),
            cos=cos,
            sin=sin,
            active_blocks_table=block_table,
            K_cache=self.k_cache,
            V_cache=self.v_cache,
            attention_mask=mask,
            softmax_scale=self.scaling,
            update_cache=True,
            kv_cache_update_idx=metadata["slot_mapping"].view(num_seqs, -1).to(torch.uint32),  # [B, S]
            W_out=self.o_proj_weight,
        )


# ===== Section 4: MLP =============================================================================
class Qwen3MoeMoE(nn.Module):
    """Every token passes the few experts that the router chooses for it."""

    def __init__(self, config: Qwen3MoeConfig):
        super().__init__()
        # >>> PARALLELISM: a rank has all experts, and a part of each one's intermediate dimension <<<
        self.tp_group = get_tp_group()
        tp_size = self.tp_group.world_size
        hidden_size, dtype = config.hidden_size, config.torch_dtype
        self.num_experts, self.top_k = config.num_experts, config.num_experts_per_tok
        assert config.moe_intermediate_size % tp_size == 0, f"I {config.moe_intermediate_size}, TP {tp_size}"
        shard_size = config.moe_intermediate_size // tp_size

        # float32: rounding must not decide which experts a token gets
        self.router_weight = nn.Parameter(torch.empty(self.num_experts, hidden_size, dtype=torch.float32))

        self.expert_gate_up_weight = nn.Parameter(
            torch.empty(self.num_experts, hidden_size, 2, shard_size, dtype=dtype)
        )
        set_weight_loader(self.expert_gate_up_weight, expert_gate_up_loader(shard_size, tp_size))
        self.expert_down_weight = nn.Parameter(
            torch.empty(self.num_experts, shard_size, hidden_size, dtype=dtype)
        )
        set_weight_loader(self.expert_down_weight, expert_down_loader(shard_size, tp_size))

    def forward(self, hidden_states: Tensor, norm: nn.Module, is_prefill: bool) -> Tensor:
        """Prefill: [T/TP, H] -> [T/TP, H]. Decode: [T, H] -> [T, H]. `norm` is applied first."""
        if is_prefill:
            hidden_states = norm(hidden_states)
            affinities = self.route(hidden_states)  # [T/TP, E]
            # >>> PARALLELISM: gather the sequence and its routing <<<
            hidden_states = self.tp_group.all_gather(hidden_states, dim=0)  # [T, H]
            affinities = self.tp_group.all_gather(affinities, dim=0)  # [T, E]
            output = self.prefill_experts(hidden_states, affinities)
        else:
            output = self.decode_experts(hidden_states, norm)

        # >>> PARALLELISM: sum the ranks' columns, and scatter the sequence in prefill <<<
        if is_prefill:
            return self.tp_group.reduce_scatter(output, dim=0)  # [T/TP, H]
        self.tp_group.all_reduce(output)
        return output

    def route(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> the experts' weights [T, E] in float32, zero for those that a token does not pass."""
        # <-- MODEL-SPECIFIC: softmax; a token's weights sum to one
        return NF.router(
            hidden_states,
            self.router_weight.T,
            self.top_k,
            activation="softmax",
            router_computation_order=RouterComputationOrder.PRENORM_LINEAR_TOPK_ACT_SCATTER,
        )

    def prefill_experts(self, hidden_states: Tensor, affinities: Tensor) -> Tensor:
        """[T, H] and weights [T, E] -> this rank's share of the experts' output [T, H]."""
        affinities, token_position_to_id, block_to_expert, conditions = NF.build_blockwise_mapping(
            affinities,
            num_local_experts=self.num_experts,
            num_experts_per_token=self.top_k,
            block_size=EXPERT_BLOCK_SIZE,
            moe_group=self.tp_group,
        )
        return NF.moe_cte(
            hidden_states,
            affinities,
            self.expert_gate_up_weight,
            self.expert_down_weight,
            token_position_to_id,
            block_to_expert,
            block_size=EXPERT_BLOCK_SIZE,
            implementation=MoECTEImplementation.shard_on_block,
            conditions=conditions,
            skip_token=True,
            expert_affinities_scaling_mode=ExpertAffinityScaleMode.POST_SCALE,
        )

    def decode_experts(self, hidden_states: Tensor, norm: nn.Module) -> Tensor:
        """[T, H], not normed yet -> this rank's share of the experts' output [T, H]."""
        num_tokens = hidden_states.shape[0]
        return NF.moe_block_tkg(
            hidden_states,
            norm.weight.unsqueeze(0),
            self.router_weight.T,
            self.expert_gate_up_weight,
            self.expert_down_weight,
            rank_id=torch.zeros(1, 1, dtype=torch.int32, device=hidden_states.device),
            top_k=self.top_k,
            eps=norm.variance_epsilon,
            router_act_fn=RouterActFnType.SOFTMAX,
            router_pre_norm=True,  # <-- MODEL-SPECIFIC: softmax of all experts
            norm_topk_prob=True,
            expert_affinities_scaling_mode=ExpertAffinityScaleMode.POST_SCALE,
            hidden_act_fn=ActFnType.SiLU,
            router_mm_dtype=nl.float32,
            skip_router_logits=True,
            is_all_expert=use_all_experts(num_tokens, self.top_k, self.num_experts),
        )


def use_all_experts(num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether decode runs all experts; it can read the chosen ones alone for up to 128 tokens."""
    return num_tokens > 128 or num_tokens * top_k >= num_experts


# ===== Section 5: Decoder layer ===================================================================
class Qwen3MoeDecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Qwen3MoeConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = Qwen3MoeRMSNorm(config.hidden_size, config)
        self.post_attention_layernorm = Qwen3MoeRMSNorm(config.hidden_size, config)
        self.self_attn = Qwen3MoeAttention(config, layer_idx)
        self.mlp = Qwen3MoeMoE(config)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin,
        attn_metadata: dict[str, Metadata],
        decode_mask: Tensor | None,
    ) -> Tensor:
        """[T/TP, H] in prefill, [T, H] in decode; same shape out."""
        # <-- MODEL-SPECIFIC: a norm before each block, none after, plain residuals
        normed = self.input_layernorm(hidden_states)
        output = self.self_attn(normed, position_embeddings, attn_metadata, decode_mask)
        hidden_states = hidden_states + output

        # The decode operator of the experts applies the norm itself.
        output = self.mlp(hidden_states, self.post_attention_layernorm, is_prefill=decode_mask is None)
        return hidden_states + output


# ===== Section 6: Backbone ========================================================================
class Qwen3MoeModel(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: Qwen3MoeConfig):
        super().__init__()
        self.aux_hidden_state_layers: tuple[int, ...] = ()  # whose inputs a drafter gets, set by the runner
        # >>> PARALLELISM: the vocabulary is split over the ranks <<<
        self.tp_group = get_tp_group()
        device_group = self.tp_group.device_group
        self.embed_tokens = VocabDimShardedEmbedding(
            config.vocab_size, config.hidden_size, dtype=config.torch_dtype, tp_group=device_group
        )
        self.layers = nn.ModuleList(Qwen3MoeDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3MoeRMSNorm(config.hidden_size, config)
        self.rotary_emb = Qwen3MoeRotaryEmbedding(config, config.rope_parameters)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attn_metadata: dict[str, Metadata], rank: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """input_ids, positions [T] -> hidden states [T, H], and those for a drafter [T, layers*H] or None."""
        metadata = attn_metadata[self.layers[0].self_attn.layer_name]
        is_prefill = metadata["max_query_len"] > metadata["decode_token_threshold"]

        # >>> PARALLELISM: prefill splits the sequence over the ranks <<<
        num_tokens, tp_size = input_ids.shape[0], self.tp_group.world_size
        if is_prefill and (num_tokens <= tp_size or num_tokens % tp_size != 0):
            raise ValueError(
                f"Prompt Length ({num_tokens}) must be > world_size ({tp_size}) and a multiple of it."
            )

        position_embeddings = self.cos_sin(self.rotary_emb, positions, metadata)
        decode_mask = None if is_prefill else self.decode_mask(positions, metadata)

        # >>> PARALLELISM: the embedding scatters a prefill's sequence: [T/TP, H], gathered after the norm <<<
        hidden_states = self.embed_tokens(input_ids, scatter_tokens=is_prefill, rank=rank)
        states = [hidden_states]  # before each layer, and after the last
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings, attn_metadata, decode_mask)
            states.append(hidden_states)
        outputs = [self.norm(hidden_states), *(states[i] for i in self.aux_hidden_state_layers)]
        if is_prefill:
            outputs = [self.tp_group.all_gather(output, dim=0) for output in outputs]
        return outputs[0], torch.cat(outputs[1:], dim=-1) if outputs[1:] else None

    def cos_sin(self, rotary_emb: nn.Module, positions: Tensor, metadata: Metadata) -> CosSin:
        """cos and sin as the attention operators take them: [1, T, Dh] in prefill, [Dh/2, B, S] in decode."""
        cos, sin = rotary_emb(positions)  # [T, Dh/2]
        if metadata["max_query_len"] > metadata["decode_token_threshold"]:
            return torch.cat((cos, cos), dim=-1).unsqueeze(0), torch.cat((sin, sin), dim=-1).unsqueeze(0)
        num_seqs = metadata["block_table_tensor"].shape[0]
        return cos.t().reshape(cos.shape[1], num_seqs, -1), sin.t().reshape(sin.shape[1], num_seqs, -1)

    def decode_mask(self, positions: Tensor, metadata: Metadata) -> Tensor:
        """Mask of a decode step [context slots, B, Nh, S], the same for every layer."""
        num_seqs = metadata["block_table_tensor"].shape[0]
        return NF.gen_attention_decode_mask(
            positions.float().unsqueeze(0),  # [1, B*S]
            bs=num_seqs,
            q_head=self.layers[0].self_attn.num_heads,
            s_active=positions.shape[0] // num_seqs,
            s_prior=metadata["max_blocks_per_seq"] * metadata["block_size"],
            block_len=metadata["block_size"],
        )


# ===== Section 7: LM head =========================================================================
class Qwen3MoeForCausalLM(nn.Module, SupportsEagle3):
    """The model as the runner calls it."""

    unused_keys = r".*rotary_emb\.inv_freq"  # of a checkpoint

    def __init__(self, config: Qwen3MoeConfig):
        super().__init__()
        self.config = config
        self.model = Qwen3MoeModel(config)

        self.tp_group = get_tp_group()
        device_group, neuron_config = self.tp_group.device_group, config.neuron_config
        self.sampler: Sampler | None = None
        self._gather_logits = False
        if neuron_config is not None and neuron_config.on_device_sampling_config:
            self.sampler = Sampler(neuron_config.on_device_sampling_config, process_group=device_group)
            self._gather_logits = bool(neuron_config.max_logprobs != 0 or neuron_config.debug_logits_dir)

        # >>> PARALLELISM: the vocabulary is split over the ranks; the sampler takes logits as they are <<<
        self.lm_head = ColumnParallelLinear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            gather_output=self.sampler is None,
            dtype=config.torch_dtype,
            tp_group=device_group,
        )

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: NeuronConfig | None = None) -> "Qwen3MoeForCausalLM":
        return cls(Qwen3MoeConfig.from_configs(hf_config, neuron_config))

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        attn_metadata: dict[str, Metadata],
        sampling_positions: Tensor,
        sampling_params: Tensor | None = None,
        spec_decode_metadata: Any = None,
        logit_mask: Tensor | None = None,
        rank: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """One prefill or decode step.

        Args:
            input_ids, positions: [T], int32; positions are absolute.
            attn_metadata: Per layer name: block table, slots, sizes.
            sampling_positions: [R], indices into T of the tokens to sample after.
            sampling_params: [R, 3] float32 (top_k, top_p, temperature), for sampling on the device.
            logit_mask: [R, V or V/TP] bool, True where a token is allowed.
            rank: TP rank as a tensor, so that it is no constant of the graph.

        Returns:
            Logits [R, V]. With sampling on the device token ids [R], and logits [R, V] or None; with k drafts
            to verify the accepted ids [B, k+1] alone. Hidden states for a drafter [T, layers*H] come second.

        Raises:
            ValueError: A prefill whose tokens cannot be split over the ranks.
            NotImplementedError: Prompt embeddings.
        """
        if inputs_embeds is not None:
            raise NotImplementedError("prompt embeddings are not implemented for this model")

        hidden_states, aux = self.model(input_ids, positions.to(torch.int32), attn_metadata, rank)
        hidden_states = torch.index_select(hidden_states, 0, sampling_positions)  # [R, H]
        logits = self.lm_head(hidden_states)  # [R, V], or [R, V/TP] when sampling on the device
        if self.sampler is None:
            return logits if aux is None else (logits, aux)
        sampled = self.sampler(logits, sampling_params, logit_mask=logit_mask, tp_rank=rank)  # [R]
        gathered = self.tp_group.all_gather(logits, dim=1) if self._gather_logits else None
        if spec_decode_metadata is not None:
            sampled = rejection_sampler(spec_decode_metadata, sampled)  # [B, k+1], -1 after the accepted ones
            if aux is None:
                return sampled
        return (sampled, gathered) if aux is None else (sampled, aux, gathered)

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Give the hidden states before these layers to a drafter; the number of layers is after the last."""
        assert all(0 <= layer <= len(self.model.layers) for layer in layers), f"no such layers: {layers}"
        self.model.aux_hidden_state_layers = tuple(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """The layers that were set, else the default: an early one, the middle, a late one."""
        n = len(self.model.layers)
        return self.model.aux_hidden_state_layers or (min(2, n), n // 2, max(n - 3, 0))

    def get_kv_spec(self) -> KVSpec:
        dtype = self.config.torch_dtype
        attentions = [layer.self_attn for layer in self.model.layers]
        return KVSpec(layers=[LayerSpec(a.layer_name, a.num_kv_heads, a.head_dim, dtype) for a in attentions])

    def bind_kv_cache(self, kv_caches: dict[str, list[Tensor]]) -> None:
        """Take each layer's [k_cache, v_cache], both [blocks, Nkv, block_size, Dh].

        Raises:
            KeyError: A layer has no cache.
            ValueError: The cache is quantized, or of another dtype than the model.
        """
        for attention in (layer.self_attn for layer in self.model.layers):
            if attention.layer_name not in kv_caches:
                raise KeyError(f"no KV cache for layer {attention.layer_name}")
            attention.k_cache, attention.v_cache = kv_caches[attention.layer_name]
            if (dtype := attention.k_cache.dtype) != self.config.torch_dtype:
                raise ValueError(f"a KV cache of {dtype} in a model of {self.config.torch_dtype}")

    def load_weights(self, checkpoint_path: str, device: torch.device, cache_dir: str | None = None) -> None:
        """Load this rank's shard of a checkpoint (folder or hub id).

        Raises:
            RuntimeError: Parameters found no weights, or keys no parameter.
        """
        checkpoint, group = SafetensorsCheckpoint(checkpoint_path, cache_dir), self.tp_group
        result = checkpoint.load_sharded_pipelined(
            group.rank_in_group, group.world_size, self, self.weight_mappings(), device, strict=False
        )
        unknown = [key for key in result.unexpected_keys if not re.fullmatch(self.unused_keys, key)]
        if result.missing_keys or unknown:
            raise RuntimeError(f"no weights for {result.missing_keys}, no parameter for {unknown}")
        # assign: the parameters are on the meta device, there is nothing to copy into.
        self.load_state_dict(result.state_dict, strict=False, assign=True)

    def weight_mappings(self) -> dict[str, str | list[str]]:
        """Checkpoint keys of each parameter, in the order its loader takes them."""
        mappings: dict[str, str | list[str]] = {  # <-- MODEL-SPECIFIC: the checkpoint's names
            "model.embed_tokens.weight": "model.embed_tokens.weight",
            "model.norm.weight": "model.norm.weight",
            "lm_head.weight": "lm_head.weight",
        }
        for i in range(self.config.num_hidden_layers):
            layer = f"model.layers.{i}"
            mappings |= {
                f"{layer}.input_layernorm.weight": f"{layer}.input_layernorm.weight",
                f"{layer}.post_attention_layernorm.weight": f"{layer}.post_attention_layernorm.weight",
                f"{layer}.self_attn.qkv_proj_weight": [
                    f"{layer}.self_attn.q_proj.weight",
                    f"{layer}.self_attn.k_proj.weight",
                    f"{layer}.self_attn.v_proj.weight",
                ],
                f"{layer}.self_attn.q_norm_weight": f"{layer}.self_attn.q_norm.weight",
                f"{layer}.self_attn.k_norm_weight": f"{layer}.self_attn.k_norm.weight",
                f"{layer}.self_attn.o_proj_weight": f"{layer}.self_attn.o_proj.weight",
                f"{layer}.mlp.router_weight": f"{layer}.mlp.gate.weight",
                f"{layer}.mlp.expert_gate_up_weight": [
                    f"{layer}.mlp.experts.{e}.gate_proj.weight" for e in range(self.config.num_experts)
                ]
                + [f"{layer}.mlp.experts.{e}.up_proj.weight" for e in range(self.config.num_experts)],
                f"{layer}.mlp.expert_down_weight": [
                    f"{layer}.mlp.experts.{e}.down_proj.weight" for e in range(self.config.num_experts)
                ],
            }
        return mappings
