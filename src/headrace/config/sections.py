"""The frozen sections of the configuration.

Every field has its final value; `config.resolve` makes them and records a reason for each value that it decided. Field
metadata carries the help text, so that command-line flags are made from the fields (`config.flags`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.config.architecture import Architecture

MAX_MESSAGES = 4096


def setting(default: Any, help_text: str, **more: Any) -> Any:
    """A field with its help text; ``unit='bytes'`` accepts sizes such as ``256MiB``."""
    return field(default=default, metadata={"help": help_text, **more})


@dataclass(frozen=True, slots=True)
class ModelSection:
    """Which model, from where, in which numbers."""

    model: str = setting("smollm2-135m", "Alias, local folder, .gguf file or hub id.")
    revision: str | None = setting(None, "Hub revision (branch, tag or commit).")
    served_model_name: str | None = setting(
        None, "Name shown to clients; the model argument by default, without the folder and ending of a local file."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", "Numbers of activations and float weights.")
    max_model_len: int | None = setting(None, "Longest prompt plus output in tokens; the model's own by default.")
    quantization: Literal["int8", "int4"] | None = setting(None, "Quantise a float checkpoint at load.")
    packed_cache: int | None = setting(
        None, "Disk for weights as earlier starts packed them, for example 8GiB; 0 keeps none.", unit="bytes"
    )
    activations: Literal["auto", "exact", "int8"] = setting(
        "auto", "Activations of CPU products: exact (float32) or int8 in groups of 32.", flag="cpu-activations"
    )
    tokenizer: str | None = setting(None, "Folder or file of another tokenizer.")
    chat_template: str | None = setting(None, "File with a chat template to use instead of the model's.")
    generation_config: Literal["model", "neutral"] = setting(
        "model", "Sampling defaults: the model's generation_config.json, or neutral ones."
    )
    seed: int = setting(0, "Seed from which requests without one get theirs.")
    enable_auto_tool_choice: bool = setting(True, "Let the model decide on tool calls when tools are sent.")
    tool_call_parser: str = setting("template", "How the model writes tool calls; template asks its chat template.")
    reasoning_parser: str = setting(
        "template", "How the model marks reasoning, or none; template asks its chat template."
    )


@dataclass(frozen=True, slots=True)
class CacheSection:
    """KV blocks."""

    block_size: int = setting(0, "Tokens of a KV block; 0 lets the platform choose.")
    kv_cache_memory: int = setting(0, "Memory for KV blocks, for example 2GiB; 0 takes a share.", unit="bytes")
    kv_cache_share: float = setting(0.3, "Share of the free memory for KV blocks when no size is given.")
    kv_cache_dtype: Literal["auto", "float32", "float16", "int8"] = setting("auto", "Numbers of KV blocks.")
    num_kv_blocks: int | None = setting(None, "Exact number of blocks, for tests.")
    enable_prefix_caching: bool = setting(True, "Reuse KV blocks of equal prefixes.")


@dataclass(frozen=True, slots=True)
class SchedulerSection:
    """What a step may hold."""

    max_num_seqs: int = setting(0, "Most requests that run at once; 0 lets the platform choose.")
    max_num_batched_tokens: int = setting(0, "Most tokens of one step, draft slots included; 0 chooses.")
    max_num_scheduled_tokens: int | None = setting(None, "Most tokens granted in one step.")
    long_prefill_token_threshold: int = setting(0, "Most tokens of one prompt in one step; 0 is no limit.")
    scheduling_policy: Literal["fcfs", "priority"] = setting("fcfs", "Order of requests.")
    pipeline_depth: int = setting(2, "Steps in flight at once; 1 waits for each step.")
    max_num_queued_reqs: int | None = setting(4096, "Refuse requests beyond this many in the queue.")
    max_num_queued_tokens: int | None = setting(1 << 22, "Refuse requests beyond this many queued prompt tokens.")
    watermark: float = setting(0.01, "Share of blocks kept free when a request is admitted beside others.")
    max_head_bypass_steps: int = setting(64, "Steps for which others may pass a head that does not fit.")
    max_token_gap_ms: float = setting(0.0, "Aim for gaps between tokens while prompts arrive; 0 is no limit.")
    max_token_gap_factor: float | None = setting(
        None, "The same as a multiple of a step without prompts; 0 is no limit, the platform chooses by default."
    )


@dataclass(frozen=True, slots=True)
class LimitsSection:
    """What one request may ask for. ``most`` is what the code behind was made for: no setting goes beyond it."""

    max_n: int = setting(128, "Most answers to one prompt.", most=128)
    max_prompts: int = setting(1024, "Most prompts of one request.", most=1024)
    max_answers: int = setting(4096, "Most answers of one request: its prompts times n.")
    max_prompt_chars: int = setting(8 << 20, "Most characters of one prompt, counted before it is tokenised.")
    max_messages: int = setting(MAX_MESSAGES, "Most messages of one chat.", most=MAX_MESSAGES)
    max_tools: int = setting(128, "Most tools of one chat.", most=128)
    max_tools_chars: int = setting(1 << 18, "Most characters of a chat's tools together.", most=1 << 18)
    max_stop_strings: int = setting(64, "Most stop strings.", most=64)
    max_bad_words: int = setting(128, "Most bad words.", most=128)
    max_stop_tokens: int = setting(128, "Most entries of stop_token_ids.", most=128)
    max_biased_tokens: int = setting(4096, "Most entries of logit_bias.")
    max_allowed_tokens: int = setting(1 << 18, "Most entries of allowed_token_ids.")
    max_logprob_entries: int = setting(1 << 22, "Most logprobs of one request: those per token times the tokens.")
    max_grammar_chars: int = setting(1 << 17, "Most characters of a structured output's description.", most=1 << 17)
    max_schema_depth: int = setting(48, "Deepest nesting of a JSON schema.", most=48)
    max_schema_parts: int = setting(20_000, "Most schemas within a JSON schema.", most=20_000)
    max_schema_bytes: int = setting(1 << 16, "Most bytes of a JSON schema.", most=1 << 16)
    grammar_timeout_s: float = setting(5.0, "Most seconds that preparing one structured output may take.")
    template_timeout_s: float = setting(5.0, "Most seconds that rendering the chat template may take.")


@dataclass(frozen=True, slots=True)
class ParallelSection:
    """Ranks. The product of tensor and pipeline sizes is the number of workers."""

    tensor_parallel_size: int = setting(1, "Ranks that share each layer.")
    pipeline_parallel_size: int = setting(1, "Stages of layers.")
    executor: Literal["auto", "uniproc", "multiproc"] = setting("auto", "Where workers run.")
    num_threads: int = setting(0, "Threads of CPU kernels; 0 takes the cores that this process may use.")


@dataclass(frozen=True, slots=True)
class DeviceSection:
    """Kernels and graphs."""

    platform: Literal["auto", "cpu", "cuda"] = setting("auto", "Device family.")
    attention_backend: str | None = setting(None, "Force an attention backend; an unusable one is an error.")
    ops: Literal["auto", "reference", "native", "triton"] = setting("auto", "Implementation of operators.")
    enforce_eager: bool | None = setting(None, "Never capture graphs.")


@dataclass(frozen=True, slots=True)
class ObservabilitySection:
    """Logs and recordings."""

    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Least severe message logged.")
    log_format: Literal["text", "json"] = setting("text", "Lines for people or JSON objects.")
    stats_interval_s: float = setting(10.0, "Seconds between throughput lines; 0 logs none.")
    record: str | None = setting(None, "File to record decisions to, for headrace replay; never any text.")
    kv_events_config: str | None = setting(None, "JSON that turns KV cache events on and says where to publish them.")
    explain_across_salts: bool = setting(
        False, "Let prefix misses be explained by blocks of other cache salts and API keys."
    )
    explain_prompts: bool = setting(
        False, "Keep prompts, so that explanations can show them to the key that sent them."
    )
    kv_block_sample: float = setting(0.0, "Share of KV blocks whose lifetimes become metrics; 0 is none.")
    max_logprobs: int = setting(20, "Most logprobs per token a request may ask for; -1 is the vocabulary.")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that the engine needs, resolved: no ``auto``, no 0 that means something else.

    ``reasons`` maps ``section.field`` to why `resolve` decided the value. ``model_path`` is the file or folder that
    ``model.model`` was found at.
    """

    model: ModelSection
    cache: CacheSection
    scheduler: SchedulerSection
    parallel: ParallelSection
    device: DeviceSection
    observability: ObservabilitySection
    architecture: Architecture
    model_path: str
    limits: LimitsSection = field(default_factory=LimitsSection)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def max_model_len(self) -> int:
        """The limit in force."""
        assert self.model.max_model_len is not None
        return self.model.max_model_len
