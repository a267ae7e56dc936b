"""``python -m train regenerate``: the target answers every prompt; run it again to go on.

    python -m train regenerate --target Qwen/Qwen3-4B --prompts prompts.jsonl --out answers \\
        --temperature 0.7 --top-p 0.8 --top-k 20 --chat-template-kwargs '{"enable_thinking": false}'
"""

import argparse
import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any

from dflash_jax.flags import flag
from dflash_jax.generate import EMBEDDED_NAME
from dflash_jax.request import SamplingParams
from train.answers import answers_path, check_settings, claim
from train.cli.args import DecodeArgs
from train.regenerate import regenerate


def shard(text: str) -> tuple[int, int]:
    """``I/N``. Raises ArgumentTypeError saying so."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"must be I/N with 0 <= I < N, such as 0/4, got {text!r}")
    return int(index), int(count)


@dataclasses.dataclass(frozen=True)
class RegenerateArgs(DecodeArgs):
    """Raises ValueError naming an impossible flag."""

    prompts: tuple[Path, ...] = flag(
        'JSONL (.gz too) of {"id", "source", "text"} or {"id", "conversations" or "messages"}, '
        "whose last assistant turn is written anew",
        "--prompts", default=(), type=Path, nargs="+", repeated=True, required=True,
        metavar="FILE",
    )  # fmt: skip
    out: Path = flag(
        "folder of the answers; one that holds some is gone on with", "--out", type=Path,
        required=True,
    )  # fmt: skip
    shard: tuple[int, int] = flag(
        "answer every N-th prompt from the I-th alone, into a file of their own; I from 0",
        "--shard", default=(0, 1), type=shard, metavar="I/N",
    )  # fmt: skip
    temperature: float = flag("0: greedy", "--temperature", default=0.0, type=float)
    top_k: int = flag("0: off", "--top-k", default=0, type=int)
    top_p: float = flag("1: off", "--top-p", default=1.0, type=float)
    min_p: float = flag("0: off", "--min-p", default=0.0, type=float)
    seconds: float = flag(
        "start no further prompt after this long", "--seconds", default=math.inf, type=float
    )
    conversations: bool = flag(
        "write every conversation as text too", "--conversations", default=False, type=bool
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.seconds > 0:
            raise ValueError(f"--seconds must be more than 0, got {self.seconds}")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"--out {self.out} is no folder")
        self.sampling()

    def sampling(self) -> SamplingParams:
        names = {field.name for field in dataclasses.fields(SamplingParams)}
        return SamplingParams(**{k: v for k, v in vars(self).items() if k in names})

    def settings(self) -> dict[str, Any]:
        """What the answers depend on: not on how many run at once, nor on the draft."""
        prompts = hashlib.sha256()
        for file in self.prompts:
            with file.open("rb") as content:
                prompts.update(hashlib.file_digest(content, "sha256").digest())
        sampling = {k: v for k, v in vars(self.sampling()).items() if hasattr(self, k)}
        return {
            "target": (self.target or EMBEDDED_NAME).rstrip("/"),
            "dtype": self.dtype,
            **sampling,
            "max_model_len": self.max_model_len,
            "chat_template_kwargs": self.chat_template_kwargs,
            "conversations": self.conversations,
            "shards": self.shard[1],
            "prompts_sha256": prompts.hexdigest(),
        }


def run(args: RegenerateArgs) -> int:
    index, count = args.shard
    questions = args.questions(args.prompts)[index::count]
    settings = args.settings()
    check_settings(args.out, settings)  # before the weights are read
    llm = args.load(args.engine_config())
    claim(args.out, settings)
    path = answers_path(args.out, index, count)
    written = regenerate(
        llm,
        questions,
        path,
        sampling=args.sampling(),
        template_variables=args.chat_template_kwargs,
        conversations=args.conversations,
        seconds=args.seconds,
    )
    print(
        f"{path}: {written.answers} answers of {written.tokens} tokens; {written.skipped} skipped "
        f"({path.name}.skipped says why), {written.before} done before, {written.left} left"
    )
    return 0
