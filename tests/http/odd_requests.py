"""Requests that nobody planned for, made by hypothesis: plausible ones with odd values in odd places."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from headrace.entrypoints.openai.protocol import REQUEST_BODIES
from tests.http_service import MODEL

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "ab", "max_tokens": 5},
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES, "max_tokens": 5},
    "/v1/completions/render": {"model": MODEL, "prompt": "ab"},
    "/v1/chat/completions/render": {"model": MODEL, "messages": MESSAGES},
    "/v1/responses": {"model": MODEL, "input": "Hi", "max_output_tokens": 5},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 5}},
    "/inference/v1/abort_requests": {"request_ids": ["nobody"]},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [1, 2]},
}
assert set(BASES) == set(REQUEST_BODIES)

NUMBERS = [0, 1, -1, 2, 5, 127, 128, 129, 1 << 31, 1 << 63, 10**12, 1.5, -0.0, 1e308, float("nan"), float("inf")]
TEXTS = [
    "",
    "a",
    "\x00",
    "é漢🙂",
    "\ud800",
    "x" * 300,
    "auto",
    "none",
    "required",
    "../../etc/passwd",
    "<end>",
    "{% x %}",
]
scalars = st.sampled_from([None, True, False, *NUMBERS, *TEXTS])
values = st.recursive(
    scalars | st.text(max_size=20) | st.integers() | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["type", "a", *TEXTS]), inner, max_size=4)
    ),
    max_leaves=8,
)

PLAUSIBLE: dict[str, list[Any]] = {
    "n": [1, 2, 3],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True, "include_usage": True}],
    "prompt": ["", "abc", ["a", "b"], [1, 2, 3], [[1], [2, 3]], ["a", ""], [299], [300], ["x" * 200]],
    "messages": [
        [{"role": "system", "content": "S"}, *MESSAGES],
        [{"role": "user", "content": [{"type": "text", "text": "t"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}],
        [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}]}],
        [*MESSAGES, {"role": "assistant", "content": "pre"}],
    ],
    "input": [[{"role": "user", "content": "x"}], [{"type": "function_call_output", "call_id": "c", "output": "o"}]],
    "max_tokens": [0, 1, 20, None],
    "min_tokens": [0, 3, 5],
    "temperature": [0, 0.5, 2],
    "seed": [0, -5],
    "stop": ["a", ["a", "b"], []],
    "stop_token_ids": [[97], [256]],
    "logprobs": [0, 3, True, False],
    "top_logprobs": [0, 2],
    "prompt_logprobs": [0, 2],
    "echo": [True, False],
    "logit_bias": [{"97": 5}, {}, {"x": 1}],
    "bad_words": [["a b"], ["é"]],
    "allowed_token_ids": [[97, 98], [256]],
    "ignore_eos": [True],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "integer"}}},
        {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#"}}},
    ],
    "structured_outputs": [{"regex": "[ab]+"}, {"choice": ["yes", "no"]}, {"regex": "("}, {"grammar": "x"}],
    "tools": [[TOOL], [], [TOOL, TOOL]],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "return_token_ids": [True],
    "return_timing": [True],
    "continue_final_message": [True],
    "add_generation_prompt": [False],
    "chat_template_kwargs": [{"mood": "!"}, {"tokenize": True}],
    "request_id": ["same"],
    "cache_salt": ["s"],
    "priority": [0, 1],
    "token_ids": [[5], [], [299, 300]],
    "tokens": [[104, 105], [256], [300]],
    "request_ids": [["same"], []],
    "sampling_params": [{"n": 2}, {"max_tokens": None}, {"stop": ["a"]}],
}


STREAMED = {
    path for path, body in REQUEST_BODIES.items() if "stream" in body.__struct_fields__ and "render" not in path
}


def one_in(count: int) -> st.SearchStrategy[bool]:
    """True once in so many times; booleans and bounds of integers come up far more often than that."""
    return st.sampled_from([False] * (count - 1) + [True])


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """A body for a route: mostly right, mostly JSON."""
    if draw(one_in(30)):
        return draw(st.binary(max_size=50))
    body = dict(BASES[path])
    if path in STREAMED and draw(one_in(2)):
        body["stream"] = True
    names = [*REQUEST_BODIES[path].__struct_fields__, "no_such_field"]
    likely = [name for name in names if name in PLAUSIBLE]
    for name in draw(st.lists(st.sampled_from(likely), max_size=3)):
        body[name] = draw(st.sampled_from(PLAUSIBLE[name]))
    if draw(one_in(3)):
        for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=2)):
            body[name] = draw(values)
    return json.dumps(body).encode()
