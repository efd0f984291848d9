"""``headrace chat``.

examples:
  headrace chat
  headrace chat ./my-model --system "Answer in one sentence."
  headrace chat --url http://127.0.0.1:8000 --api-key SECRET

An empty line, Ctrl-C or Ctrl-D ends the chat.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from headrace.config.flags import add_flags, settings_from_args
from headrace.entrypoints.cli.sampling_flags import add_sampling_flags, sampling_from_args

if TYPE_CHECKING:
    from headrace.frontend.async_llm import AsyncLLM

Messages = list[dict[str, str]]
Answer = Callable[[Messages], Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add its flags."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help="the model (default: smollm2-135m)")
    parser.add_argument("--url", default=None, help="talk to a running server instead of starting an engine")
    parser.add_argument("--api-key", default=None, help="key of that server")
    parser.add_argument("--system", default=None, help="what the model should know or be")
    add_sampling_flags(parser)
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the user leaves."""
    asyncio.run(_chat(args))
    return 0


async def _chat(args: argparse.Namespace) -> None:
    sampling = sampling_from_args(args)
    if args.url is not None:
        from headrace.entrypoints.cli.remote import stream_chat

        await converse(lambda messages: stream_chat(args.url, args.api_key, messages, sampling), args.system)
        return
    from headrace.entrypoints.cli.local_engine import local_engine

    async with local_engine(settings_from_args(args)) as llm:
        await converse(lambda messages: _local_answer(llm, messages, sampling), args.system)


async def _local_answer(llm: AsyncLLM, messages: Messages, sampling: dict[str, Any]) -> AsyncIterator[str]:
    from headrace.messages.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        **{**llm.input.defaults, "max_tokens": None, **sampling}, output_kind=RequestOutputKind.DELTA
    )
    prompt = await llm.tokenize_chat(messages)
    async for output in llm.generate(prompt, params):
        yield output.outputs[0].text


async def converse(answer: Answer, system: str | None, ask: Callable[[str], str] = input) -> None:
    """The conversation.

    Args:
        answer: gives the pieces of the next answer to the messages so far.
        system: the first message, if any.
        ask: reads a line; raises ``EOFError`` at the end.
    """
    messages: Messages = [{"role": "system", "content": system}] if system else []
    loop = asyncio.get_running_loop()
    while True:
        try:
            line = await loop.run_in_executor(None, ask, "you> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line.strip():
            return
        messages.append({"role": "user", "content": line})
        text = ""
        async for piece in answer(messages):
            text += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
        print()
        messages.append({"role": "assistant", "content": text})
