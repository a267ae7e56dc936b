"""``python -m train.prompts``: write the training and the evaluation prompts (mixture.py)."""

import argparse
from collections import Counter
from pathlib import Path

from train.prompts.mixture import MIX, evaluation_prompts, fetch_wheels, training_prompts
from train.prompts.prompt import drop_contaminated, write_jsonl


def main() -> None:
    """Fetches the packages, writes both files and prints a table by source."""
    parser = argparse.ArgumentParser(
        prog="python -m train.prompts",
        description="Write the training and the evaluation prompts.",
    )
    parser.add_argument(
        "--wheels", type=Path, required=True, help="folder that the packages are downloaded to"
    )
    parser.add_argument("--out", type=Path, required=True, help="training prompts (JSON lines)")
    parser.add_argument("--eval-out", type=Path, required=True, help="evaluation prompts")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument(
        "--limit-per-source", type=int, default=None, help="at most so many prompts a source"
    )
    parser.add_argument(
        "--exclude", nargs="*", default=(), metavar="SOURCE", help="leave these sources out"
    )
    args = parser.parse_args()
    args.wheels.mkdir(parents=True, exist_ok=True)
    fetch_wheels(args.wheels)
    evaluation = evaluation_prompts(args.wheels)
    written = training_prompts(
        args.wheels, seed=args.seed, limit_per_source=args.limit_per_source, exclude=args.exclude
    )
    kept, dropped = drop_contaminated(written, evaluation)
    write_jsonl(args.out, kept)
    write_jsonl(args.eval_out, (p for prompts in evaluation.values() for p in prompts))
    counts = Counter(p.source for p in kept)
    print(f"{'source':28}{'kept':>8}{'dropped':>9}")
    for source in MIX:
        print(f"{source:28}{counts[source]:8}{dropped.get(source, 0):9}")
    print(f"{'total':28}{len(kept):8}{sum(dropped.values()):9}")
    for name, prompts in evaluation.items():
        print(f"{'evaluation: ' + name:28}{len(prompts):8}")


if __name__ == "__main__":
    main()
