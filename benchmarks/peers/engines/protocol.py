"""How the harness talks to an engine: JSON lines on standard input and output. Imported by every engine script.

In: ``{"prompts": [[ids], …], "max_tokens": n}``. Out: ``{"seconds": s, "tokens": [[first ids], …]}``. The first line
out is ``{"ready": description}``. Importing this module sends everything else that an engine prints to standard error.
"""

import json
import os
import sys
import time

_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def serve(description, generate):
    """Answer cases with ``generate(prompts, max_tokens) -> list of output id lists`` until the input ends."""
    print(json.dumps({"ready": description}), file=_answers, flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        start = time.perf_counter()
        outputs = generate(case["prompts"], case["max_tokens"])
        seconds = time.perf_counter() - start
        assert all(len(ids) == case["max_tokens"] for ids in outputs), [len(ids) for ids in outputs]
        print(json.dumps({"seconds": seconds, "tokens": [ids[:8] for ids in outputs]}), file=_answers, flush=True)
