"""A tiny checkpoint with a tokenizer, for tests that go through text: the goldens' b = 16 pair."""

import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

GOLDEN = Path(__file__).parent / "goldens" / "qwen3-tied-b16"
VOCAB = 288
SPECIAL = ["<pad>", "<s>", "</s>"]  # ids 0, 1, 2, as in the checkpoint's config
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if loud %}LOUD {% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: three special tokens, every byte, and a few merges."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat and the hat 😀 שלום"] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def write_model(folder: Path) -> tuple[Path, Path]:
    """(target, draft) folders, the target's with a tokenizer and a chat template."""
    target, draft = folder / "target", folder / "draft"
    shutil.copytree(GOLDEN / "target", target)
    shutil.copytree(GOLDEN / "draft", draft)
    make_tokenizer().save_pretrained(target)
    return target, draft
