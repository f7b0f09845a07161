"""Makes ``plans/tiny-moe``: a real DeepSeek-V2 checkpoint small enough to commit.

It has what the big one has (a dense first layer, routed and shared experts, multi-head latent
attention, bf16, several shards) and knows two sentences by heart. Greedy decoding from the first
word of either prints the rest, so a wrong schedule shows as wrong text::

    python plans/make_tiny_moe.py

takes about two minutes on two cores. The seed is fixed; the weights still differ in their last
bits between machines, and with them ``headers_sha256`` does not (it covers names and shapes).
"""

import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

FOLDER = Path(__file__).parent / "tiny-moe"
SENTENCES = (
    "Weights that do not fit the GPU wait in host memory and cross the link before their layer.",
    "Experts that few tokens visit are read in place, and those that many visit are copied ahead.",
)
END = "<|end|>"
NUM_STEPS = 600
LOSS_GOAL = 0.01
"""Low enough that rounding to bf16 changes no greedy token; ``main`` checks that."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token for each byte, and one that ends a sentence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, END])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def make_config(tokenizer: PreTrainedTokenizerFast) -> DeepseekV2Config:
    """Describe DeepSeek-V2-Lite's architecture with every width shrunk."""
    return DeepseekV2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=6,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels, [sentences, longest]; padding is not learnt."""
    rows = [tokenizer(sentence + END).input_ids for sentence in SENTENCES]
    longest = max(len(row) for row in rows)
    tokens = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), -100)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = labels[number, : len(row)] = torch.tensor(row)
    return tokens, labels


def train(model: DeepseekV2ForCausalLM, tokens: torch.Tensor, labels: torch.Tensor) -> None:
    """Learn the sentences by heart."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=NUM_STEPS)
    mask = (labels != -100).long()
    for step in range(NUM_STEPS):
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step + 1 == NUM_STEPS:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if loss.item() > LOSS_GOAL:
        raise SystemExit(f"loss {loss.item():.4f} is above {LOSS_GOAL}: train longer")


def recite(folder: Path) -> None:
    """Check that the saved files reproduce both sentences from their first word."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = DeepseekV2ForCausalLM.from_pretrained(folder).eval()
    for sentence in SENTENCES:
        prompt = tokenizer(sentence.split()[0], return_tensors="pt")
        tokens = model.generate(**prompt, max_new_tokens=128, do_sample=False)
        text = tokenizer.decode(tokens[0], skip_special_tokens=True)
        if text != sentence:
            raise SystemExit(f"it says {text!r} instead of {sentence!r}")
        print(text)


def save(model: DeepseekV2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the checkpoint in bf16 and in several shards, in place of what was there."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(FOLDER, max_shard_size="320KB")
    tokenizer.save_pretrained(FOLDER)


def main() -> None:
    """Train, save and check."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = DeepseekV2ForCausalLM(make_config(tokenizer))
    train(model, *encode(tokenizer))
    save(model, tokenizer)
    recite(FOLDER)
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text("utf-8"))
    print(f"{len(set(index['weight_map'].values()))} shards in {FOLDER}")


if __name__ == "__main__":
    main()
