"""The commands beside the recipes: regenerate, evaluate, report, plan, bench."""
