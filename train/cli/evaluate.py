"""``python -m train evaluate``: tau of a draft by real decoding, source by source.

    python -m train evaluate --target Qwen/Qwen3-4B --draft out/draft --evaluation eval.jsonl \\
        --block-size 4 8 16 --temperature 0 1 --draft-sampling coupled argmax --out out
"""

import dataclasses
from pathlib import Path
from typing import Any

from dflash_jax.engine import EngineConfig
from dflash_jax.flags import choices, flag
from dflash_jax.generate import LLM
from dflash_jax.request import SamplingParams
from dflash_jax.speculative import DraftSampling
from train.cli.args import DecodeArgs
from train.evaluate import EvaluationFile, evaluate_settings, one_line, settings_of, untrained


@dataclasses.dataclass(frozen=True)
class EvaluateArgs(DecodeArgs):
    """Raises ValueError naming an impossible flag."""

    max_new_tokens: int = flag(
        "most tokens of an answer", "--max-new-tokens", default=256, type=int
    )
    evaluation: tuple[Path, ...] = flag(
        "JSONL of held-out prompts, in the forms of regenerate's --prompts", "--evaluation",
        default=(), type=Path, nargs="+", repeated=True, required=True, metavar="FILE",
    )  # fmt: skip
    out: Path = flag("folder of evaluation.json", "--out", type=Path, required=True)
    block_size: tuple[int, ...] = flag(
        "block sizes b, the anchor included (default: the draft's); 1: plain decoding",
        "--block-size", default=(), type=int, nargs="+", repeated=True, metavar="B",
    )  # fmt: skip
    temperature: tuple[float, ...] = flag(
        "temperatures; 0: greedy", "--temperature", default=(0.0, 1.0), type=float, nargs="+",
        repeated=True, metavar="T",
    )  # fmt: skip
    draft_sampling: tuple[DraftSampling, ...] = flag(
        "how drafts are taken where T > 0; the answers are the same",
        "--draft-sampling", default=(EngineConfig.draft_sampling,), nargs="+", repeated=True,
        **choices(DraftSampling),
    )  # fmt: skip
    untrained: bool = flag(
        "evaluate a draft of the same shape and random weights too, as the baseline",
        "--untrained", default=False, type=bool,
    )  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        if self.target is not None and self.draft is None:
            raise ValueError("give --draft with --target: a draft is what is evaluated")
        if self.block_size and min(self.block_size) < 1:
            raise ValueError(f"--block-size must be at least 1, got {min(self.block_size)}")
        for name in ("block_size", "temperature", "draft_sampling"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        for temperature in self.temperature:
            SamplingParams(temperature=temperature)
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"--out {self.out} is no folder")


def run(args: EvaluateArgs) -> int:
    questions = args.questions(args.evaluation)
    engine = dataclasses.replace(args.engine_config(), speculation=True)
    llm = args.load(EngineConfig(max_num_seqs=1, max_model_len=2))
    sizes = _block_sizes(args, llm)
    settings = list(settings_of(sizes, args.temperature, args.draft_sampling))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "evaluation.json"
    file = EvaluationFile(path, _shared(args, llm))
    drafts = {"trained": llm}
    if args.untrained:
        drafts["untrained"] = untrained(llm, args.seed)
    for label, drafting in drafts.items():
        # Plain decoding knows no draft: once is enough.
        measured = [s for s in settings if label == "trained" or s.block_size > 1]
        for result in evaluate_settings(
            drafting,
            questions,
            measured,
            engine,
            max_new_tokens=args.max_new_tokens,
            seed=args.seed,
            template_variables=args.chat_template_kwargs,
            label=label,
        ):
            file.add(result)
            print(one_line(result), flush=True)
    print(f"wrote {path}")
    return 0


def _block_sizes(args: EvaluateArgs, llm: LLM) -> tuple[int, ...]:
    """Raises ValueError before anything slow begins."""
    config = llm.pair.draft_config
    assert config is not None
    if args.block_size and max(args.block_size) > config.block_size:
        raise ValueError(
            f"--block-size must be in 1..{config.block_size} (the draft was trained with "
            f"{config.block_size}; it may shrink, not grow), got {max(args.block_size)}"
        )
    return args.block_size or (config.block_size,)


def _shared(args: EvaluateArgs, llm: LLM) -> dict[str, Any]:
    return {
        "target": llm.name,
        "draft": args.draft or "embedded",
        "dtype": args.dtype,
        "evaluation": [str(file) for file in args.evaluation],
        "max_new_tokens": args.max_new_tokens,
        "batch": args.batch,
        "seed": args.seed,
        "chat_template_kwargs": args.chat_template_kwargs,
        "tensor_parallel_size": args.tensor_parallel_size,
        "data_parallel_size": args.data_parallel_size,
    }
