"""headrace through ``LLM``: real scheduler, sampler and detokenizer. Extra arguments are settings, ``name=value``."""

import ast
import sys

from protocol import serve


def main(gguf, threads, settings):
    import headrace

    model = headrace.LLM(
        gguf, max_model_len=2048, max_num_seqs=32, max_num_batched_tokens=2048, enable_prefix_caching=False,
        num_threads=threads, **settings,
    )  # fmt: skip

    def generate(prompts, max_tokens):
        params = headrace.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        return [r.outputs[0].token_ids for r in model.generate(requests, params, use_tqdm=False)]

    serve(f"headrace {headrace.__version__} {settings or ''}".strip(), generate)


def _value(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    pairs = (argument.split("=", 1) for argument in sys.argv[3:])
    main(sys.argv[1], int(sys.argv[2]), {name: _value(text) for name, text in pairs})
