"""The server's flags: one frozen dataclass, from which the parser is generated.

A flag is written once, with every name that users of vLLM and SGLang know it by.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from dflash_jax.compilation_cache import default_compilation_cache_dir
from dflash_jax.engine import EngineConfig
from dflash_jax.flags import add_flags, build, choices, first_name, flag, json_object
from dflash_jax.speculative import DraftSampling

Dtype = Literal["auto", "float32", "bfloat16"]
LogLevel = Literal["debug", "info", "warning", "error"]


def _speculative_config(text: str) -> dict[str, Any]:
    """vLLM's JSON object. Raises ArgumentTypeError naming the key and what is accepted."""
    kinds = {"method": str, "model": str, "num_speculative_tokens": int}
    config = json_object(text)
    for key, value in config.items():
        if key not in kinds:
            raise argparse.ArgumentTypeError(f"unknown key {key!r}; accepted: {', '.join(kinds)}")
        if type(value) is not kinds[key]:
            raise argparse.ArgumentTypeError(
                f"{key} must be of type {kinds[key].__name__}, got {value!r}"
            )
    if config.get("method", "dflash") != "dflash":
        raise argparse.ArgumentTypeError(f"method must be dflash, got {config['method']!r}")
    return config


@dataclasses.dataclass(frozen=True)
class ServeArgs:
    """Raises ValueError naming flags that cannot go together, and why."""

    model: str | None = flag(
        "target: HF folder, .gguf file or hub name; without it the embedded pair is served",
        "--model", "--model-path", "--target",
    )  # fmt: skip
    draft: str | None = flag(
        "DFlash draft: folder or hub name; without it --model decodes plainly",
        "--draft", "--speculative-draft-model-path",
    )  # fmt: skip
    block_size: int | None = flag(
        "block size b, the anchor included (default: the draft's)",
        "--speculative-block-size", "--speculative-num-draft-tokens", type=int,
    )  # fmt: skip
    num_speculative_tokens: int | None = flag(
        "tokens drafted in a cycle, b - 1", "--num-speculative-tokens", type=int
    )
    speculative_config: dict[str, Any] | None = flag(
        "vLLM's JSON: method dflash, model, num_speculative_tokens",
        "--speculative-config", type=_speculative_config,
    )  # fmt: skip
    draft_sampling: DraftSampling = flag(
        "how drafts are taken; the output is the same",
        "--draft-sampling", default=EngineConfig.draft_sampling, **choices(DraftSampling),
    )  # fmt: skip
    disable_speculation: bool = flag(
        "decode plainly", "--disable-speculation", default=False, type=bool
    )
    host: str = flag("address to listen on", "--host", default="127.0.0.1")
    port: int = flag("port to listen on; 0: any free one", "--port", default=8000, type=int)
    api_key: str | None = flag("clients must send it as a bearer token", "--api-key")
    served_model_name: str | None = flag("name in the API", "--served-model-name")
    max_model_len: int | None = flag(
        "longest prompt and output together (default: the target's)",
        "--max-model-len", "--context-length", type=int,
    )  # fmt: skip
    max_num_seqs: int = flag(
        "requests that run at once",
        "--max-num-seqs", "--max-running-requests", default=8, type=int,
    )  # fmt: skip
    max_queued_requests: int = flag(
        "requests that may wait; more are answered 429",
        "--max-queued-requests", default=128, type=int,
    )  # fmt: skip
    prefill_tokens: int = flag(
        "most tokens of one prefill step",
        "--max-num-batched-tokens", "--chunked-prefill-size", default=512, type=int,
    )  # fmt: skip
    page_size: int = flag("tokens of a KV page", "--page-size", default=16, type=int)
    kv_cache_tokens: int | None = flag(
        "tokens of KV that a copy of the model holds, at least one --max-model-len (default: 4,096 "
        "a sequence, or the context where shorter); when it is full the youngest request waits",
        "--kv-cache-tokens", "--max-total-tokens", type=int,
    )  # fmt: skip
    dtype: Dtype = flag(
        "auto: float32 on CPU, bfloat16 on GPU and TPU", "--dtype", default="auto",
        **choices(Dtype),
    )  # fmt: skip
    tensor_parallel_size: int = flag(
        "devices that share one copy of the model",
        "--tensor-parallel-size", "--tp-size", "-tp", default=1, type=int,
    )  # fmt: skip
    data_parallel_size: int = flag(
        "copies of the model", "--data-parallel-size", "--dp-size", "-dp", default=1, type=int
    )
    seed: int | None = flag(
        "makes the seeds of unseeded requests repeatable (default: entropy)", "--seed", type=int
    )
    chat_template: Path | None = flag(
        "Jinja file used in place of the tokenizer's template", "--chat-template", type=Path
    )
    compilation_cache_dir: Path = flag(
        "where compiled programs are kept between starts", "--compilation-cache-dir",
        default=default_compilation_cache_dir(), type=Path,
    )  # fmt: skip
    max_request_bytes: int = flag(
        "larger bodies are answered 413", "--max-request-bytes", default=8 * 2**20, type=int
    )
    shutdown_timeout: float = flag(
        "seconds that running requests get to finish after SIGTERM",
        "--shutdown-timeout", default=30.0, type=float,
    )  # fmt: skip
    log_level: LogLevel = flag(
        "how much is logged", "--log-level", default="info", **choices(LogLevel)
    )
    print_config: bool = flag(
        "print the settings as JSON and exit", "--print-config", default=False, type=bool
    )

    def __post_init__(self):
        config = self.speculative_config or {}
        self._agree("--draft", self.draft, "--speculative-config model", config.get("model"))
        drafted = config.get("num_speculative_tokens")
        self._agree(
            "--num-speculative-tokens", self.num_speculative_tokens,
            "--speculative-config num_speculative_tokens", drafted,
        )  # fmt: skip
        if drafted is None:
            drafted = self.num_speculative_tokens
        block = None if drafted is None else drafted + 1
        self._agree(
            "--speculative-block-size", self.block_size, "num_speculative_tokens + 1", block
        )
        object.__setattr__(self, "draft", self.draft or config.get("model"))
        object.__setattr__(
            self, "block_size", block if self.block_size is None else self.block_size
        )
        if self.block_size is not None and self.block_size < 2:
            raise ValueError(
                f"the block size must be at least 2 (the anchor and one draft), got "
                f"{self.block_size}; --disable-speculation decodes plainly"
            )
        if self.disable_speculation and (self.draft or self.block_size or config):
            raise ValueError(
                "--disable-speculation contradicts --draft, block size and --speculative-config"
            )
        if self.model and not self.draft and (self.block_size or config):
            raise ValueError("a block size needs a draft: give --draft with --model")
        for name in (
            "max_num_seqs", "prefill_tokens", "page_size", "tensor_parallel_size",
            "data_parallel_size", "max_request_bytes",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{first_name(ServeArgs, name)} must be at least 1, got {getattr(self, name)}"
                )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"--max-model-len must be at least 2, got {self.max_model_len}")
        kv, context = self.kv_cache_tokens, self.max_model_len or 2
        if kv is not None and kv < context:  # the engine checks a target's own context
            raise ValueError(
                f"--kv-cache-tokens must hold one full context, at least {context}, got {kv}"
            )
        if self.max_queued_requests < 0 or not 0 <= self.shutdown_timeout < float("inf"):
            raise ValueError("--max-queued-requests and --shutdown-timeout must be at least 0")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port must be in 0..65535, got {self.port}")
        if self.api_key == "":
            raise ValueError("--api-key is empty; leave it out to serve without a key")
        if self.chat_template is not None and not self.chat_template.is_file():
            raise ValueError(f"--chat-template: there is no file {self.chat_template}")

    @staticmethod
    def _agree(name: str, value: Any, other_name: str, other: Any) -> None:
        if value is not None and other is not None and value != other:
            raise ValueError(f"{name} is {value} and {other_name} is {other}: they contradict")

    def engine_config(self) -> EngineConfig:
        pages = None
        if self.kv_cache_tokens is not None:
            pages = -(-self.kv_cache_tokens // self.page_size) + 1  # and the null page
        return EngineConfig(
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            page_size=self.page_size,
            num_pages=pages,
            prefill_tokens=self.prefill_tokens,
            block_size=self.block_size,
            draft_sampling=self.draft_sampling,
            speculation=not self.disable_speculation,
            seed=self.seed,
        )

    def public(self) -> dict[str, Any]:
        """Every setting in JSON's types, the API key masked."""
        values = dataclasses.asdict(self)
        values["api_key"] = None if self.api_key is None else "***"
        return {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}


LATER: dict[tuple[str, ...], tuple[tuple[str, ...], str]] = {
    ("--kv-cache-dtype",): (("auto",), "the KV cache has the model's dtype"),
    ("--memory-fraction", "--gpu-memory-utilization", "--mem-fraction-static"): (
        (),
        "the KV cache has a fixed number of tokens; set --kv-cache-tokens",
    ),
    ("--pipeline-parallel-size", "--pp-size"): (("1",), "use --tensor-parallel-size"),
    ("--quantization",): (("none",), "weights are run in --dtype"),
    ("--tokenizer", "--tokenizer-path"): ((), "the tokenizer is read from --model"),
}
"""Known flags that are not honoured: the values that change nothing, and what holds instead."""

NO_EFFECT = (
    "--disable-prefix-cache",
    "--no-enable-prefix-caching",
    "--disable-radix-cache",
    "--enable-chunked-prefill",
)
"""Known switches for what is so anyway: there is no prefix cache, and prefill is chunked."""


class _Later(argparse.Action):
    def __init__(self, *args, neutral: tuple[str, ...], reason: str, **kwargs):
        super().__init__(*args, **kwargs)
        self.neutral, self.reason = neutral, reason

    def __call__(self, parser, namespace, values, option_string=None):
        if values not in self.neutral:
            accepted = f"; accepted: {', '.join(self.neutral)}" if self.neutral else ""
            parser.error(f"{option_string} {values} is not supported: {self.reason}{accepted}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_jax.serve",
        description="Serve a target and its DFlash draft over OpenAI's API and SGLang's /generate.",
        allow_abbrev=False,
    )
    add_flags(parser, ServeArgs)
    hidden: dict[str, Any] = {"dest": "_later", "help": argparse.SUPPRESS}
    hidden["default"] = argparse.SUPPRESS
    for names, (neutral, reason) in LATER.items():
        parser.add_argument(*names, action=_Later, neutral=neutral, reason=reason, **hidden)
    parser.add_argument(*NO_EFFECT, action="store_true", **hidden)
    return parser


def parse_args(argv: Sequence[str] | None = None) -> ServeArgs:
    """Exits with the reason, as argparse does, on unknown, wrong or contradicting flags."""
    parser = make_parser()
    return build(parser, ServeArgs, parser.parse_args(argv))
