"""``python -m train RECIPE``: prompts in, a draft out. Run it again to go on.

python -m train qwen3-4b --prompts prompts.jsonl --evaluation eval.jsonl --work out/qwen3-4b
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import jax

from dflash_jax.compilation_cache import default_compilation_cache_dir, keep_compilations
from dflash_jax.flags import choices, flag
from train.cli.mesh_args import MeshArgs
from train.cli.overrides import with_overrides
from train.files import sole_writer
from train.questions import Question, read_questions
from train.recipes import RECIPES
from train.run import Run
from train.samples import DataError
from train.target import TargetRecipe

Stage = Literal["target", "regenerate", "train", "evaluate", "report"]
INTERRUPTED = 143  # as the shell has it for SIGTERM: a scheduler starts the run again


@dataclasses.dataclass(frozen=True)
class RunArgs(MeshArgs):
    """Raises ValueError naming an impossible flag."""

    work: Path = flag("where everything is written", "--work", type=Path, required=True)
    prompts: tuple[Path, ...] = flag(
        "questions for the target to answer: JSONL (.gz too), in the forms of regenerate's",
        "--prompts", default=(), type=Path, nargs="+", repeated=True, metavar="FILE",
    )  # fmt: skip
    data: tuple[Path, ...] = flag(
        "training samples, in place of the target's own answers: JSONL of token ids, conversations "
        "or text, and text files",
        "--data", default=(), type=Path, nargs="+", repeated=True, metavar="FILE",
    )  # fmt: skip
    evaluation: tuple[Path, ...] = flag(
        "held-out questions, never trained on", "--evaluation",
        default=(), type=Path, nargs="+", repeated=True, metavar="FILE",
    )  # fmt: skip
    stage: tuple[Stage, ...] = flag(
        "these alone (default: all that there is input for)", "--stage",
        default=(), nargs="+", repeated=True, **choices(Stage),
    )  # fmt: skip
    target: str | None = flag(
        "HF folder, .gguf file or hub name, in place of the recipe's", "--target"
    )
    seconds: float = flag(
        "budget of the stage regenerate, and of train", "--seconds", default=math.inf, type=float
    )
    override: tuple[str, ...] = flag(
        "change the recipe, such as loop.optimizer.learning_rate=3e-4", "--set",
        default=(), nargs="+", repeated=True, metavar="FIELD=VALUE",
    )  # fmt: skip
    offline_features: bool = flag(
        "keep the target's features on disk (n * D * 2 bytes a token) instead of computing them in "
        "every step", "--offline-features", default=False, type=bool,
    )  # fmt: skip
    max_bad_share: float = flag(
        "malformed lines up to this share of all are named and skipped", "--max-bad-share",
        default=0.01, type=float,
    )  # fmt: skip
    distributed: bool = flag(
        "several processes: found by JAX itself on a pod or under Slurm, or given by the three "
        "flags below", "--distributed", default=False, type=bool,
    )  # fmt: skip
    coordinator: str | None = flag("host:port of process 0", "--coordinator")
    num_processes: int | None = flag("how many processes", "--num-processes", type=int)
    process_id: int | None = flag("which one this is", "--process-id", type=int)
    compilation_cache_dir: Path = flag(
        "where compiled programs are kept between runs", "--compilation-cache-dir",
        default=default_compilation_cache_dir(), type=Path,
    )  # fmt: skip

    def __post_init__(self):
        if not self.seconds > 0:
            raise ValueError(f"--seconds must be more than 0, got {self.seconds}")
        if not 0 <= self.max_bad_share <= 1:
            raise ValueError(f"--max-bad-share must be in 0..1, got {self.max_bad_share}")
        if self.data and self.prompts:
            raise ValueError("give --prompts (the target answers them) or --data, not both")
        if self.work.exists() and not self.work.is_dir():
            raise ValueError(f"--work {self.work} is no folder")
        three = (self.coordinator, self.num_processes, self.process_id)
        if any(v is not None for v in three) and (None in three or not self.distributed):
            raise ValueError(
                "--coordinator, --num-processes and --process-id go together, with --distributed"
            )
        if self.coordinator and not self.coordinator.rpartition(":")[2].isdecimal():
            raise ValueError(f"--coordinator must be HOST:PORT, got {self.coordinator!r}")
        for path in (*self.prompts, *self.data, *self.evaluation):
            if not path.is_file():
                raise ValueError(f"{path} is no file")


def run(name: str, args: RunArgs) -> int:
    """0: done; 143: a signal ended training early, and the same command goes on."""
    recipe = with_overrides(RECIPES[name], args.override)
    if args.distributed:
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    keep_compilations(args.compilation_cache_dir)
    job = Run(
        recipe,
        args.work,
        questions=read_questions(args.prompts, max_bad_share=args.max_bad_share)
        if args.prompts
        else (),
        evaluation=read_questions(args.evaluation, max_bad_share=args.max_bad_share)
        if args.evaluation
        else (),
        data=args.data,
        target=args.target,
        seconds=args.seconds,
        features=args.offline_features,
        mesh=args.mesh,
        max_bad_share=args.max_bad_share,
        report=functools.partial(print, flush=True) if jax.process_index() == 0 else _silent,
    )
    job = _with_own_questions(job)
    stages = _stages(job, args.stage)
    if jax.process_count() > 1 and set(stages) - {"train"}:
        raise DataError(
            "several processes run the stage train alone (--stage train); answer with `python -m "
            "train regenerate --shard I/N`, one process a shard, and evaluate with one process"
        )
    job.check(stages)
    args.work.mkdir(parents=True, exist_ok=True)
    # A report may be asked for while the run goes on; of several processes the first one writes.
    alone = jax.process_index() == 0 and set(stages) != {"report"}
    with sole_writer(args.work) if alone else contextlib.nullcontext():
        return _run_stages(job, stages)


def _run_stages(job: Run, stages: Sequence[Stage]) -> int:
    for stage in stages:
        if stage == "target":
            job.make_target()
        elif stage == "regenerate":
            job.regenerate()
        elif stage == "train":
            if not job.train():
                return INTERRUPTED
        elif stage == "evaluate":
            job.evaluate()
        else:
            job.write_report()
    return 0


def _with_own_questions(job: Run) -> Run:
    """A recipe that trains its target brings the questions that go with it."""
    recipe = job.recipe.target
    if not isinstance(recipe, TargetRecipe) or job.target is not None:
        return job
    asked, held_out = recipe.inputs()
    own: Sequence[Question] = () if job.data else asked
    return dataclasses.replace(
        job, questions=job.questions or own, evaluation=job.evaluation or held_out
    )


def _stages(job: Run, wanted: Sequence[Stage]) -> list[Stage]:
    """What to run, in order. Raises DataError naming what a stage would miss, before anything
    slow begins."""
    answers = any((job.work / "answers").glob("answers-*.jsonl"))
    possible: dict[Stage, bool] = {
        "target": isinstance(job.recipe.target, TargetRecipe) and job.target is None,
        "regenerate": bool(job.questions),
        "train": bool(job.data or answers or job.questions),
        "evaluate": bool(job.evaluation),
        "report": True,
    }
    stages = [s for s in get_args(Stage) if (s in wanted if wanted else possible[s])]
    missing: dict[Stage, str] = {
        "target": f"the recipe {job.recipe.name} does not train its target",
        "regenerate": "the stage regenerate needs --prompts",
        "train": "the stage train needs --data, --prompts to be answered first, or the answers of "
        f"an earlier run in {job.work / 'answers'}",
        "evaluate": "the stage evaluate needs --evaluation",
    }
    for stage in stages:
        if not possible[stage]:
            raise DataError(missing[stage])
    if not wanted and "train" not in stages:
        raise DataError(missing["train"])
    if "train" in stages and "regenerate" not in stages and not (job.data or answers):
        raise DataError(missing["train"])
    if "evaluate" in stages and "train" not in stages and not job.draft.is_dir():
        raise DataError(f"the stage evaluate needs {job.draft}, which the stage train writes")
    return stages


def _silent(line: str) -> None:
    """The report of a process that is not the first."""
