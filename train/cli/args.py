"""Flags that several commands share, and the engine that they describe."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dflash_jax
from dflash_jax.compilation_cache import default_compilation_cache_dir, keep_compilations
from dflash_jax.engine import EngineConfig
from dflash_jax.flags import choices, first_name, flag, json_object
from dflash_jax.generate import LLM, DType
from dflash_jax.request import SamplingParams
from dflash_jax.tokenizer import RESERVED_FOR_TEMPLATE
from train.questions import Question, read_questions


@dataclasses.dataclass(frozen=True)
class DecodeArgs:
    """A target that decodes many prompts at once. Raises ValueError naming an impossible flag."""

    target: str | None = flag(
        "HF folder, .gguf file or hub name; without it the embedded target", "--target"
    )
    draft: str | None = flag("DFlash draft: folder or hub name", "--draft")
    dtype: DType = flag("of weights and KV", "--dtype", default="bfloat16", **choices(DType))
    batch: int = flag("sequences decoded at once", "--batch", default=128, type=int)
    max_model_len: int | None = flag(
        "longest prompt and answer together (default: the target's)", "--max-model-len", type=int
    )
    max_new_tokens: int = flag(
        "most tokens of an answer", "--max-new-tokens", default=2048, type=int
    )
    seed: int = flag("of the prompts' own seeds", "--seed", default=0, type=int)
    chat_template_kwargs: Mapping[str, Any] | None = flag(
        """variables of the chat template, such as {"enable_thinking": false}""",
        "--chat-template-kwargs", type=json_object, metavar="JSON",
    )  # fmt: skip
    max_bad_share: float = flag(
        "malformed lines up to this share of all are named and skipped",
        "--max-bad-share", default=0.01, type=float,
    )  # fmt: skip
    tensor_parallel_size: int = flag(
        "devices that share one copy of the model", "--tensor-parallel-size", default=1, type=int
    )
    data_parallel_size: int = flag(
        "copies of the model", "--data-parallel-size", default=1, type=int
    )
    compilation_cache_dir: Path = flag(
        "where compiled programs are kept between runs", "--compilation-cache-dir",
        default=default_compilation_cache_dir(), type=Path,
    )  # fmt: skip

    def __post_init__(self):
        for name in ("batch", "tensor_parallel_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{first_name(type(self), name)} must be at least 1")
        if self.max_model_len is not None and self.max_model_len < self.max_new_tokens + 1:
            raise ValueError(
                f"--max-model-len {self.max_model_len} has no room for a prompt and "
                f"{self.max_new_tokens} new tokens"
            )
        if not 0 <= self.max_bad_share <= 1:
            raise ValueError(f"--max-bad-share must be in 0..1, got {self.max_bad_share}")
        if taken := RESERVED_FOR_TEMPLATE & (self.chat_template_kwargs or {}).keys():
            raise ValueError(
                f"--chat-template-kwargs: {min(taken)!r} is not the template's to have"
            )
        SamplingParams(max_new_tokens=self.max_new_tokens, seed=self.seed)

    def questions(self, files: tuple[Path, ...]) -> list[Question]:
        return read_questions(files, max_bad_share=self.max_bad_share)

    def engine_config(self) -> EngineConfig:
        """One decode shape, and a smaller one for the tail of a batch so large that it matters:
        each is a program to compile."""
        rows = -(-self.batch // self.data_parallel_size)
        return EngineConfig(
            max_num_seqs=self.batch,
            max_model_len=self.max_model_len,
            prefill_tokens=max(512, 32 * self.batch),
            batch_buckets=(rows // 8, rows) if rows >= 64 else (rows,),
            speculation=self.draft is not None,
        )

    def load(self, engine: EngineConfig) -> LLM:
        keep_compilations(self.compilation_cache_dir)
        llm = dflash_jax.load(
            self.target,
            self.draft,
            dtype=self.dtype,
            data_parallel=self.data_parallel_size,
            model_parallel=self.tensor_parallel_size,
            engine=engine,
        )
        if llm.tokenizer is None or llm.tokenizer.chat_template is None:
            raise ValueError(f"{llm.name} has no tokenizer with a chat template")
        return llm
