"""Facts of each model type that transformers knows and ``config.json`` need not say.

Literal tables, so that planning imports no transformers; a test compares each with the installed
one. Source: transformers 5.23, the class or file that each table names.
"""

from typing import NamedTuple

_TIED = """
bert-generation biogpt bloom cohere cohere2 cohere2_moe cohere_compass_text cpmant ctrl
ernie4_5 ernie4_5_moe falcon falcon_mamba gemma gemma2 gemma3 gemma3_text gemma3n
gemma3n_text gemma4 gemma4_assistant gemma4_text gemma4_unified gemma4_unified_assistant
gemma4_unified_text got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox_japanese granite_swa
jetmoe lfm2 lfm2_moe lfm3 mamba minicpm3 modernbert-decoder mpt openai-gpt opt
recurrent_gemma smollm3 starcoder2 trocr vaultgemma whisper xglm xlnet youtu zamba zamba2
zaya
"""
_UNTIED = """
afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba beam bitnet blt codegen cwm
dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 dots3_note
dots3_note_text emu3 exaone4 exaone_moe falcon_h1 flex_olmo flint fuyu git glm glm4 glm4_moe
glm4_moe_lite glm_moe_dsa gpt_neox gpt_oss gptj granite granitemoe granitemoe_swa
granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3
hy_v4 hyperclovax internlm3 iquestcoder jais2 jamba kimi_linear kolibri1 laguna llama llama4
llama4_text longcat_flash mamba2 mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text
ministral ministral3 mistral mixtral moshi nanochat nemotron nemotron_h olmo olmo2 olmo3
olmo_hybrid olmoe persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_5
qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp qwen4_exp_text rwkv
seed_oss solar_open stablelm xlstm
"""
TIED_BY_DEFAULT = dict.fromkeys(_TIED.split(), True) | dict.fromkeys(_UNTIED.split(), False)
"""Whether a model type's head is the embedding, not a matrix of its own, unless the config says.

Source: transformers 5.23, ``tie_word_embeddings`` of the config classes of all model types that
have a causal language model and are neither masked nor encoder-decoder models.
"""

CONV1D_TYPES = frozenset(("gpt-sw3", "gpt2", "openai-gpt"))
"""Model types whose layers store their matrices as [in, out].

Source: transformers 5.23, the models that are built of ``pytorch_utils.Conv1D``.
"""

EXPERTS_IN_OUT = frozenset(("aria_text", "gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe_text"))
"""Model types whose fused experts are stored as [experts, in, out], not [experts, out, in].

Source: transformers 5.23, ``is_transposed`` of the experts' class, ``Llama4TextExperts``, and
``Transpose`` in the conversion mapping of ``qwen3_vl_moe``.
"""

_SINKS = "deepseek_v4 flint gpt_oss granite_swa granitemoe_swa hy_v4 mimo_v2_flash"
SINK_TYPES = frozenset(_SINKS.split())
"""Model types whose softmax has a learned sink for each head.

Source: transformers 5.23, ``self.sinks`` of the attention classes.
"""

SOFT_CAPS = {"gemma2": 50.0, "vaultgemma": 50.0}
"""Caps of attention scores where the config names none.

Source: transformers 5.23, ``attn_logit_softcapping`` of the config classes.
"""

_FLOAT32 = """
axk1 axk2 deepseek_v3 deepseek_v32 dots1 dots3_note dots3_note_text exaone_moe glm4_moe
  glm4_moe_lite glm_moe_dsa hy_v3 kolibri1 mimo_v2_flash nemotron_h solar_open =
  e_score_correction_bias
bailing_hybrid = e_score_correction_bias conv1d dt_bias A_log
beam = e_score_correction_bias mlp.gate.weight
deepseek_v4 = attn_hc ffn_hc hc_head sinks position_bias e_score_correction_bias q_a_norm kv_norm
  input_layernorm post_attention_layernorm norm
ernie4_5_moe = gate.weight moe_statics
flint = gate.weight sinks
hy_v4 = e_score_correction_bias fn scale base hc_fn hc_scale hc_base weights_proj k_norm sinks
  lm_head
inkling2_text = e_score_correction_bias mlp.gate.weight post_attention_convolution
  post_mlp_convolution k_sconv.conv1d v_sconv.conv1d attention_input mlp_input final_input
inkling_text = attn_sconv mlp_sconv k_sconv v_sconv e_score_correction_bias gate.global_scale
"""
_FLOAT32_IN_FLOAT16 = """
axk2 deepseek_v32 glm_moe_dsa = indexer.weights_proj
afmoe = input_layernorm post_attention_layernorm pre_mlp_layernorm post_mlp_layernorm q_norm
  k_norm norm expert_bias
deepseek_v4 = self_attn.compressor.kv_proj self_attn.compressor.gate_proj
  self_attn.compressor.indexer.kv_proj self_attn.compressor.indexer.gate_proj
  self_attn.compressor.indexer.scorer.weights_proj
gpt_oss = post_attention_layernorm input_layernorm norm
longcat_flash = classifier.weight
rwkv = time_decay time_first
"""


def _by_type(table: str) -> dict[str, tuple[str, ...]]:
    """Read lines of model types = parts of names; an indented line goes on with the one before."""
    lines = (line.partition(" = ") for line in table.replace("\n  ", " ").strip().splitlines())
    return {name: tuple(parts.split()) for names, _, parts in lines for name in names.split()}


FLOAT32_PARTS = _by_type(_FLOAT32)
"""Parts of names whose parameters stay in float32 in a model computed in bfloat16 or float16.

Source: transformers 5.23, ``_keep_in_fp32_modules_strict`` of the causal models' classes.
"""
FLOAT32_PARTS_IN_FLOAT16 = _by_type(_FLOAT32_IN_FLOAT16)
"""Parts of names whose parameters stay in float32 in a model computed in float16 only.

Source: transformers 5.23, ``_keep_in_fp32_modules`` of the causal models' classes.
"""


class Pattern(NamedTuple):
    """The layers of a model type that see part of the context, where its config lists none."""

    cycle: str
    """One letter a layer, repeated: f(ull), s(liding), k (chunked), l(inear), ? (anything else)."""
    tokens: int | None = None
    """Window in tokens where the config has no key for it."""
    head: str = ""
    """Layers before the cycle."""
    last: str = ""
    """The last layer, where it does not follow the cycle."""
    key: str = "sliding_window"
    """Key of the window in ``config.json``."""
    switched: bool = False
    """Whether the config must switch windows on with ``use_sliding_window``."""
    first: int | None = None
    """Layers before it are full; ``max_window_layers`` in the config goes before it."""
    stop: int | None = None
    """Layers from it on are full; ``max_window_layers`` in the config goes before it."""
    every: str = ""
    """Key of the number of layers from one of the rarer kind to the next, if there is one."""
    by_rotary: bool = False
    """Whether ``no_rope_layers`` tells layers of the cycle's first kind (1) from its last (0)."""


_SWITCHED = Pattern("s", 4096, switched=True)
_PATTERNS = {
    "afmoe": Pattern("sssf", 1024, every="global_attn_every_n_layers"),
    "beam gemma4 gemma4_text": Pattern("sssssf", 512, last="f"),
    "blt doge ministral3 mixtral olmoe phi3 phi4_multimodal phimoe starcoder2": Pattern("s"),
    "cohere2 cohere2_moe exaone4 exaone_moe": Pattern("sssf", 4096, every="sliding_window_pattern"),
    "cwm": Pattern("fsss", 8192),
    "dots1": Pattern("s", 4096, first=62),
    "dots3_note dots3_note_text": Pattern("sssf", 512, head="ff"),
    "flint": Pattern("sssf", 513, head="ff", last="f"),
    "gemma2 vaultgemma": Pattern("sf", 4096),
    "gemma3 gemma3_text": Pattern("sssssf", 4096, every="sliding_window_pattern"),
    "gemma3n gemma3n_text": Pattern("ssssf", 512),
    "gemma4_unified gemma4_unified_text": Pattern("sssssf", 1024, last="f"),
    "gpt_neo": Pattern("fs", 256, key="window_size"),
    "gpt_oss": Pattern("sf", 128),
    "granite_swa granitemoe_swa": Pattern("fsss", 128),
    "inkling2_text": Pattern("sssss?", 1024, key="sliding_window_size"),
    "inkling_text": Pattern("sssss?", 512, key="sliding_window_size"),
    "kolibri1": Pattern("ssssf", 513),
    "lfm3": Pattern("?f?s", 256, head="?"),
    "llama4 llama4_text": Pattern(
        "kkkf", 8192, key="attention_chunk_size", every="no_rope_layer_interval", by_rotary=True
    ),
    "mimo_v2_flash": Pattern("sssssf", 129, head="fssssf"),
    "minimax": Pattern("sl"),
    "ministral mistral": Pattern("s", 4096),
    "modernbert-decoder": Pattern(
        "fss", 128, key="local_attention", every="global_attn_every_n_layers"
    ),
    "olmo3": Pattern("sssf", 4096),
    "olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next": Pattern(
        "lllf", every="full_attention_interval"
    ),
    "qwen2 qwen3": _SWITCHED._replace(first=28),
    "qwen2_5_vl_text qwen2_vl_text": _SWITCHED._replace(first=80),
    "qwen2_moe": Pattern("sf", 4096, switched=True, stop=28),
    "qwen3_moe": _SWITCHED,
    "recurrent_gemma": Pattern("lls", 2048, key="attention_window_size"),
    "smollm3": Pattern("fffs", switched=True, every="no_rope_layer_interval", by_rotary=True),
}
PATTERNS = {name: pattern for names, pattern in _PATTERNS.items() for name in names.split()}
"""Layers with a window by model type; the others' attention always sees the whole context.

Source: transformers 5.23, ``layer_types`` and ``sliding_window`` as the config classes fill them
in, and the causal models that make a sliding mask, or tell attention of a window, in every layer.
"""
