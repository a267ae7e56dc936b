"""From committed tokens to text, delta by delta: nothing is sent that a later token could change.

The non-streamed answer is the join of the same deltas, so the two cannot differ.
"""

import dataclasses
from collections.abc import Sequence

from dflash_jax.request import FinishReason
from dflash_jax.tokenizer import PreTrainedTokenizerFast

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) valid UTF-8


@dataclasses.dataclass(frozen=True)
class Delta:
    """New text and the new token ids; ``tokens`` may be ahead of ``text``, never past its end."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None


class TextStream:
    """Detokenises one output, however its tokens are split over steps, and ends it at a stop
    string.

    Of several stop strings the one completed first wins, so the result does not depend on how the
    text falls into tokens or steps. The text ends before the stop (after it with
    ``include_stop``), and the tokens at the one that completed it. A final EOS or stop token stays
    among the tokens; its text appears only with ``include_stop``. No token is dropped from the
    text by its id: only the tokenizer's own special tokens, with ``skip_special_tokens``.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ):
        """Raises ValueError on an empty stop string."""
        if "" in stop:
            raise ValueError("a stop string is empty; give at least one character")
        self._stop, self._include_stop = tuple(stop), include_stop
        self._detokenizer = _Detokenizer(tokenizer, skip_special_tokens)
        self._held = ""  # may begin a stop string
        self.finish_reason: FinishReason | None = None

    def feed(self, tokens: Sequence[int], finish_reason: FinishReason | None = None) -> Delta:
        """The next tokens of the output, in order; ``finish_reason`` with the last.

        The delta's reason is "stop" where a stop string was found, whatever was given. Raises
        ValueError once the output has ended.
        """
        if self.finish_reason is not None:
            raise ValueError(f"the output has ended already, by {self.finish_reason!r}")
        silent = 1 if finish_reason == "stop" and not self._include_stop else 0
        spoken = tokens[: len(tokens) - silent]
        # One token a piece, so that the token which completes a stop string is known.
        pieces = [[token] for token in spoken] if self._stop else [spoken]
        sent, read = "", 0
        for piece in pieces:
            read += len(piece)
            text, found = self._release(self._detokenizer.feed(piece))
            sent += text
            if found:
                return self._end(sent, tokens[:read], "stop")
        if finish_reason is None:
            return Delta(sent, tuple(tokens))
        text, found = self._release(self._detokenizer.flush())
        if found:
            return self._end(sent + text, tokens, "stop")
        return self._end(sent + text + self._held, tokens, finish_reason)

    def _end(self, text: str, tokens: Sequence[int], reason: FinishReason) -> Delta:
        self.finish_reason = reason
        return Delta(text, tuple(tokens), reason)

    def _release(self, text: str) -> tuple[str, bool]:
        """What may be sent now that ``text`` has come, and whether a stop string was found."""
        text = self._held + text
        found = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            end, start = min(found)
            return text[: end if self._include_stop else start], True
        longest = min(max(map(len, self._stop), default=1) - 1, len(text))
        tails = (text[len(text) - n :] for n in range(longest, 0, -1))
        self._held = next((t for t in tails if any(s.startswith(t) for s in self._stop)), "")
        return text[: len(text) - len(self._held)], False


class _Detokenizer:
    """Decodes a window of tokens that begins at a character's edge, so that a step costs the same
    however long the output is."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, skip_special_tokens: bool):
        # The backend itself: transformers' own decode may also tidy spaces before punctuation.
        self._backend, self._skip = tokenizer.backend_tokenizer, skip_special_tokens
        self._window: list[int] = []
        self._edge = 0  # tokens of the window up to the last edge
        self._sent = 0  # characters of the window's text already returned

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that no later token can change."""
        self._window += tokens
        text = self._decode(self._window)
        # A byte-fallback decoder writes a replacement for every byte of an unfinished run, a
        # byte-level one for the last character only: all of them may still become something else.
        stable = text.rstrip(REPLACEMENT)
        new = stable[self._sent :]
        if new and stable == text:
            # Keep what came since the last edge: decoders that strip a leading space need a token
            # with text before the new ones.
            del self._window[: self._edge]
            self._edge, self._sent = len(self._window), len(self._decode(self._window))
        else:
            self._sent = max(self._sent, len(stable))
        return new

    def flush(self) -> str:
        """The rest; an unfinished character becomes a replacement."""
        new = self._decode(self._window)[self._sent :]
        self._sent += len(new)
        return new

    def _decode(self, tokens: list[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=self._skip)
