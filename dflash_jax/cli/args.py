"""The commands' flags: a frozen dataclass a command, from which its parser is generated."""

import dataclasses
from pathlib import Path

from dflash_jax.compilation_cache import default_compilation_cache_dir
from dflash_jax.engine import EngineConfig
from dflash_jax.flags import choices, flag, integers
from dflash_jax.generate import DType, Prompt
from dflash_jax.request import SamplingParams


@dataclasses.dataclass(frozen=True)
class PairArgs:
    """Which pair, and how it is held."""

    model: str | None = flag(
        "target: HF folder, .gguf file or hub name; without it the embedded pair", "--model"
    )
    draft: str | None = flag(
        "DFlash draft: folder or hub name; without it --model decodes plainly", "--draft"
    )
    dtype: DType = flag("of weights and KV", "--dtype", default="float32", **choices(DType))


@dataclasses.dataclass(frozen=True)
class RunArgs(PairArgs):
    """A pair that is run."""

    max_new_tokens: int = flag(
        "most tokens of an output", "--max-new-tokens", default=128, type=int
    )
    max_model_len: int | None = flag(
        "longest prompt and output together", "--max-model-len", type=int
    )
    compilation_cache_dir: Path = flag(
        "where compiled programs are kept between runs", "--compilation-cache-dir",
        default=default_compilation_cache_dir(), type=Path,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GenerateArgs(RunArgs):
    """Raises ValueError naming flags that cannot go together, and why."""

    prompt: str | None = flag("text to continue", "--prompt")
    prompt_ids: tuple[int, ...] | None = flag(
        "token ids to continue, such as 1,2,3", "--prompt-ids", type=integers
    )
    chat: str | None = flag("a user's message to answer", "--chat")
    temperature: float = flag("0: greedy", "--temperature", default=0.0, type=float)
    top_k: int = flag("0: off", "--top-k", default=0, type=int)
    top_p: float = flag("1: off", "--top-p", default=1.0, type=float)
    min_p: float = flag("0: off", "--min-p", default=0.0, type=float)
    seed: int | None = flag("makes a sampled output repeatable", "--seed", type=int)
    stop: tuple[str, ...] = flag(
        "text that ends the output; may be given again", "--stop", default=(), repeated=True
    )
    ignore_eos: bool = flag("go on past EOS", "--ignore-eos", default=False, type=bool)
    block_size: int | None = flag(
        "block size b, the anchor included (default: the draft's)", "--block-size", type=int
    )
    plain: bool = flag("decode without a draft", "--plain", default=False, type=bool)
    json: bool = flag("print one JSON object and nothing else", "--json", default=False, type=bool)

    def __post_init__(self):
        if sum(p is not None for p in (self.prompt, self.prompt_ids, self.chat)) != 1:
            raise ValueError("give one of --prompt, --prompt-ids and --chat")
        if self.plain and (self.draft is not None or self.block_size is not None):
            raise ValueError("--plain contradicts --draft and --block-size")
        if self.model is not None and self.draft is None and self.block_size is not None:
            raise ValueError("--block-size needs a draft: give --draft with --model")
        self.sampling()

    def the_prompt(self) -> Prompt:
        if self.chat is not None:
            return [{"role": "user", "content": self.chat}]
        return self.prompt if self.prompt is not None else self.prompt_ids or ()

    def sampling(self) -> SamplingParams:
        names = {field.name for field in dataclasses.fields(SamplingParams)}
        return SamplingParams(**{k: v for k, v in vars(self).items() if k in names})

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            max_num_seqs=1,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            speculation=not self.plain,
        )


@dataclasses.dataclass(frozen=True)
class InfoArgs(PairArgs):
    json: bool = flag("print one JSON object and nothing else", "--json", default=False, type=bool)


CHATS = (
    "What is 17 + 25? Answer step by step, then count from 1 to 20.",
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List the planets of the solar system from the sun outwards, with one fact about each.",
    "Translate into French: The library closes at six in the evening.",
    "Tom has 3 boxes of 12 pencils and gives away 7 pencils. How many has he left?",
)
"""What is asked where no prompt is given."""


@dataclasses.dataclass(frozen=True)
class BenchArgs(RunArgs):
    """Raises ValueError naming what cannot be measured."""

    prompt: tuple[str, ...] = flag(
        "text to continue; may be given again", "--prompt", default=(), repeated=True
    )
    prompt_ids: tuple[tuple[int, ...], ...] = flag(
        "token ids to continue; may be given again", "--prompt-ids",
        default=(), type=integers, repeated=True,
    )  # fmt: skip
    chat: tuple[str, ...] = flag(
        "a user's message to answer; may be given again (default: six of our own)", "--chat",
        default=(), repeated=True,
    )  # fmt: skip
    batch: int = flag("sequences decoded at once", "--batch", default=1, type=int)
    block_sizes: tuple[int, ...] | None = flag(
        "block sizes to measure, such as 4,8,16 (default: the draft's)",
        "--block-sizes", type=integers,
    )  # fmt: skip

    def __post_init__(self):
        if self.batch < 1:
            raise ValueError(f"--batch must be at least 1, got {self.batch}")
        if self.block_sizes is not None and min(self.block_sizes) < 2:
            raise ValueError(
                f"--block-sizes must be at least 2 (plain decoding is always measured), got "
                f"{min(self.block_sizes)}"
            )
        if self.block_sizes is not None and self.model is not None and self.draft is None:
            raise ValueError("--block-sizes needs a draft: give --draft with --model")
        SamplingParams(max_new_tokens=self.max_new_tokens)

    def prompts(self) -> list[Prompt]:
        chats = self.chat
        if not (self.prompt or self.prompt_ids or chats):
            chats = CHATS
        messages: list[Prompt] = [[{"role": "user", "content": chat}] for chat in chats]
        return [*self.prompt, *self.prompt_ids, *messages]
