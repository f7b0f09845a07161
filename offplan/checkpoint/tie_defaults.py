"""Which decoders tie their head to the embedding when ``config.json`` does not say.

Source: transformers 5.23, ``tie_word_embeddings`` of the config classes of all model types that
have a causal language model and are neither masked nor encoder-decoder models.
"""

_TIED = """
bert-generation biogpt bloom cohere cohere2 cohere2_moe cohere_compass_text cpmant ctrl
ernie4_5 ernie4_5_moe falcon falcon_mamba gemma gemma2 gemma3 gemma3_text gemma3n
gemma3n_text gemma4 gemma4_assistant gemma4_text gemma4_unified gemma4_unified_assistant
gemma4_unified_text got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox_japanese granite_swa
jetmoe lfm2 lfm2_moe lfm3 mamba minicpm3 modernbert-decoder mpt openai-gpt opt
recurrent_gemma smollm3 starcoder2 trocr vaultgemma whisper xglm xlnet youtu zamba zamba2
zaya
"""
TIED_BY_DEFAULT = frozenset(_TIED.split())

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
UNTIED_BY_DEFAULT = frozenset(_UNTIED.split())
