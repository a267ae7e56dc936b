"""Prompts for the target to answer, and those that judge the draft (mixture.py)."""

from train.prompts.prompt import Prompt, clean_self_written, drop_contaminated, wording

__all__ = ["Prompt", "clean_self_written", "drop_contaminated", "wording"]
