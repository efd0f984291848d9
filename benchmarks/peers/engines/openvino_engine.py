"""OpenVINO GenAI's continuous batching on the same GGUF file."""

import sys

import numpy as np
import openvino
import openvino_genai as genai
from protocol import serve


def main(gguf, threads):
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs, scheduler.cache_size = 2048, 32, 2
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": threads}
    pipeline = genai.LLMPipeline(gguf, "CPU", scheduler_config=scheduler, **properties)

    def generate(prompts, max_tokens):
        config = genai.GenerationConfig()
        config.max_new_tokens, config.min_new_tokens, config.ignore_eos = max_tokens, max_tokens, True
        config.do_sample, config.apply_chat_template = False, False
        ids = np.array(prompts, dtype=np.int64)
        mask = np.ones_like(ids)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask))
        return [list(map(int, tokens)) for tokens in pipeline.generate(inputs, config).tokens]

    serve(f"OpenVINO GenAI {genai.__version__}", generate)


main(sys.argv[1], int(sys.argv[2]))
