"""A recipe's run in stages, with files between them, so that any of them can be run again.

target      a target is trained first, where the recipe says so   -> WORK/target
regenerate  the target answers every question                     -> WORK/answers/
train       the draft learns the answers                          -> WORK/draft, train.jsonl, ...
evaluate    real decoding on held-out questions                   -> WORK/evaluation.json
report      what was reached, as one page                         -> WORK/report.html, report.json
"""

import dataclasses
import hashlib
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import dflash_jax
from dflash_jax.checkpoint import export_draft, load_params, open_source, target_tensor_name
from dflash_jax.decoder import Pair
from dflash_jax.functional import Params
from dflash_jax.generate import EMBEDDED_NAME, LLM, find_pair
from dflash_jax.hf_config import read_target_config
from dflash_jax.sharding import Sharding
from dflash_jax.tokenizer import load_tokenizer
from train.answers import answers_path, check_settings, claim, skipped_path
from train.contract import weights_digest
from train.evaluate import EvaluationFile, evaluate_settings, one_line, settings_of, untrained
from train.features import RowsWithFeatures, write_features
from train.files import read_json, write_whole
from train.initial import draft_from_target, random_draft
from train.loop import check_rows_split, train
from train.mesh import training_sharding
from train.packing import PackedDataset, write_packed
from train.prompts import Prompt, clean_self_written, drop_contaminated, wording
from train.questions import Question
from train.recipes import Recipe
from train.regenerate import regenerate, self_written_prompts
from train.report import write_report
from train.samples import DataError, Sample, Tally, is_held_out, read_samples
from train.stacked import FrozenTarget
from train.target import TargetRecipe, make_target

Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Run:
    """One recipe at work in one folder.

    ``target``: in place of the recipe's. ``data``: training samples in place of the target's own
    answers. ``seconds``: of each of the slow stages. ``features``: keep the target's features on
    disk, for data that is seen more than once. ``mesh``: data x fsdp x model of training.
    """

    recipe: Recipe
    work: Path
    questions: Sequence[Question] = ()
    evaluation: Sequence[Question] = ()
    data: Sequence[Path] = ()
    target: str | None = None
    seconds: float = math.inf
    features: bool = False
    mesh: tuple[int, int, int] = (0, 1, 1)
    max_bad_share: float = 0.01
    report: Report = print

    @property
    def target_name(self) -> str | None:
        """What to load: a path, a hub id, or None for the embedded target."""
        if self.target is None and isinstance(self.recipe.target, TargetRecipe):
            return str(self.work / "target")
        return self.target if self.target is not None else self.recipe.target  # pyright: ignore[reportReturnType]

    @property
    def draft(self) -> Path:
        return self.work / "draft"

    def check(self, stages: Collection[str]) -> None:
        """Raises ValueError naming what the recipe, the target or the devices would make fail in
        one of ``stages``, before anything slow begins."""
        recipe = self.recipe
        if not set(stages) - {"report"}:
            return
        if {"target", "train"} & set(stages):
            check_rows_split(recipe.loop, training_sharding(*self.mesh))
        if isinstance(recipe.target, TargetRecipe) and self.target is None:
            config = recipe.target.config
        else:
            path, _ = find_pair(self.target_name, None, speculation=False)
            config = read_target_config(path)
            if {"regenerate", "evaluate"} & set(stages):
                tokenizer = load_tokenizer(path)
                if tokenizer is None or tokenizer.chat_template is None:
                    raise ValueError(
                        f"{self.target_name or EMBEDDED_NAME} has no tokenizer with a chat "
                        "template, which the stages regenerate and evaluate need"
                    )
        draft = recipe.draft_config(config)
        if recipe.initial == "target" and draft.intermediate_size != config.intermediate_size:
            raise ValueError(
                "a draft whose initial weights are the target's needs the target's "
                f"intermediate_size {config.intermediate_size}, got {draft.intermediate_size}"
            )
        if "train" in stages and self.features and recipe.loop.objective.loss.kl:
            raise ValueError(
                "--offline-features: the recipe's loop.objective.loss.kl is "
                f"{recipe.loop.objective.loss.kl}, and KL needs the target itself in every step; "
                "leave the flag out, or --set loop.objective.loss.kl=0"
            )

    def make_target(self) -> None:
        recipe, folder = self.recipe.target, self.work / "target"
        if not isinstance(recipe, TargetRecipe) or self.target is not None:
            return
        if (folder / "config.json").is_file():
            held = dataclasses.asdict(read_target_config(folder))
            for name, wanted in dataclasses.asdict(recipe.config).items():
                if held[name] != wanted:
                    raise ValueError(
                        f"{folder} is a target with {name} = {held[name]}, and this run asks for "
                        f"{wanted}; give the same settings, or another --work"
                    )
            self.report(f"{folder} is there already")
            return
        partial = folder.with_name("target.partial")
        shutil.rmtree(partial, ignore_errors=True)
        make_target(recipe, partial, training_sharding(*self.mesh), report=self.report)
        partial.rename(folder)

    def regenerate(self) -> None:
        """Every kind of answer gets an equal share of the questions, in an order that mixes their
        sources, so that a budget that ends early cuts all of them. Once done, or cut by its
        budget, it is not gone on with: training has begun on what there is."""
        recipe, folder = self.recipe, self.work / "answers"
        started = time.perf_counter()
        done = folder / "done.json"
        asked = hashlib.sha256("\n".join(q.id for q in self.questions).encode()).hexdigest()
        name = (self.target_name or EMBEDDED_NAME).rstrip("/")
        settings = {
            "target": "target" if name == str(self.work / "target") else name,  # WORK may move
            "dtype": self.recipe.dtype,
            "answers": [dataclasses.asdict(sampling) for sampling in recipe.answers],
            "self_written": recipe.self_written,
            "seed": recipe.loop.seed,
            "template_variables": recipe.template_variables,
        }
        check_settings(folder, settings)
        if read_json(done) == {"questions": asked}:
            self.report(f"answers are there; remove {done} to go on answering")
            return
        llm = self._load(engine=dataclasses.replace(recipe.engine, speculation=False))
        claim(folder, settings)
        questions = [*self.questions, *self._self_written(llm, folder / "self_written.jsonl")]
        questions = random.Random(recipe.loop.seed).sample(questions, len(questions))
        kinds = len(recipe.answers)
        for number, sampling in enumerate(recipe.answers):
            left = self.seconds - (time.perf_counter() - started)
            written = regenerate(
                llm,
                questions[number::kinds],
                answers_path(folder, 0, 1),
                sampling=sampling,
                template_variables=recipe.template_variables,
                seconds=left / (kinds - number),
            )
            self.report(f"answers at T = {sampling.temperature}: {written}")
        answers = answers_path(folder, 0, 1)
        if not answers.exists() or not answers.stat().st_size:
            raise DataError(
                f"none of {len(questions)} questions has an answer; {skipped_path(answers)} says "
                "why of all that were asked"
            )
        write_whole(done, json.dumps({"questions": asked}) + "\n")

    def train(self) -> bool:
        """Whether the run came to its end; if not, the same call goes on."""
        recipe, sharding = self.recipe, training_sharding(*self.mesh)
        path, _ = find_pair(self.target_name, None, speculation=False)
        # Before the target is loaded: data are more often wrong than it is.
        dataset, held_out = self._packed(path)
        pair, params = load_target(self.target_name, sharding, jnp.dtype(self.recipe.dtype))
        draft_config = recipe.draft_config(pair.target_config)
        pair = Pair.of(pair.target_config, draft_config, sharding, pair.dtype)
        meta = dataset.meta
        self.report(
            f"{meta.rows} rows of {meta.row_length}: {meta.documents} documents, "
            f"{meta.supervised} supervised tokens; {len(held_out) if held_out else 0} rows held out"
        )
        start = draft_from_target if recipe.initial == "target" else random_draft
        draft = start(pair, params, recipe.loop.seed)
        target = FrozenTarget.of(pair).stack(params)
        del params  # the stacked copy alone stays
        seconds = min(self.seconds, recipe.loop.seconds)
        trained = train(
            pair,
            target,
            draft,
            self._with_features(pair, target, dataset),
            dataclasses.replace(recipe.loop, seconds=seconds),
            held_out=RowsWithFeatures(held_out) if held_out else None,
            work=self.work,
            fingerprint=meta.fingerprint,
        )
        if trained.finished:
            masters = multihost_utils.process_allgather(trained.draft, tiled=True)
            if jax.process_index() == 0:
                export_draft(self.draft, draft_config, masters, recipe.dtype)
                self.report(f"exported step {trained.step} to {self.draft}")
        else:
            self.report(f"stopped after step {trained.step}; the same command goes on from there")
        return trained.finished

    def evaluate(self) -> None:
        recipe = self.recipe
        questions = self.evaluation
        llm = self._load(draft=str(self.draft), engine=recipe.evaluation)
        settings = list(
            settings_of(
                recipe.evaluated_blocks, recipe.evaluated_temperatures, recipe.evaluated_sampling
            )
        )
        shared = {
            "target": llm.name,
            "draft": str(self.draft),
            "dtype": self.recipe.dtype,
            "max_new_tokens": recipe.evaluation_tokens,
            "template_variables": recipe.template_variables,
        }
        file = EvaluationFile(self.work / "evaluation.json", shared)
        drafts = {"trained": llm}
        if recipe.evaluate_untrained:
            drafts["untrained"] = untrained(llm, recipe.loop.seed)
        for label, drafting in drafts.items():
            # A baseline needs no second block size.
            count = len(settings if label == "trained" else recipe.evaluated_temperatures)
            for result in evaluate_settings(
                drafting,
                questions,
                settings[:count],
                recipe.evaluation,
                max_new_tokens=recipe.evaluation_tokens,
                template_variables=recipe.template_variables,
                label=label,
            ):
                file.add(result)
                self.report(one_line(result))

    def write_report(self) -> None:
        self.report(f"wrote {write_report(self.work)}")

    def _load(self, **options: Any) -> LLM:
        return dflash_jax.load(self.target_name, dtype=self.recipe.dtype, **options)

    def _self_written(self, llm: LLM, path: Path) -> list[Question]:
        """Written once, and read where a run goes on: the answers' ids must stay theirs."""
        if not self.recipe.self_written:
            return []
        if not path.exists():
            own = [question.messages[-1]["content"] for question in self.questions]
            judged = [
                Prompt(q.id, q.source, str(q.messages[-1]["content"])) for q in self.evaluation
            ]
            texts = self_written_prompts(
                llm, self.recipe.self_written, seed=1, seconds=self.seconds / 6
            )
            seen = {wording(str(text)) for text in (*own, *(p.text for p in judged))}
            clean = clean_self_written(texts, seen)
            prompts = [Prompt(f"self/{i}", "self-written", text) for i, text in enumerate(clean)]
            kept, _ = drop_contaminated(prompts, {"evaluation": judged})
            self.report(f"self-written questions: {len(texts)} whole, {len(kept)} kept")
            lines = (json.dumps(dataclasses.asdict(prompt)) + "\n" for prompt in kept)
            write_whole(path, "".join(lines))
        lines = path.read_text(encoding="utf-8").splitlines()
        return [Question.of_text(**json.loads(line)) for line in lines]

    def _packed(self, target: Path) -> tuple[PackedDataset, PackedDataset | None]:
        """(rows to learn, held-out rows), packed anew where the files are not those packed."""
        recipe, folder = self.recipe, self.work / "packed"
        paths = list(self.data) or sorted((self.work / "answers").glob("answers-*.jsonl"))
        if not paths:
            raise DataError("no training data: give --data, or run the stage regenerate first")
        source = _as_json(
            {
                "files": [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths],
                "row_length": recipe.row_length,
                "held_out_share": recipe.held_out_share,
                "seed": recipe.loop.seed,
                "template_variables": recipe.template_variables,
                "max_bad_share": self.max_bad_share,
                "target": _tokenizer_digest(target),
            }
        )
        stamp = folder / "source.json"
        packed = read_json(stamp) == source
        error = None
        if jax.process_index() == 0 and not packed:
            try:
                shutil.rmtree(folder, ignore_errors=True)
                self._pack(paths, folder, target)
                write_whole(stamp, json.dumps(source, indent=1) + "\n")
            except Exception as caught:  # raised below, in every process
                error = caught
        # The others would otherwise wait for rows that never come.
        if not np.all(multihost_utils.process_allgather(np.bool_(error is None))):
            raise error or DataError("process 0 could not pack the data, and says why")
        held_out = folder / "held_out"
        return (
            PackedDataset.open(folder / "train"),
            PackedDataset.open(held_out) if held_out.is_dir() else None,
        )

    def _pack(self, paths: Sequence[Path], folder: Path, target: Path) -> None:
        recipe = self.recipe
        vocab_size = read_target_config(target).vocab_size

        tally, judged = Tally(), []
        every = read_samples(
            paths,
            vocab_size=vocab_size,
            tokenizer=load_tokenizer(target),
            template_options=recipe.template_variables,
            max_bad_share=self.max_bad_share,
            tally=tally,
            report=self.report,
        )

        def learnt() -> Iterator[Sample]:
            for sample in every:
                if is_held_out(sample, recipe.held_out_share):
                    judged.append(sample)
                else:
                    yield sample

        folder.mkdir(parents=True)
        length, seed = recipe.row_length, recipe.loop.seed
        write_packed(folder / "train", learnt(), length, seed=seed, tally=tally)
        if judged:
            write_packed(folder / "held_out", judged, length, seed=seed)

    def _with_features(
        self, pair: Pair, target: Params, dataset: PackedDataset
    ) -> RowsWithFeatures:
        if not self.features:
            return RowsWithFeatures(dataset)
        contract = {
            "target": weights_digest(target),
            "config": dataclasses.asdict(pair.target_config),
            "taps": list(pair.taps),
            "dtype": pair.dtype.name,
            "data": dataset.meta.fingerprint,
        }
        folder, loop = self.work / "features", self.recipe.loop
        write_features(
            pair,
            target,
            dataset,
            folder,
            contract,
            batch_rows=loop.batch_rows // loop.accumulation,
            tiles=loop.objective.tiles,
            report=self.report,
        )
        return RowsWithFeatures(dataset, folder, contract)


def load_target(
    name: str | None, sharding: Sharding, dtype: jnp.dtype
) -> tuple[Pair, dict[str, jax.Array]]:
    """A target alone on a training mesh: (pair without a draft, parameters). ``name`` as in
    ``dflash_jax.load``, and its errors."""
    path, _ = find_pair(name, None, speculation=False)
    config = read_target_config(path)
    pair = Pair.of(config, None, sharding, dtype)
    names = target_tensor_name(tie_word_embeddings=config.tie_word_embeddings)
    return pair, load_params(pair.target.placed(sharding), open_source(path), names)


def _tokenizer_digest(target: Path) -> str:
    """Of all that turns text and conversations into ids."""
    tokenizer = load_tokenizer(target)
    parts = [str(read_target_config(target).vocab_size)]
    if tokenizer is not None:
        parts += [tokenizer.backend_tokenizer.to_str(), str(tokenizer.chat_template)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _as_json(value: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(value))
