"""llama.cpp through the low-level batch API: prompts in chunks of the batch, then one token per sequence and step."""

import ctypes
import sys

import llama_cpp
import numpy as np
from protocol import serve

MAX_SEQS, N_BATCH, N_CTX = 32, 2048, 12288


def main(gguf, threads):
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(gguf.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = N_CTX, N_BATCH, 512, MAX_SEQS
    params.n_threads = params.n_threads_batch = threads
    params.kv_unified = True
    context = llama_cpp.llama_init_from_model(model, params)
    memory = llama_cpp.llama_get_memory(context)
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(N_BATCH, 0, 1)

    def run(entries):
        """Decode ``(seq, position, token, wants_logits)`` entries; return the greedy token of each that wants one."""
        for i, (seq, position, token, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = seq, wanted
        batch.n_tokens = len(entries)
        assert llama_cpp.llama_decode(context, batch) == 0
        best = {}
        for i, (seq, _, _, wanted) in enumerate(entries):
            if wanted:
                logits = llama_cpp.llama_get_logits_ith(context, i)
                address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * vocab_size))
                best[seq] = int(np.frombuffer(address.contents, dtype=np.float32).argmax())
        return best

    def generate(prompts, max_tokens):
        llama_cpp.llama_memory_clear(memory, True)
        entries = [
            (seq, position, token, position == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        last = {}
        for start in range(0, len(entries), N_BATCH):
            last |= run(entries[start : start + N_BATCH])
        outputs = [[last[seq]] for seq in range(len(prompts))]
        for step in range(max_tokens - 1):
            last = run([(s, len(prompts[s]) + step, outputs[s][-1], True) for s in range(len(prompts))])
            for seq, token in last.items():
                outputs[seq].append(token)
        return outputs

    serve(f"llama.cpp (llama-cpp-python {llama_cpp.__version__})", generate)


main(sys.argv[1], int(sys.argv[2]))
