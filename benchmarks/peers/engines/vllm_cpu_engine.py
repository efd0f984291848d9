"""vLLM on CPU: a float32 copy of the dequantised weights, eager."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

from protocol import serve


def write_float_copy(gguf, folder):
    """Write config.json and model.safetensors of the dequantised GGUF (llama architecture, tied head)."""
    import gguf as reader_package
    import numpy as np
    from safetensors.numpy import save_file

    reader = reader_package.GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]

    def unpermute(weight, count):
        return weight.reshape(count, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)

    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    tensors = {}
    for tensor in reader.tensors:
        values = reader_package.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape(tuple(int(n) for n in reversed(tensor.shape)))
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            values = unpermute(values, heads) if parts[2] == "attn_q" else values
            values = unpermute(values, kv_heads) if parts[2] == "attn_k" else values
            name = f"model.layers.{parts[1]}.{names[parts[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]
        tensors[name] = np.ascontiguousarray(values)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
        "hidden_size": fields["llama.embedding_length"], "num_hidden_layers": fields["llama.block_count"],
        "intermediate_size": fields["llama.feed_forward_length"], "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "max_position_embeddings": fields["llama.context_length"], "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"], "tie_word_embeddings": True,
        "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def main(gguf, threads):
    os.environ["OMP_NUM_THREADS"] = str(threads)
    folder = Path(tempfile.mkdtemp(prefix="float-copy-"))
    write_float_copy(gguf, folder)
    import vllm

    model = vllm.LLM(
        str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=2048,
        max_num_seqs=32, max_num_batched_tokens=2048, enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip

    def generate(prompts, max_tokens):
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, min_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        return [list(r.outputs[0].token_ids) for r in model.generate(requests, params, use_tqdm=False)]

    serve(f"vLLM {vllm.__version__} (CPU, float32, eager)", generate)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
