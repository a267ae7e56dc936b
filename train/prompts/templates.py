"""A small language for randomised prompts, and the framings that several sources share.

A template is a sentence with fields in braces. What a field may say:

    {topic}            a draw from the word list "topic"; the same field again is the same word
    {topic.2}          another draw from that list, never equal to {topic}
    {n=3..12}          a random integer, kept as n; {n} repeats it
    {n=60..240/20}     the same in steps of 20, counted from the lower end
    {40..90}           a random integer that nothing else refers to
    {n*4} {n+k} {n-1}  a sum, difference or product of kept numbers and constants
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random

Words = Mapping[str, Sequence[str]]

_FIELD = re.compile(r"\{([^{}]+)\}")
_RANGE = re.compile(r"(?:([a-z]\w*)=)?(\d+)\.\.(\d+)(?:/(\d+))?")
_SUM = re.compile(r"(\w+)([*+-])(\w+)")


def fill(template: str, words: Words, random: Random) -> str:
    """Writes one prompt from a template.

    Raises KeyError for a field that is neither a kept number nor a word list, and IndexError
    where a word list is too short for the different draws asked of it.
    """
    numbers: dict[str, int] = {}
    chosen: dict[str, str] = {}

    def value(name: str) -> int:
        return int(name) if name.isdigit() else numbers[name]

    def write(match: re.Match[str]) -> str:
        field = match[1]
        if drawn := _RANGE.fullmatch(field):
            name, low, high, step = drawn.groups()
            number = random.randrange(int(low), int(high) + 1, int(step or 1))
            if name:
                numbers[name] = number
            return str(number)
        if terms := _SUM.fullmatch(field):
            left, right = value(terms[1]), value(terms[3])
            return str({"*": left * right, "+": left + right, "-": left - right}[terms[2]])
        if field in numbers:
            return str(numbers[field])
        if field not in chosen:
            bank = field.partition(".")[0]
            if bank not in words:
                raise KeyError(f"{field!r} is no kept number and no word list, in {template!r}")
            chosen[field] = random.choice([w for w in words[bank] if w not in chosen.values()])
        return chosen[field]

    return _FIELD.sub(write, template)


def draw(
    templates: Sequence[str],
    words: Words | Sequence[Words],
    frames: Sequence[str],
    count: int,
    random: Random,
    bare: float = 0.4,
) -> list[str]:
    """Writes up to `count` different prompts, going through the templates in turn.

    A share `bare` of them stands alone, the others sit in a frame (a text with one "{}").
    `words` may be several tables: each prompt uses one (people and their pronouns).
    A template with few possible fillings repeats itself and is passed over, so the answer is
    shorter than asked only when five rounds of tries were not enough.
    """
    tables: Sequence[Words] = [words] if isinstance(words, Mapping) else words
    order = random.sample(list(templates), len(templates))
    texts: dict[str, None] = {}  # a dict keeps the order, a set would not
    for turn in range(5 * count):
        if len(texts) == count:
            break
        text = fill(order[turn % len(order)], random.choice(tables), random)
        texts[frame(text, frames, random, bare)] = None
    return list(texts)


def frame(text: str, frames: Sequence[str], random: Random, bare: float = 0.0) -> str:
    """Puts a text in a random frame, or leaves it bare with the given probability."""
    return text if random.random() < bare else random.choice(frames).replace("{}", text, 1)


SHOW_WORK = (
    "{} Show your work.",
    "{}\nShow your work.",
    "{} Explain each step.",
    "{} Explain how you got the answer.",
    "{}\n\nThink step by step.",
    "{}\nLet's think step by step.",
    "{}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "{}\n\nSolve this step by step and give the final number on the last line.",
    "Solve the problem step by step.\n\n{}",
    "Solve this problem: {}",
    "Question: {}\nAnswer:",
    "Q: {}",
    "Here is a question for you. {} Tell me why, too.",
    "I need help with my homework. {}",
    "Can you help me with this? {}",
    "My teacher gave us this one: {} How do I do it?",
    "{} Walk me through the solution.",
    "{} Give the answer with a short explanation.",
    "Please solve: {}",
    "{}\nWrite the calculation first, then the result.",
    'Math problem: {}\n\nShow all the steps, then write "The answer is" and the result.',
    "{} Check your answer at the end.",
    "As a patient maths tutor, explain how to work this out: {}",
    "{} Break it into small steps.",
)

ASKING = (
    "{}?",
    "{}? Please answer in detail.",
    "{}? Explain in simple words.",
    "{}? Answer in one short paragraph.",
    "Hi! {}?",
    "I was wondering: {}?",
    "Quick question: {}?",
    "{}? Give some background as well.",
    "Answer this question and explain your reasoning: {}?",
    "{}? A few sentences are enough.",
    "My friend asked me this: {}? What should I say?",
    "Question: {}?",
)

CHOOSING = (
    "{question}\n{options}",
    "{question}\n{options}\n\nWhich option is correct? Explain why.",
    "Choose the best answer.\n\n{question}\n{options}",
    "Answer the multiple choice question and give a reason for your choice.\n\n"
    "Question: {question}\n{options}",
    "{question}\n{options}\n\nAnswer with the letter first, then explain.",
    "Which of these answers fits best, and what is wrong with the others?\n\n{question}\n{options}",
)

READING = (
    "{passage}\n\n{question}",
    "Read the text and answer the question.\n\nText: {passage}\n\nQuestion: {question}",
    'Here is a passage:\n\n"{passage}"\n\n{question}',
    "Passage:\n{passage}\n\nUse only this passage to answer. {question}",
)

CONDENSING = (
    "Summarize the following text in one sentence.\n\n{}",
    "Summarize this in two or three sentences:\n\n{}",
    "What is the main idea of this passage?\n\n{}",
    "List the key points of the text below as bullet points.\n\n{}",
    "Rewrite the following paragraph in simpler words for a ten-year-old.\n\n{}",
    "Extract all names of people, places and organisations from this text.\n\n{}",
    "{}\n\nTL;DR?",
    "Give this passage a title and explain your choice:\n\n{}",
    "Extract every date and number mentioned below, with what each refers to.\n\n{}",
    "Write three questions that the following text answers, with their answers.\n\n{}",
    "Turn the text below into a short news report.\n\n{}",
    "Rewrite this text in a more formal tone:\n\n{}",
    "Paraphrase the following passage:\n\n{}",
    "Extract the important facts from the text as JSON with sensible keys.\n\n{}",
)
